"""`fourfold bench kernels MODEL`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from fourfold.cli import options
from fourfold.cli.base import Command
from fourfold.cli.bench_limits import limits_record, print_limits
from fourfold.cli.bench_output import json_option, print_table, repeats_option, share, show, spread

if TYPE_CHECKING:
    from fourfold.bench.kernels import KernelTime
    from fourfold.bench.limits import Limits


def _row_counts(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
    try:
        counts = tuple(int(each) for each in value.split(","))
    except ValueError:
        counts = ()
    if not counts or not all(1 <= each <= 65536 for each in counts):
        raise click.BadParameter(f"{value!r} is not a list of numbers from 1 to 65536, like 1,8,512")
    return counts


@click.command(cls=Command)
@options.model_argument
@click.option(
    "--rows",
    default="1,8,32,512",
    show_default=True,
    callback=_row_counts,
    help="Batch sizes of the matmuls, in tokens.",
)
@click.option("--only", metavar="TEXT", help="Only kernels whose name contains it.")
@repeats_option
@json_option
@options.engine_options
def kernels(
    model: str | None,
    model_flag: str | None,
    rows: tuple[int, ...],
    only: str | None,
    repeats: int,
    json_to: str | None,
    **flags: Any,
) -> None:
    """Time of every kernel at MODEL's shapes and formats, as a share of what the machine can do.

    A matmul of few rows is compared with memory bandwidth (weights out of the caches), one of many rows with
    the multiply-add rate; both are measured in the same run. Time is per execution and includes preparing
    its input and waiting for the last thread.
    """
    name = options.chosen_model(model, model_flag)
    config = options.engine_config(name, flags)

    from fourfold.bench.kernels import measure_kernels
    from fourfold.bench.limits import measure_limits
    from fourfold.build.machine import usable_cores
    from fourfold.hub import resolve
    from fourfold.progress import ReportedProgress

    threads = config.threads or usable_cores()
    with ReportedProgress() as progress:
        path = resolve(name, progress=progress).path
        limits = measure_limits(sorted({1, threads}), repeats, isa=config.isa, progress=progress)
        times = measure_kernels(path, config, threads, rows, repeats, only or "", progress)
    record = {
        "model": name,
        "threads": threads,
        **limits_record(limits),
        "kernels": [_record(each, limits) for each in times],
    }

    def tables() -> None:
        print_limits(limits)
        click.echo()
        print_table(
            f"{name}: kernels, {threads} threads",
            ("kernel", "per step", "rows", "µs", "GB/s", "Gop/s", "of limit"),
            [_row(each, limits) for each in times],
        )
        for count in rows:
            same = [each for each in times if each.rows == count and each.name.startswith("matmul")]
            if len(same) > 1:
                total = sum(each.seconds.median * each.count for each in same)
                click.echo(f"all matmuls of a step of {count} rows: {total * 1e3:.3f} ms")

    show(record, json_to, tables)


def _of_limit(each: KernelTime, limits: Limits) -> float | None:
    limit = limits.median(each.limit, each.threads) if each.limit else None
    return None if limit is None else each.speed / limit


def _row(each: KernelTime, limits: Limits) -> tuple[str, ...]:
    seconds = each.seconds.median
    operations = f"{each.operations / seconds / 1e9:,.1f}" if each.operations else ""
    return (
        each.name,
        str(each.count),
        str(each.rows),
        spread(each.seconds.scaled(1e6)),
        f"{each.bytes / seconds / 1e9:,.1f}",
        operations,
        f"{share(_of_limit(each, limits))} {each.limit or ''}",
    )


def _record(each: KernelTime, limits: Limits) -> dict[str, Any]:
    return {
        "name": each.name,
        "count": each.count,
        "rows": each.rows,
        "threads": each.threads,
        "bytes": each.bytes,
        "operations": each.operations,
        "limit": each.limit,
        "of_limit": _of_limit(each, limits),
        "seconds": each.seconds.record(),
    }
