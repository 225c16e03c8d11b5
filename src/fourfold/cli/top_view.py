"""One frame of `fourfold top`: a status and its history as text for a terminal of a given width."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fourfold.cli.top_source import History, Prefix, Running, Status

BARS = "▁▂▃▄▅▆▇█"
ASCII_BARS = "_.-=+*#@"
STATES = (("live", "green", "█", "#"), ("in_transfer", "yellow", "▓", "%"), ("cached", "blue", "▒", "="))
"""KV states in the bar: name, colour, character, and the one for terminals without Unicode."""

_STATE_STYLES = {
    "decode": "green",
    "prefill": "cyan",
    "waiting": "yellow",
    "held": "yellow",
    "compiling": "magenta",
}


def frame(
    status: Status,
    history: History,
    width: int,
    height: int,
    *,
    url: str,
    unicode: bool = True,
    lost: str = "",
) -> RenderableType:
    """width, height: columns and lines there are. lost: why the status is an old one, if it is."""
    engine, kv = status.engine, status.kv
    parts: list[RenderableType] = [
        Text.assemble(
            ("Fourfold ", "bold"),
            (status.version, "bold"),
            f"  {clean(status.model)}  ",
            (url, "dim"),
            no_wrap=True,
        ),
    ]
    if lost or status.stale:
        parts.append(Text(clean(lost or f"as of the last heartbeat: {status.stale}"), "bold red"))
    parts.append(
        Text.assemble(
            ("running ", "dim"),
            f"{engine.running}/{status.max_num_seqs}  ",
            ("queue ", "dim"),
            (f"{engine.waiting}  ", "yellow" if engine.waiting else ""),
            ("finished ", "dim"),
            f"{engine.finished}  ",
            ("aborted ", "dim"),
            f"{engine.aborted}  ",
            ("preempted ", "dim"),
            (f"{engine.preemptions}  ", "yellow" if engine.preemptions else ""),
            ("RSS ", "dim"),
            _size(engine.rss_bytes),
        )
    )
    parts += [
        _curve("prefill", [rate.prefill for rate in history.rates], width, unicode),
        _curve("decode ", [rate.decode for rate in history.rates], width, unicode),
        _kv_bar(status, width, unicode),
        _kv_line(status),
    ]
    if kv.tree is not None:
        tree = kv.tree
        shares = [rate.hit_share for rate in history.rates if rate.hit_share is not None]
        parts.append(
            Text.assemble(
                ("tree ", "dim"),
                f"{tree.nodes} blocks, {tree.tokens} tokens",
                ("  pinned ", "dim"),
                f"{tree.pinned_tokens}",
                ("  prompt hits ", "dim"),
                f"{100 * shares[-1]:.0f} %" if shares else "-",
            )
        )
    room = max(1, height - len(parts) - 4)
    hottest = [] if kv.tree is None else kv.tree.hottest[: max(0, min(5, room // 3))]
    if hottest:
        room -= len(hottest) + 2
    parts.append(_requests(status.requests, max(1, room - 2), width))
    more = len(status.requests) - max(1, room - 2)
    notes = [f"{more} more"] if more > 0 else []
    notes += [f"{status.others} of other API keys"] if status.others else []
    if notes:
        parts.append(Text("and " + ", ".join(notes), "dim"))
    if hottest:
        parts.append(_prefixes(hottest, width))
    return Group(*parts)


def clean(text: str) -> str:
    """Without what would move the cursor or ring the bell: it may come from a prompt."""
    return "".join(c if c.isprintable() else " " for c in text)


def sparkline(values: Sequence[float], unicode: bool = True) -> str:
    """One character per value, in proportion to the largest."""
    bars = BARS if unicode else ASCII_BARS
    top = max(values, default=0.0)
    if top <= 0:
        return bars[0] * len(values)
    return "".join(bars[min(len(bars) - 1, int(value / top * len(bars)))] for value in values)


def bar(counts: Sequence[int], total: int, width: int) -> list[int]:
    """Columns of each count in a bar of `width` for `total`: what is there is seen, and the sum fits."""
    columns = [0 if count == 0 else max(1, round(count / max(1, total) * width)) for count in counts]
    while sum(columns) > width:
        columns[columns.index(max(columns))] -= 1
    return columns


def _curve(name: str, values: Sequence[float], width: int, unicode: bool) -> Text:
    now = f"{values[-1]:.1f}" if values else "-"
    text = Text.assemble((f"{name} ", "dim"), f"{now:>8} tok/s ", no_wrap=True)
    room = width - len(text)
    if room >= 8 and values:
        text.append(sparkline(list(values)[-min(room, 60) :], unicode), "cyan")
    return text


def _kv_bar(status: Status, width: int, unicode: bool) -> Text:
    kv = status.kv
    columns = max(4, min(width, 100) - 5)
    text = Text("KV [", no_wrap=True)
    shares = bar([getattr(kv, name) for name, *_ in STATES], kv.total, columns)
    for (_, style, block, plain), share in zip(STATES, shares, strict=True):
        text.append((block if unicode else plain) * share, style)
    text.append(("·" if unicode else ".") * (columns - sum(shares)), "dim")
    return text.append("]")


def _kv_line(status: Status) -> Text:
    kv = status.kv
    text = Text()
    for name, style, *_ in STATES:
        text.append(f"{name.replace('_', ' ')} ", "dim").append(f"{getattr(kv, name)}  ", style)
    text.append("free ", "dim").append(f"{kv.free}  ").append("of ", "dim").append(f"{kv.total} blocks")
    if not kv.balanced:
        text.append("  NOT BALANCED", "bold red")
    return text


def _requests(requests: Sequence[Running], rows: int, width: int) -> Table:
    wide, medium, tiny = width >= 76, width >= 50, width < 32
    table = Table(box=None, pad_edge=False, header_style="dim", show_edge=False)

    def column(name: str, **options: Any) -> None:
        table.add_column(name, no_wrap=True, overflow="crop", **options)

    if not tiny:
        column("request", max_width=12 if wide else 8)
    column("state")
    if not tiny:
        column("age", justify="right")
    if medium:
        column("prompt", justify="right")
        column("cached", justify="right")
    column("out", justify="right")
    column("tok/s", justify="right")
    if wide:
        column("preempted", justify="right")
    for each in requests[:rows]:
        cells: list[str | Text] = [] if tiny else [clean(each.id)[: 12 if wide else 8]]
        cells.append(Text(each.state, _STATE_STYLES.get(each.state, "")))
        cells += [] if tiny else [_age(each.age)]
        cells += [str(each.prompt_tokens), str(each.cached_tokens)] if medium else []
        cells += [str(each.generated_tokens), f"{each.tokens_per_second:.1f}"]
        cells += [str(each.preemptions or "")] if wide else []
        table.add_row(*cells)
    if not requests:
        table.add_row(Text("none", "dim"))
    return table


def _prefixes(prefixes: Sequence[Prefix], width: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", show_edge=False)
    table.add_column("hits", justify="right", no_wrap=True, overflow="crop")
    table.add_column("tokens", justify="right", no_wrap=True, overflow="crop")
    table.add_column("hottest prefixes", no_wrap=True, overflow="crop", max_width=max(8, width - 16))
    for each in prefixes:
        end = f" ... {clean(each.last_text)}" if each.last_text else ""
        table.add_row(
            str(each.hits),
            str(each.tokens),
            Text.assemble(("pinned ", "yellow") if each.pinned else "", clean(each.text) + end),
        )
    return table


def _age(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.0f} h"


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
