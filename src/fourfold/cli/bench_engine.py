"""`fourfold bench engine MODEL`."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fourfold.bench.engine import WORKLOADS
from fourfold.cli import options
from fourfold.cli.base import Command
from fourfold.cli.bench_limits import limits_record, print_limits
from fourfold.cli.bench_output import json_option, print_table, repeats_option, share, show, spread

if TYPE_CHECKING:
    from fourfold.bench.engine import Speed
    from fourfold.bench.limits import Limits
    from fourfold.bench.model_costs import ModelCosts


@click.command(cls=Command)
@options.model_argument
@click.option(
    "--only",
    "wanted",
    multiple=True,
    type=click.Choice([*WORKLOADS, "start"]),
    help="Only this; may be given several times. [default: all]",
)
@click.option(
    "--limits/--no-limits",
    "with_limits",
    default=True,
    show_default=True,
    help="Measure the machine in the same run and give shares of it.",
)
@repeats_option
@json_option
@options.engine_options
def engine(
    model: str | None,
    model_flag: str | None,
    wanted: tuple[str, ...],
    with_limits: bool,
    repeats: int,
    json_to: str | None,
    **flags: Any,
) -> None:
    """Speed of MODEL: prompts of 512 and 2048 tokens, answers after 32 and 2048 tokens, 8, 32 and 64 requests
    of 128 + 128 tokens at once, 32 requests of 1024 shared + 32 own tokens; start to first token, memory.

    Prompts are random token ids.
    """
    name = options.chosen_model(model, model_flag)
    config = options.engine_config(name, flags)

    from fourfold.bench.engine import fits, measure
    from fourfold.bench.limits import measure_limits
    from fourfold.bench.model_costs import model_costs
    from fourfold.bench.process import start_to_first_token
    from fourfold.bench.stats import Runs
    from fourfold.cli.session import load
    from fourfold.progress import ReportedProgress

    jobs = [each for name, each in WORKLOADS.items() if not wanted or name in wanted]
    with ReportedProgress() as progress, load(config) as llm:
        about, threads = llm.model.description, int(llm.model.description.get("threads", "1"))
        speeds = measure(llm, jobs, repeats, progress=progress) if jobs else []
        left_out = [job.name for job in jobs if not fits(llm, job)]
        path, context = llm.model.path, llm.model.max_model_len
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    limits, costs = None, None
    if with_limits:
        limits, costs = measure_limits([threads], repeats, isa=config.isa), model_costs(Path(path), config)
    start = None
    if not wanted or "start" in wanted:
        start = Runs(tuple(start_to_first_token(path, _flags(flags)) for _ in range(repeats)))

    rows = [(speed, *_shares(speed, limits, costs, threads)) for speed in speeds]
    record: dict[str, Any] = {
        "model": name,
        "engine": about,
        "peak_memory_bytes": peak,
        "start_to_first_token_seconds": start.record() if start else None,
        "workloads": [_record(*row) for row in rows],
        **(limits_record(limits) if limits else {}),
    }

    def tables() -> None:
        if limits:
            print_limits(limits)
            click.echo()
        print_table(
            f"{name}: tok/s, median of {repeats}, {threads} threads",
            ("workload", "tok/s", "seconds", "of bandwidth", "of the file's bytes", "of int8 peak"),
            [
                (s.workload.name, spread(s.runs), f"{s.seconds.median:.3f}", *map(share, shares))
                for s, *shares in rows
            ],
        )
        if left_out:
            click.echo(f"longer than the context of {context} tokens: {', '.join(left_out)}")
        if start:
            click.echo(f"process start to first token: {spread(start, 3)} s")
        click.echo(f"peak memory of this process: {peak / 1e6:,.0f} MB")

    show(record, json_to, tables)


def _shares(
    speed: Speed, limits: Limits | None, costs: ModelCosts | None, threads: int
) -> tuple[float | None, float | None, float | None]:
    """Of the bandwidth: bytes the kernels read, and bytes of the weights in the file; of the int8 peak."""
    if limits is None or costs is None:
        return None, None, None
    load, rate = speed.workload, speed.runs.median
    bandwidth, peak = limits.median("read", threads), limits.median("int8", threads)
    if load.kind == "decode" and bandwidth:
        read = costs.decode_bytes(load.prompt + load.output // 2)
        return read * rate / bandwidth, costs.decode_file_bytes() * rate / bandwidth, None
    if load.kind == "prefill" and peak:
        return None, None, costs.prefill_operations(load.prompt) / load.prompt * rate / peak
    return None, None, None


def _record(
    speed: Speed, of_bandwidth: float | None, of_file_bandwidth: float | None, of_int8_peak: float | None
) -> dict[str, Any]:
    load = speed.workload
    return {
        "name": load.name,
        "requests": load.requests,
        "prompt_tokens": load.prompt,
        "output_tokens": load.output,
        "shared_tokens": load.shared,
        "tokens_per_second": speed.runs.record(),
        "seconds": speed.seconds.record(),
        "of_bandwidth": of_bandwidth,
        "of_bandwidth_by_file_bytes": of_file_bandwidth,
        "of_int8_peak": of_int8_peak,
    }


def _flags(flags: dict[str, Any]) -> list[str]:
    """The engine's flags as they would be typed."""
    typed = {
        "max_model_len": "--max-model-len",
        "threads": "--threads",
        "activation_dtype": "--dtype",
        "kv_cache_dtype": "--kv-cache-dtype",
        "kv_cache_bytes": "--kv-cache-memory",
        "isa": "--isa",
    }
    return [part for key, flag in typed.items() if flags[key] is not None for part in (flag, str(flags[key]))]
