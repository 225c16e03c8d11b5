"""`fourfold bench compare MODEL`."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fourfold.bench.compare.serving import SERVER_LOADS
from fourfold.bench.engine import WORKLOADS
from fourfold.cli import options
from fourfold.cli.base import Command
from fourfold.cli.bench_limits import limits_record, print_limits
from fourfold.cli.bench_output import json_option, repeats_option, show, write

if TYPE_CHECKING:
    from fourfold.bench.compare.peer import Peer

START = "start"
DEFAULT = (
    "decode-32", "prefill-512", "prefill-2048", "batch-64", "shared-prefix",
    "serve-32", "serve-shared", START,
)  # fmt: skip
OWN = {"serve-32": "batch-32", "serve-8": "batch-8"}
"""What is also run offline, by this engine only, to hold its figure over HTTP against."""
LLAMA, OPENVINO, VLLM = "llama.cpp", "OpenVINO", "vLLM"
PEERS = (LLAMA, OPENVINO, VLLM)

folder = click.Path(exists=True, file_okay=False, path_type=Path)
existing = click.Path(exists=True, path_type=Path)
seconds = click.FloatRange(0, 86400, min_open=True)


@click.command(cls=Command)
@options.model_argument
@click.option(
    "--llama-cpp",
    type=folder,
    help="Folder of llama-bench, llama-server... [default: looked for on the PATH]",
)
@click.option("--openvino", type=folder, help="Virtual environment with openvino-genai.")
@click.option(
    "--openvino-model",
    "openvino_models",
    multiple=True,
    type=existing,
    help="Its model: a folder of optimum-cli or a GGUF file; may be given several times. "
    "[default: MODEL, if Q4_0 or Q8_0]",
)
@click.option("--vllm", type=folder, help="Virtual environment with vLLM for CPUs.")
@click.option("--vllm-model", type=folder, help="Its model, a Hugging Face folder. [default: MODEL]")
@click.option(
    "--peer-env",
    multiple=True,
    metavar="PEER:NAME=VALUE",
    help="Environment of a peer, like vLLM:LD_PRELOAD=libtcmalloc.so; may be given several times.",
)
@click.option(
    "--peer-repeats",
    multiple=True,
    metavar="PEER:N",
    help="Fewer runs of a slow peer, like vLLM:1; may be given several times.",
)
@click.option(
    "--repeat-within",
    type=seconds,
    default=60.0,
    show_default=True,
    help="Seconds; what took a peer longer is not repeated by it.",
)
@click.option(
    "--timeout",
    type=seconds,
    default=600.0,
    show_default=True,
    help="Seconds; a run that takes longer is ended and counts as failed.",
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
    help="Of every engine, and cores that they and the load client run on. "
    "[default: the physical cores this process may use]",
)
@click.option(
    "--markdown",
    "markdown_to",
    is_flag=False,
    flag_value="-",
    metavar="FILE",
    help="Write the table as Markdown to FILE; without a name or with - to standard output.",
)
@repeats_option
@json_option
def compare(
    model: str | None,
    model_flag: str | None,
    wanted: tuple[str, ...],
    repeats: int,
    json_to: str | None,
    markdown_to: str | None,
    **flags: Any,
) -> int:
    """MODEL in this engine and in every other one that is found, in turns, in one run.

    Prompts are random token ids, answers greedy and of full length. A figure is the median of the repeats, in
    brackets the smallest and largest; a ratio is taken repeat by repeat. `start` is from a server's start to
    its first answer, with a KV cache of 4096 tokens; memory is read there after one request of 512+128, and
    again after the load: peak RSS is the peaks of all processes added up, PSS counts shared pages once. What
    an engine fails at makes the command fail; what it has no way to do does not.
    """
    name = options.chosen_model(model, model_flag)
    environments = _environments(flags["peer_env"])
    fewer = _fewer(flags["peer_repeats"])

    from fourfold.bench.compare.pinning import pinned_to
    from fourfold.bench.compare.run import Plan
    from fourfold.bench.compare.run import compare as run_comparison
    from fourfold.bench.limits import measure_limits
    from fourfold.bench.model_costs import model_costs
    from fourfold.build.machine import usable_cores
    from fourfold.cli.bench_compare_table import Report
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
        cpus = stack.enter_context(pinned_to(threads))
        setting = _Setting(path, cpus, costs.kv_bytes_per_token(), environments, flags)
        found = setting.peers()
        for _, peer in found:
            stack.callback(peer.close)
        peers = [peer for _, peer in found]
        limits = measure_limits([threads], repeats, progress=progress)
        plan = Plan(
            workloads=[each for name, each in WORKLOADS.items() if name in chosen],
            loads=[each for name, each in SERVER_LOADS.items() if name in chosen],
            start=START in chosen,
            repeats=repeats,
            threads=threads,
            own=[WORKLOADS[own] for load, own in OWN.items() if load in chosen and own not in chosen],
            fewer={peer.name: fewer[engine] for engine, peer in found if engine in fewer},
            repeat_within=flags["repeat_within"],
            timeout=flags["timeout"],
        )
        result = run_comparison(peers, plan, say=lambda line: click.echo(line, err=True))
        versions = {peer.name: peer.version() for peer in peers}
    report = Report(name, threads, repeats, list(versions), versions, limits, costs, result)

    def tables() -> None:
        print_limits(limits)
        click.echo()
        report.print()

    show({**report.record(), **limits_record(limits)}, json_to, tables)
    if markdown_to == "-":
        click.echo(report.markdown())
    elif markdown_to is not None:
        write(Path(markdown_to), report.markdown() + "\n")
    return 1 if result.failures else 0


@dataclass(frozen=True, slots=True)
class _Setting:
    """What the peers are made from. environments: by engine.  flags: as given."""

    model: Path
    cpus: Sequence[int]
    kv_bytes_per_token: int
    environments: dict[str, dict[str, str]]
    flags: dict[str, Any]

    def peers(self) -> list[tuple[str, Peer]]:
        """(engine, peer), ours first. Raises UsageError and ConfigError."""
        from fourfold.bench.compare.fourfold_engine import NAME, fourfold_peer
        from fourfold.bench.compare.llama_cpp import LlamaCpp
        from fourfold.bench.compare.openvino import openvino_peer
        from fourfold.bench.compare.vllm import vllm_peer

        threads, timeout, flags = len(self.cpus), self.flags["timeout"], self.flags
        ours = fourfold_peer(self.model, threads, self.kv_bytes_per_token, timeout)
        found: list[tuple[str, Peer]] = [(NAME, ours)]
        if self.model.suffix == ".gguf":
            llama = LlamaCpp.find(flags["llama_cpp"], self.model, threads, timeout)
            found += [(LLAMA, llama)] if llama is not None else []
        if flags["openvino"] is not None:
            python = _python(flags["openvino"], "--openvino")
            for each in flags["openvino_models"] or (self.model,):
                changes = self.environments[OPENVINO]
                found.append((OPENVINO, openvino_peer(python, each, threads, changes, timeout)))
        if flags["vllm"] is not None:
            python = _python(flags["vllm"], "--vllm")
            where = flags["vllm_model"] or self.model
            if not where.is_dir():
                raise click.UsageError("vLLM needs a Hugging Face folder; name one with --vllm-model")
            found.append((VLLM, vllm_peer(python, where, self.cpus, self.environments[VLLM], timeout)))
        return found


def _python(environment: Path, flag: str) -> Path:
    python = environment / "bin" / "python"
    if not python.exists():
        raise click.UsageError(f"{flag}: {environment} is no virtual environment: it has no bin/python")
    return python


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


def _fewer(given: tuple[str, ...]) -> dict[str, int]:
    found = {}
    for each in given:
        peer, _, count = each.partition(":")
        if peer not in PEERS or not count.isdecimal() or not 0 < int(count) <= 1000:
            raise click.UsageError(
                f"--peer-repeats {each!r} is not PEER:N with PEER of {', '.join(PEERS)} and N of 1 to 1000"
            )
        found[peer] = int(count)
    return found
