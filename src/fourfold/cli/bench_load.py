"""`fourfold bench load` and `fourfold bench itl`: a server at and beyond its capacity."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import click

from fourfold.cli import options
from fourfold.cli.base import Command
from fourfold.cli.bench_output import json_option, print_table, show

if TYPE_CHECKING:
    from fourfold.bench.load.http import Server
    from fourfold.bench.load.interference import Interference
    from fourfold.bench.load.measure import Prepared
    from fourfold.bench.load.overload import ShareReport
    from fourfold.bench.load.report import LoadReport

IDS = (1000, 30000)


def _shares(ctx: click.Context, param: click.Parameter, value: str) -> tuple[float, ...]:
    try:
        shares = tuple(float(each) / 100 for each in value.split(","))
    except ValueError:
        shares = (-1.0,)
    if any(not 0 < share <= 100 for share in shares):
        raise click.BadParameter(f"{value!r} is not a list of percentages, like 50,80,100,120")
    return shares


def server_options(command: Any) -> Any:
    for option in (
        click.option(
            "--base-url", "--url", default="http://127.0.0.1:8000", show_default=True, help="The server."
        ),
        click.option("--model", "-m", help="Model to ask for. [default: the first the server names]"),
        click.option("--api-key", help="Key sent along."),
        click.option("--allow-remote", is_flag=True, help="Load a server that is not on this machine."),
        click.option(
            "--seed", type=click.IntRange(0), default=0, show_default=True, help="Of prompts and times."
        ),
    ):
        command = option(command)
    return command


@click.command(cls=Command)
@server_options
@click.option(
    "--rate-of-capacity",
    "shares",
    callback=_shares,
    default="50,80,100,120",
    show_default=True,
    metavar="PERCENT,...",
    help="Loads, each a share of the measured capacity.",
)
@click.option("--seconds", type=click.FloatRange(1), default=120.0, show_default=True, help="Of each load.")
@click.option("--concurrency", type=options.COUNT, default=32, show_default=True, help="To measure capacity.")
@click.option("--capacity-requests", type=options.COUNT, default=200, show_default=True, help="For the same.")
@click.option("--input-len", type=options.COUNT, default=128, show_default=True, help="Tokens of prompts.")
@click.option("--output-len", type=options.COUNT, default=64, show_default=True, help="Tokens of answers.")
@click.option("--range-ratio", type=click.FloatRange(0, 1, max_open=True), default=0.5, show_default=True,
              help="Lengths vary evenly by this share.")  # fmt: skip
@click.option("--slo-ttft", type=click.FloatRange(0, min_open=True), default=2000.0, show_default=True,
              metavar="MS", help="Time to first token that is good; sent along as ttft_timeout.")  # fmt: skip
@click.option("--slo-tpot", type=click.FloatRange(0, min_open=True), metavar="MS",
              help="Time per output token that counts as good. [default: any]")  # fmt: skip
@json_option
def load(base_url: str, api_key: str | None, allow_remote: bool, json_to: str | None, **flags: Any) -> int:
    """Measure a server's capacity, then load it with shares of that: what those get who are served (time to
    first token, time between tokens, how many are within the objective), and how fast the others are refused.

    Fails if a request failed otherwise than by a refusal.
    """
    server, model = find_server(base_url, api_key, allow_remote, flags["model"])
    full, reports = asyncio.run(_loads(server, model, flags))
    record = {
        "base_url": base_url, "model": model, "seed": flags["seed"],
        "input_len": flags["input_len"], "output_len": flags["output_len"],
        "range_ratio": flags["range_ratio"],
        "slo_ttft_ms": flags["slo_ttft"], "slo_tpot_ms": flags["slo_tpot"],
        "capacity": full.record(), "runs": [each.record() for each in reports],
    }  # fmt: skip
    show(record, json_to, lambda: _print_loads(model, full, reports))
    return 1 if any(each.late for each in reports) else 0


async def _loads(server: Server, model: str, flags: dict[str, Any]) -> tuple[LoadReport, list[ShareReport]]:
    from fourfold.bench.load.dataset import RandomItems, RequestShape
    from fourfold.bench.load.overload import at_share, capacity
    from fourfold.bench.load.report import Objective

    items = RandomItems(flags["input_len"], flags["output_len"], flags["range_ratio"], 0, *IDS)
    ttft = flags["slo_ttft"]
    free = RequestShape(model, "completions", 0.0, True)
    timed = RequestShape(model, "completions", 0.0, True, extra={"ttft_timeout": ttft / 1e3})
    pairs = [f"ttft:{ttft}", *([f"tpot:{flags['slo_tpot']}"] if flags["slo_tpot"] else ())]
    objective = Objective.parse(pairs)
    assert objective is not None
    seed, timeout = flags["seed"] + 1, 600.0
    full = await capacity(
        server,
        lambda count, seed: free.prepare(items.items(count, seed)),
        flags["concurrency"],
        flags["capacity_requests"],
        seed,
        timeout,
    )
    click.echo(f"capacity: {full.request_rate:.2f} requests/s, {full.output_rate:.0f} output tok/s", err=True)
    reports = []
    for number, share in enumerate(flags["shares"]):
        reports.append(
            await at_share(
                server,
                lambda count, seed: timed.prepare(items.items(count, seed)),
                share,
                full.request_rate,
                flags["seconds"],
                objective,
                seed=seed + 1 + number,
                timeout=timeout,
            )
        )
    return full, reports


def _print_loads(model: str, full: LoadReport, reports: list[ShareReport]) -> None:
    def cell(each: ShareReport, metric: str, percent: float) -> str:
        found = each.load.distributions[metric]
        return "" if found is None else f"{found.percentiles[percent] * 1e3:,.1f}"

    rows = []
    for each in reports:
        rows.append(
            (
                f"{each.share:.0%}",
                f"{each.load.requests / each.load.seconds:.2f}" if each.load.seconds else "",
                f"{each.load.goodput or 0:.2f}",
                f"{each.within / each.accepted:.1%}" if each.accepted else "",
                *(cell(each, metric, percent) for metric in ("ttft", "itl") for percent in (50, 90, 99)),
                str(each.refused.get(429, 0)),
                str(each.refused.get(503, 0)),
                f"{each.refusal.percentiles[99] * 1e3:,.0f}" if each.refusal else "",
                str(each.late),
            )
        )
    columns = (
        "load", "sent/s", "good/s", "accepted in time", "ttft p50", "p90", "p99", "itl p50", "p90", "p99",
        "429", "503", "refused in p99", "late",
    )  # fmt: skip
    print_table(
        f"{model}: capacity {full.request_rate:.2f} requests/s, {full.output_rate:,.0f} output tok/s "
        "(times in milliseconds)",
        columns,
        rows,
    )


@click.command(cls=Command)
@server_options
@click.option("--streams", type=options.COUNT, default=4, show_default=True, help="Answers that run.")
@click.option("--prompt-len", type=options.COUNT, default=4000, show_default=True, help="Of the long prompt.")
@click.option(
    "--output-len",
    type=options.COUNT,
    default=4000,
    show_default=True,
    help="Tokens per answer; it is left when the prompt is answered.",
)
@click.option("--quiet-seconds", type=click.FloatRange(0.1), default=2.0, show_default=True,
              help="Measured before the prompt comes, and after it is answered.")  # fmt: skip
@click.option("--repeats", "-r", type=click.IntRange(1, 100), default=3, show_default=True, help="Runs.")
@json_option
def itl(base_url: str, api_key: str | None, allow_remote: bool, json_to: str | None, **flags: Any) -> int:
    """Measure what a long prompt does to the answers that run: the time between their tokens while it is
    computed, and the mean of before and after."""
    server, model = find_server(base_url, api_key, allow_remote, flags["model"])
    found = asyncio.run(_interferences(server, model, flags))
    names = ("streams", "prompt_len", "output_len", "quiet_seconds", "seed")
    record = {
        "base_url": base_url,
        "model": model,
        **{name: flags[name] for name in names},
        "runs": [each.record() for each in found],
    }
    show(record, json_to, lambda: _print_interferences(model, flags, found))
    return 0


async def _interferences(server: Server, model: str, flags: dict[str, Any]) -> list[Interference]:
    from fourfold.bench.load.dataset import Item, RandomItems, RequestShape
    from fourfold.bench.load.interference import interference

    shape = RequestShape(model, "completions", 0.0, True)

    def requests(length: int, answer: int, count: int, seed: int) -> list[Prepared]:
        made: list[Item] = RandomItems(length, answer, 0.0, 0, *IDS).items(count, seed)
        return shape.prepare(made)

    found = []
    for number in range(flags["repeats"]):
        seed = flags["seed"] + 2 * number
        found.append(
            await interference(
                server,
                requests(16, flags["output_len"], flags["streams"], seed),
                requests(flags["prompt_len"], 1, 1, seed + 1)[0],
                flags["quiet_seconds"],
            )
        )
    return found


def _print_interferences(model: str, flags: dict[str, Any], found: list[Interference]) -> None:
    rows = []
    for each in found:
        sides = (
            ("quiet, before", each.before),
            ("beside the prompt", each.beside),
            ("quiet, after", each.after),
        )
        for name, side in sides:
            rows.append(
                (name, *(f"{side.percentiles[p] * 1e3:.2f}" for p in (50, 90, 99)), f"{side.max * 1e3:.2f}")
            )
        ratios = (*(f"{each.ratio(p):.2f}" for p in (50, 90, 99)), f"{each.max_ratio:.2f}")
        rows.append((f"ratio (its first token after {each.prompt_seconds:.2f} s)", *ratios))
    print_table(
        f"{model}: time between tokens of {flags['streams']} answers, milliseconds, and a prompt of "
        f"{flags['prompt_len']} tokens",
        ("", "p50", "p90", "p99", "max"),
        rows,
    )


def find_server(
    base_url: str, api_key: str | None, allow_remote: bool, model: str | None
) -> tuple[Server, str]:
    from fourfold.bench.load.http import Server
    from fourfold.bench.load.models import served_models

    server = Server.parse(base_url, api_key)
    if not allow_remote:
        server.require_loopback()
    return server, model or asyncio.run(served_models(server))[0]
