"""`fourfold top [URL]`."""

from __future__ import annotations

import sys
import time
from typing import Any

import click
import msgspec

from fourfold.cli.base import Command
from fourfold.cli.output import tolerant_output
from fourfold.cli.top_source import History, NoStatusError, Source, server_url
from fourfold.config import Environment

DEFAULT_URL = "http://127.0.0.1:8000"


def _url(ctx: click.Context, param: click.Parameter, value: str) -> str:
    try:
        return server_url(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


@click.command(cls=Command)
@click.argument("url", default=DEFAULT_URL, callback=_url)
@click.option("--api-key", metavar="KEY", help="The server's key. [default: FOURFOLD_API_KEY, if set]")
@click.option(
    "--interval",
    "-d",
    type=click.FloatRange(0.1, 3600),
    default=1.0,
    show_default=True,
    help="Seconds between looks.",
)
@click.option(
    "--once", is_flag=True, help="Show one interval and leave, as it does when output is no terminal."
)
@click.option(
    "--json", "as_json", is_flag=True, help="A line of JSON per interval, with rates, instead of a view."
)
def top(url: str, api_key: str | None, interval: float, once: bool, as_json: bool) -> None:
    """Watch a server: its requests, its KV cache and its speed. URL may be just host:port or :port."""
    source = Source(url, api_key or Environment.read().api_key, max(10.0, interval))
    if as_json:
        _print_json(source, interval, once)
    elif once or not sys.stdout.isatty():
        _print_once(source, interval)
    else:
        _watch(source, interval)


def _two(source: Source, interval: float) -> tuple[History, dict[str, Any]]:
    history = History()
    history.add(source.status()[0])
    time.sleep(interval)
    status, raw = source.status()
    history.add(status)
    return history, raw


def _print_json(source: Source, interval: float, once: bool) -> None:
    out = tolerant_output()
    history, raw = _two(source, interval)
    while True:
        rates = history.rates[-1] if history.rates else None
        line = {**raw, "rates": None if rates is None else _as_dict(rates)}
        print(msgspec.json.encode(line).decode(), file=out, flush=True)
        if once:
            return
        time.sleep(interval)
        status, raw = source.status()
        history.add(status)


def _as_dict(rates: Any) -> dict[str, Any]:
    """Tokens and requests per second."""
    return {
        "prefill_tokens_per_second": rates.prefill,
        "generation_tokens_per_second": rates.decode,
        "requests_per_second": rates.requests,
        "cached_share": rates.hit_share,
    }


def _print_once(source: Source, interval: float) -> None:
    from rich.console import Console

    from fourfold.cli.top_view import frame

    history, _ = _two(source, interval)
    console = Console(file=tolerant_output(), highlight=False)
    assert history.last is not None
    console.print(
        frame(history.last, history, console.width, 1000, url=source.url, unicode=_unicode(console.encoding))
    )


def _watch(source: Source, interval: float) -> None:
    """Until Ctrl-C. A server that goes away is waited for, once there was one."""
    from rich.console import Console
    from rich.live import Live

    from fourfold.cli.top_view import frame

    console = Console(highlight=False)
    history = History()
    history.add(source.status()[0])
    lost = ""
    since = 0.0
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            status = history.last
            assert status is not None
            live.update(
                frame(
                    status, history, console.width, console.height, url=source.url, lost=lost,
                    unicode=_unicode(console.encoding),
                ),
                refresh=True,
            )  # fmt: skip
            time.sleep(interval)
            try:
                history.add(source.status()[0])
                lost = ""
            except NoStatusError as error:
                if error.final:
                    raise
                since = since if lost else time.monotonic()
                lost = f"{error} (waiting for it for {time.monotonic() - since:.0f} s)"


def _unicode(encoding: str) -> bool:
    return encoding.lower().replace("-", "").startswith("utf")
