"""`fourfold bench kv`: what the prefix cache saves and costs, counted without a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fourfold.cli import options
from fourfold.cli.base import Command
from fourfold.cli.bench_output import json_option, print_table, repeats_option, show, spread

if TYPE_CHECKING:
    from fourfold.bench.kv.count import Counted
    from fourfold.bench.kv.zero_hits import RealSides, Sides


def workload_options(command: Any) -> Any:
    """What is asked."""
    for option in (
        click.option("--trace", metavar="FILE",
                     help="Also a trace in Mooncake's format (JSON lines with hash_ids)."),
        click.option("--rows", type=options.COUNT, default=1000, show_default=True,
                     help="Rows of the trace to run."),
        click.option("--tokens-per-hash", type=click.IntRange(1, 512), default=32, show_default=True,
                     help="Tokens of a block of the trace, which stands for 512: scales its prompts to "
                     "--max-model-len."),
        click.option("--agents", type=click.IntRange(1, 64), default=32, show_default=True,
                     help="Conversations."),
        click.option("--turns", type=click.IntRange(1, 1000), default=6, show_default=True,
                     help="Of each of them."),
        click.option("--system-tokens", type=options.COUNT, default=1000, show_default=True,
                     help="Length of the system prompt that they share."),
        click.option("--max-model-len", type=click.IntRange(64), default=8192, show_default=True,
                     help="Longest sequence."),
    ):  # fmt: skip
        command = option(command)
    return command


@click.command(cls=Command)
@workload_options
@click.option(
    "--blocks", type=click.IntRange(2), default=4096, show_default=True, help="KV blocks of the pool."
)
@click.option(
    "--block-size", type=click.IntRange(1, 1024), default=32, show_default=True, help="Tokens of a block."
)
@click.option("--model", "-m", help="Model to measure the cost of finding nothing with, too.")
@repeats_option
@json_option
def kv(
    trace: str | None,
    rows: int,
    tokens_per_hash: int,
    agents: int,
    turns: int,
    system_tokens: int,
    blocks: int,
    block_size: int,
    max_model_len: int,
    model: str | None,
    repeats: int,
    json_to: str | None,
) -> None:
    """Prompt tokens that the prefix cache saves, KV blocks in use with and without sharing, and what it
    costs when nothing is ever found. The scheduler and the cache are real, the model computes nothing: so
    it takes seconds, and the counts are the same on every machine."""
    from fourfold.bench.kv.count import count
    from fourfold.bench.kv.workloads import Agents, MooncakeTrace, Workload
    from fourfold.bench.kv.zero_hits import counted_cost, real_cost
    from fourfold.progress import ReportedProgress

    # 32 answer tokens at most follow a prompt of a trace.
    workloads: list[Workload] = [Agents(agents, turns, system_tokens)]
    if trace is not None:
        workloads.append(MooncakeTrace(Path(trace), tokens_per_hash, max_model_len - 32, rows))
    with ReportedProgress() as progress:
        counted = []
        for workload in workloads:
            name = workload.name
            counted.append(
                count(
                    workload,
                    blocks,
                    block_size,
                    max_model_len,
                    lambda done, name=name: progress(name, done, unit="requests"),  # type: ignore[misc]
                )
            )
        costs = counted_cost(repeats)
        real = None if model is None else real_cost(model, repeats, progress=progress)
    zero_hits: dict[str, Any] = {"counted_seconds_per_request": costs.record()}
    if real is not None:
        zero_hits["real_seconds_per_request"] = real.wall.record()
        zero_hits["real_cpu_seconds_per_request"] = real.cpu.record()
        zero_hits["share_of_real_request"] = real.share(costs)
    record = {"workloads": [each.record() for each in counted], "zero_hits": zero_hits}
    show(record, json_to, lambda: _print(counted, costs, real))


def _print(counted: list[Counted], costs: Sides, real: RealSides | None) -> None:
    columns = (
        "workload", "requests", "prompt tokens", "not recomputed", "infinite cache",
        "blocks at peak", "without sharing", "saved",
    )  # fmt: skip
    rows = [
        (
            each.name, f"{each.requests:,}", f"{each.prompt_tokens:,}", f"{each.hit_share:.2%}",
            f"{each.ideal_share:.2%}", f"{each.shared_blocks:,}", f"{each.held_blocks:,}",
            f"{each.saved_share:.1%}",
        )
        for each in counted
    ]  # fmt: skip
    print_table("Prefix cache", columns, rows)
    sides = [("scheduler and cache alone, CPU time", costs)]
    if real is not None:
        sides += [("with the model, CPU time", real.cpu), ("with the model, wall clock", real.wall)]
    lines = [
        (
            name, spread(each.off.scaled(1e3), 2), spread(each.on.scaled(1e3), 2),
            f"{each.difference * 1e3:,.2f}", f"{each.on.ratio(each.off).median:.3f}",
        )
        for name, each in sides
    ]  # fmt: skip
    headings = ("ms per request", "without prefix cache", "with", "median difference", "median ratio")
    print_table(
        "Random prompts of 512 + 32 tokens: what the cache costs where it finds nothing", headings, lines
    )
    if real is not None:
        click.echo(f"share of a request with the model: {real.share(costs):.2%} of its CPU time")
