"""`fourfold bench limits`: bandwidth and multiply-add rates per number of threads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from fourfold.cli import options
from fourfold.cli.base import Command
from fourfold.cli.bench_output import json_option, print_table, repeats_option, show, spread
from fourfold.cli.values import byte_size, spelled

if TYPE_CHECKING:
    from fourfold.bench.limits import Limits

NAMES = {
    "read": "memory read",
    "int8": "int8 multiply-add",
    "bf16": "bf16 multiply-add",
    "fp32": "fp32 multiply-add",
}


@click.command(cls=Command)
@click.option(
    "--threads",
    "-t",
    type=click.IntRange(1, 1024),
    help="The largest number of threads. [default: the physical cores this process may use]",
)
@repeats_option
@click.option("--buffer", type=byte_size, default="512M", show_default=True, help="Memory read per run.")
@spelled("--isa", "isa", meanings=options.ISAS, help="Instruction set. [default: the best]")
@json_option
def limits(threads: int | None, repeats: int, buffer: int, isa: str | None, json_to: str | None) -> None:
    """Memory read bandwidth, int8, bf16 and fp32 multiply-adds, for 1, 2, 4, ... threads."""
    from fourfold.bench.limits import measure_limits, thread_counts
    from fourfold.build.machine import usable_cores
    from fourfold.errors import ConfigError
    from fourfold.progress import ReportedProgress

    counts = thread_counts(threads or usable_cores())
    with ReportedProgress() as progress:
        try:
            measured = measure_limits(
                counts, repeats, isa=isa or "auto", buffer_bytes=buffer, progress=progress
            )
        except ValueError as error:
            raise ConfigError(f"--isa: {error}") from error
    show(limits_record(measured), json_to, lambda: print_limits(measured))


def print_limits(limits: Limits) -> None:
    rows = [
        (NAMES[each.kind], str(each.threads), spread(each.runs.scaled(1e-9)), _unit(each.kind), each.how)
        for each in limits.measured
    ]
    print_table("Limits of this machine", ("what", "threads", "median", "", "measured with"), rows)


def limits_record(limits: Limits) -> dict[str, Any]:
    """For JSON: bytes/s, and operations/s."""
    return {
        "isa": limits.isa,
        "limits": [
            {"kind": m.kind, "threads": m.threads, "how": m.how, **m.runs.record()} for m in limits.measured
        ],
    }


def _unit(kind: str) -> str:
    return "GB/s" if kind == "read" else ("Gop/s" if kind == "int8" else "GFLOP/s")
