"""`fourfold bench compare MODEL`."""

from __future__ import annotations

import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fourfold.bench.compare.fourfold_engine import NAME as OURS
from fourfold.bench.compare.serving import SERVER_LOADS
from fourfold.bench.engine import WORKLOADS
from fourfold.cli import options
from fourfold.cli.base import Command
from fourfold.cli.bench_limits import limits_record, print_limits
from fourfold.cli.bench_output import json_option, print_table, repeats_option, share, show, spread

if TYPE_CHECKING:
    from fourfold.bench.compare.peer import Peer
    from fourfold.bench.compare.run import Comparison, Figure
    from fourfold.bench.limits import Limits
    from fourfold.bench.model_costs import ModelCosts

START = "start"
DEFAULT = (
    "decode-32", "prefill-512", "prefill-2048", "batch-64", "shared-prefix",
    "serve-32", "serve-shared", START,
)  # fmt: skip
PEERS = ("llama.cpp", "OpenVINO", "vLLM")

existing = click.Path(exists=True, path_type=Path)


@click.command(cls=Command)
@options.model_argument
@click.option(
    "--llama-cpp",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of llama-bench, llama-server... [default: looked for on the PATH]",
)
@click.option("--openvino-python", type=existing, help="Python with openvino-genai.")
@click.option("--openvino-model", type=existing, help="Its model. [default: MODEL, if Q4_0 or Q8_0]")
@click.option("--vllm-python", type=existing, help="Python with vLLM for CPUs.")
@click.option("--vllm-model", type=existing, help="Its model, a Hugging Face folder.")
@click.option(
    "--peer-env",
    multiple=True,
    metavar="PEER:NAME=VALUE",
    help="Environment of a peer, like vLLM:LD_PRELOAD=libtcmalloc.so; may be given several times.",
)
@click.option(
    "--only",
    "wanted",
    multiple=True,
    type=click.Choice([*WORKLOADS, *SERVER_LOADS, START]),
    help=f"Only this; may be given several times. [default: {', '.join(DEFAULT)}]",
)
@click.option(
    "--threads",
    "-t",
    type=click.IntRange(1, 4096),
    help="Of every engine. [default: the physical cores this process may use]",
)
@repeats_option
@json_option
def compare(
    model: str | None,
    model_flag: str | None,
    wanted: tuple[str, ...],
    repeats: int,
    json_to: str | None,
    **flags: Any,
) -> int:
    """MODEL in this engine and in every other one that is found, in turns, in one run.

    Prompts are random token ids, answers greedy and of full length. A figure is the median of the repeats, in
    brackets the smallest and largest; a ratio is taken repeat by repeat. `start` is from a server's start to
    its first answer. A peer that was named and fails makes the command fail.
    """
    name = options.chosen_model(model, model_flag)

    from fourfold.bench.compare.run import compare as run_comparison
    from fourfold.bench.limits import measure_limits
    from fourfold.bench.model_costs import model_costs
    from fourfold.build.machine import usable_cores
    from fourfold.config import EngineConfig
    from fourfold.hub import resolve
    from fourfold.progress import ReportedProgress

    # The other engines' processes are ended on the way out.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    chosen = wanted or DEFAULT
    threads = flags["threads"] or usable_cores()
    with ReportedProgress() as progress, ExitStack() as stack:
        path = resolve(name, progress=progress).path
        costs = model_costs(path, EngineConfig())
        peers = _peers(path, threads, costs.kv_bytes_per_token(), flags)
        for peer in peers:
            stack.callback(peer.close)
        limits = measure_limits([threads], repeats, progress=progress)
        result = run_comparison(
            peers,
            [each for name, each in WORKLOADS.items() if name in chosen],
            [each for name, each in SERVER_LOADS.items() if name in chosen],
            repeats,
            threads=threads,
            with_servers=START in chosen or any(name in chosen for name in SERVER_LOADS),
            progress=progress,
        )
        versions = {peer.name: peer.version() for peer in peers if peer.name not in result.failures}
    record = {
        "model": name,
        "threads": threads,
        "repeats": repeats,
        "versions": versions,
        **limits_record(limits),
        "figures": [_record(each, limits, costs, threads) for each in result.figures],
        "failures": result.failures,
    }

    def tables() -> None:
        print_limits(limits)
        click.echo()
        _print(name, [peer.name for peer in peers], result, limits, costs, threads)
        click.echo(", ".join(f"{peer} {version}" for peer, version in versions.items()))
        for peer, reason in result.failures.items():
            click.echo(f"{peer} failed: {reason}")

    show(record, json_to, tables)
    return 1 if result.failures else 0


