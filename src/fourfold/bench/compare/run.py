"""The comparison: every workload by every peer, in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from fourfold.bench.compare.figures import Better, Collector, Comparison, Note
from fourfold.bench.compare.peer import CannotRun, CannotStart, Peer, ServerNeeds
from fourfold.bench.compare.serving import (
    ONE_STREAM,
    ONE_STREAM_KV_TOKENS,
    RunningServer,
    ServerLoad,
    free_port,
    kv_tokens,
)
from fourfold.bench.engine import Workload
from fourfold.errors import FourfoldError

START, SERVER = "start", "server"
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is compared.

    workloads: run by all.  own: workloads that only the first peer runs: what its own servers' figures are
    held against.  loads: put on the peers' servers.  start: also start each server with a small KV cache, and
    read its memory after one request.
    repeats: rounds.  fewer: peer → rounds it takes part in.
    repeat_within: seconds; what took a peer longer is not repeated by it.  timeout: seconds; a run that takes
    longer fails.
    """

    workloads: Sequence[Workload]
    loads: Sequence[ServerLoad]
    start: bool
    repeats: int
    threads: int
    own: Sequence[Workload] = ()
    fewer: Mapping[str, int] = field(default_factory=dict)
    repeat_within: float = 60.0
    timeout: float = 600.0


def compare(peers: Sequence[Peer], plan: Plan, say: Say = lambda line: None) -> Comparison:
    """Each round runs each workload once by each peer, one after the other, and then each server in turn.

    What a peer fails at it is not asked for again; one that does not come up is left out altogether.
    say: called with a line for each thing measured.
    """
    return _Rounds(peers, plan, say).run()


class _Rounds:
    def __init__(self, peers: Sequence[Peer], plan: Plan, say: Say) -> None:
        self._peers = peers
        self._plan = plan
        self._say = say
        self._collected = Collector()
        self._gaps: list[Note] = []
        self._failures: list[Note] = []
        self._over: set[tuple[str, str]] = set()  # (peer, what) not to be done again
        self._gone: set[str] = set()

    def run(self) -> Comparison:
        plan = self._plan
        for repeat in range(plan.repeats):
            for workload in plan.workloads:
                for peer in self._peers:
                    self._offline(peer, workload, repeat)
            for workload in plan.own:
                self._offline(self._peers[0], workload, repeat)
            for peer in self._peers:
                if any(self._open(peer, load.name, repeat) for load in plan.loads):
                    self._attempt(peer, SERVER, repeat, partial(self._serve, peer, repeat))
            for peer in self._peers:
                if plan.start:
                    self._attempt(peer, START, repeat, partial(self._start, peer, repeat))
        return Comparison(self._collected.figures(), self._gaps, self._failures)

    def _open(self, peer: Peer, what: str, repeat: int) -> bool:
        """Whether the peer takes part in this round of `what`."""
        rounds = self._plan.fewer.get(peer.name, self._plan.repeats)
        return repeat < rounds and peer.name not in self._gone and (peer.name, what) not in self._over

    def _attempt(self, peer: Peer, what: str, repeat: int, action: Callable[[], None]) -> bool:
        """Whether it was done without failing."""
        if not self._open(peer, what, repeat):
            return True
        began = time.perf_counter()
        try:
            action()
        except CannotRun as reason:
            self._over.add((peer.name, what))
            self._gaps.append(Note(peer.name, what, str(reason)))
            return True
        except FourfoldError as error:
            self._over.add((peer.name, what))
            if isinstance(error, CannotStart):
                self._gone.add(peer.name)
            self._failures.append(Note(peer.name, what, str(error)))
            self._say(f"{peer.name}: {what} failed: {error}")
            return False
        took = time.perf_counter() - began
        if took > self._plan.repeat_within and what != SERVER and repeat + 1 < self._plan.repeats:
            self._over.add((peer.name, what))
            self._gaps.append(Note(peer.name, what, f"not repeated: it took {took:.0f} s"))
        return True

    def _offline(self, peer: Peer, workload: Workload, repeat: int) -> None:
        def action() -> None:
            self._add(workload.name, "tok/s", "more", peer, peer.run(workload), repeat)

        self._attempt(peer, workload.name, repeat, action)

    def _serve(self, peer: Peer, repeat: int) -> None:
        loads = [load for load in self._plan.loads if self._open(peer, load.name, repeat)]
        needs = ServerNeeds(
            free_port(),
            self._plan.threads,
            max(load.concurrency for load in loads),
            max(kv_tokens(load) for load in loads),
        )
        with RunningServer(peer.server(needs), needs.port, self._plan.timeout) as server:
            server.warm_up(repeat)
            for load in loads:
                # A server that failed at one may be busy with it for long: it is asked for nothing more.
                if not self._attempt(
                    peer, load.name, repeat, partial(self._load, peer, server, load, repeat)
                ):
                    break
            self._memory(peer, server, "under load", repeat)

    def _load(self, peer: Peer, server: RunningServer, load: ServerLoad, repeat: int) -> None:
        measured = server.measure(load, repeat)
        self._add(load.name, "tok/s", "more", peer, measured.output_rate, repeat)
        for metric in ("ttft", "tpot"):
            distribution = measured.distributions[metric]
            if distribution is not None:
                value = distribution.percentiles[50] * 1e3
                self._add(f"{load.name} {metric} p50", "ms", "less", peer, value, repeat)

    def _start(self, peer: Peer, repeat: int) -> None:
        needs = ServerNeeds(free_port(), self._plan.threads, ONE_STREAM.concurrency, ONE_STREAM_KV_TOKENS)
        command = peer.server(needs)
        if repeat == 0 and not self._plan.loads:
            # The first start builds and compiles what later ones find, and reads the file from the disk.
            RunningServer(command, needs.port, self._plan.timeout).close()
        with RunningServer(command, needs.port, self._plan.timeout) as server:
            self._add(START, "s", "less", peer, server.start_seconds, repeat)
            server.measure(ONE_STREAM, repeat)
            self._memory(peer, server, "of one stream", repeat)

    def _memory(self, peer: Peer, server: RunningServer, when: str, repeat: int) -> None:
        self._add(f"peak RSS {when}", "MB", "less", peer, server.peak_memory / 1e6, repeat)
        self._add(f"PSS {when}", "MB", "less", peer, server.memory / 1e6, repeat)

    def _add(self, name: str, unit: str, better: Better, peer: Peer, value: float, repeat: int) -> None:
        self._collected.add(name, unit, better, peer.name, value)
        self._say(f"{repeat + 1}/{self._plan.repeats} {name}: {peer.name} {value:.4g} {unit}")
