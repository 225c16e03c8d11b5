"""`fourfold bench kv-serve`: what a server's prefix cache saves, over HTTP."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fourfold.cli.base import Command
from fourfold.cli.bench_kv import workload_options
from fourfold.cli.bench_load import IDS, find_server, server_options
from fourfold.cli.bench_output import json_option, print_table, show

if TYPE_CHECKING:
    from fourfold.bench.load.report import LoadReport


@click.command(cls=Command)
@server_options
@workload_options
@json_option
def kv_serve(
    base_url: str, api_key: str | None, allow_remote: bool, json_to: str | None, **flags: Any
) -> None:
    """Play agents that share a system prompt, and a trace if one is given, against a server: prompt tokens
    that it found in its cache (as it says itself), the time of all, and the times to the first token. Give it
    a cold cache: the same --seed asks the same."""
    from fourfold.bench.kv.play import ChatAgents, Rounds, Traced, play
    from fourfold.bench.kv.workloads import MooncakeTrace
    from fourfold.bench.load.dataset import RequestShape
    from fourfold.bench.load.report import report
    from fourfold.progress import ReportedProgress

    server, model = find_server(base_url, api_key, allow_remote, flags["model"])
    workloads: list[Rounds] = [
        ChatAgents(flags["agents"], flags["turns"], flags["system_tokens"], seed=flags["seed"])
    ]
    if flags["trace"] is not None:
        longest = flags["max_model_len"] - 32  # which is most of an answer
        trace = Path(flags["trace"])
        workloads.append(
            Traced(MooncakeTrace(trace, flags["tokens_per_hash"], longest, flags["rows"], ids=IDS))
        )
    played: list[tuple[str, LoadReport]] = []
    with ReportedProgress() as progress:
        for workload in workloads:
            name = workload.name
            run = asyncio.run(
                play(
                    server,
                    RequestShape(model),
                    workload,
                    progress=lambda done, name=name: progress(name, done, unit="requests"),  # type: ignore[misc]
                )
            )
            played.append((name, report(run)))
    record = {
        "base_url": base_url,
        "model": model,
        "workloads": [{"name": name, **each.record()} for name, each in played],
    }
    show(record, json_to, lambda: _print(model, played))


def _print(model: str, played: list[tuple[str, LoadReport]]) -> None:
    rows = []
    for name, each in played:
        ttft = each.distributions["ttft"]
        cached = each.cached_tokens
        rows.append(
            (
                name, f"{each.requests:,}", f"{each.prompt_tokens:,}",
                "not said" if cached is None else f"{cached:,} ({cached / max(1, each.prompt_tokens):.1%})",
                f"{each.seconds:,.1f}",
                *("" if ttft is None else f"{ttft.percentiles[percent]:,.2f}" for percent in (50, 90, 99)),
            )
        )  # fmt: skip
    columns = (
        "workload", "requests", "prompt tokens", "cached", "seconds in all", "ttft p50", "p90", "p99",
    )  # fmt: skip
    print_table(f"{model}: prefix cache over HTTP", columns, rows)