def _peers(path: Path, threads: int, kv_bytes_per_token: int, flags: dict[str, Any]) -> list[Peer]:
    from fourfold.bench.compare.fourfold_engine import fourfold_peer
    from fourfold.bench.compare.llama_cpp import LlamaCpp
    from fourfold.bench.compare.openvino import openvino_peer
    from fourfold.bench.compare.vllm import vllm_peer

    environments = _environments(flags["peer_env"])
    peers: list[Peer] = [fourfold_peer(path, threads, kv_bytes_per_token, [])]
    if path.suffix == ".gguf" and (found := LlamaCpp.find(flags["llama_cpp"], path, threads)) is not None:
        peers.append(found)
    if flags["openvino_python"] is not None:
        where = flags["openvino_model"] or path
        peers.append(openvino_peer(str(flags["openvino_python"]), where, threads, environments["OpenVINO"]))
    if flags["vllm_python"] is not None:
        where = flags["vllm_model"] or path
        if not where.is_dir():
            raise click.UsageError("vLLM needs a Hugging Face folder; name one with --vllm-model")
        peers.append(vllm_peer(str(flags["vllm_python"]), where, threads, environments["vLLM"]))
    return peers


def _environments(given: tuple[str, ...]) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {peer: {} for peer in PEERS}
    for each in given:
        peer, colon, setting = each.partition(":")
        name, equals, value = setting.partition("=")
        if peer not in found or not colon or not equals or not name:
            raise click.UsageError(
                f"--peer-env {each!r} is not PEER:NAME=VALUE with PEER of {', '.join(PEERS)}"
            )
        found[peer][name] = value
    return found


def _print(
    name: str, peers: list[str], result: Comparison, limits: Limits, costs: ModelCosts, threads: int
) -> None:
    rows = []
    for figure in result.figures:
        best = figure.best_other(OURS)
        ratio = figure.times_better(OURS, best) if best else None
        digits = 3 if figure.unit == "s" else 1
        rows.append(
            (
                figure.name,
                figure.unit,
                *(spread(figure.runs[p], digits) if p in figure.runs else "" for p in peers),
                f"{spread(ratio, 2)} {best}" if ratio else "",
                share(_of_limit(figure, OURS, limits, costs, threads)),
            )
        )
    columns = ("", "unit", *peers, "times better than the best", "of the limit")
    print_table(f"{name}, {threads} threads", columns, rows)


def _of_limit(figure: Figure, peer: str, limits: Limits, costs: ModelCosts, threads: int) -> float | None:
    """Of bandwidth, by the bytes of the weights in the file; of the int8 peak for prompts."""
    workload = WORKLOADS.get(figure.name)
    if workload is None or peer not in figure.runs:
        return None
    rate = figure.runs[peer].median
    bandwidth, peak = limits.median("read", threads), limits.median("int8", threads)
    if workload.kind == "decode" and bandwidth:
        return costs.decode_file_bytes() * rate / bandwidth
    if workload.kind == "prefill" and peak:
        return costs.prefill_operations(workload.prompt) / workload.prompt * rate / peak
    return None


def _record(figure: Figure, limits: Limits, costs: ModelCosts, threads: int) -> dict[str, Any]:
    return {
        "name": figure.name,
        "unit": figure.unit,
        "better": figure.better,
        "peers": {
            peer: {
                **runs.record(),
                "of_limit": _of_limit(figure, peer, limits, costs, threads),
                "fourfold_times_better": ratio.record() if ratio else None,
            }
            for peer, runs in figure.runs.items()
            for ratio in [None if peer == OURS else figure.times_better(OURS, peer)]
        },
    }
