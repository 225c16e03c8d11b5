"""What the prefix cache costs where nothing is ever found: by itself, and as a share of real requests."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from fourfold.bench.kv.backend import VOCABULARY, counting_engine
from fourfold.bench.kv.count import drain, make_request
from fourfold.bench.kv.workloads import Ask
from fourfold.bench.stats import Runs
from fourfold.config import EngineConfig
from fourfold.engine.loop import Engine
from fourfold.progress import Progress, silent

PROMPT, ANSWER = 512, 32
"""Tokens of the requests."""

AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Sides:
    """Seconds per request without and with prefix cache, in turns: so both meet the same machine."""

    off: Runs
    on: Runs

    @property
    def difference(self) -> float:
        """Median of the runs' differences, seconds per request."""
        return Runs(tuple(on - off for off, on in zip(self.off.values, self.on.values, strict=True))).median

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "off": self.off.record(), "on": self.on.record(), "difference": self.difference,
            "ratio": self.on.ratio(self.off).record(),
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class RealSides:
    """Of a real model: wall clock, and CPU time of the process with all its threads."""

    wall: Sides
    cpu: Sides

    def share(self, counted: Sides) -> float:
        """What scheduler and cache take more with the cache, as a share of a real request's CPU time: finer
        than the difference of two real runs, which drowns in their noise."""
        return counted.difference / self.cpu.off.median


def counted_cost(repeats: int, requests: int = 200) -> Sides:
    """CPU time of scheduler and cache alone, in a pool that is full soon: so with the cache there is also
    eviction."""

    def seconds(*, prefix_caching: bool) -> float:
        engine, _ = counting_engine(1024, 32, 8192, max_num_seqs=AT_ONCE, prefix_caching=prefix_caching)
        began = time.process_time()
        _run(engine, _asks(requests, VOCABULARY, seed=3))
        took = time.process_time() - began
        engine.close()
        return took / requests

    return _in_turns(repeats, seconds)


def real_cost(model: str, repeats: int, requests: int = AT_ONCE, progress: Progress = silent) -> RealSides:
    """Two engines, one with the cache, on one backend, one after the other. The first turn is not counted: it
    touches the KV pool's memory. Raises what loading the model raises."""
    from fourfold.build.load import load_engine_backend

    config = EngineConfig(model=model, seed=1, max_num_seqs=AT_ONCE)
    backend, info = load_engine_backend(config, lambda what, share: None)
    engines = {on: Engine(backend, info, replace(config, prefix_caching=on)) for on in (False, True)}
    clocks = (time.perf_counter, time.process_time)
    took: dict[bool, list[tuple[float, ...]]] = {False: [], True: []}
    for turn in range(repeats + 1):
        progress("real requests", turn, repeats + 1, "turns")
        for on in (False, True) if turn % 2 else (True, False):
            asks = _asks(requests, info.vocab_size, seed=2 * turn + on)
            began = [clock() for clock in clocks]
            _run(engines[on], asks)
            if turn:
                took[on].append(
                    tuple((clock() - start) / requests for clock, start in zip(clocks, began, strict=True))
                )
    engines[True].close()
    wall, cpu = (
        Sides(*(Runs(tuple(each[i] for each in took[on])) for on in (False, True)))
        for i in range(len(clocks))
    )
    return RealSides(wall, cpu)


def _in_turns(repeats: int, seconds: Callable[..., float]) -> Sides:
    off, on = [], []
    for _ in range(repeats):
        off.append(seconds(prefix_caching=False))
        on.append(seconds(prefix_caching=True))
    return Sides(Runs(tuple(off)), Runs(tuple(on)))


def _asks(count: int, vocabulary: int, seed: int) -> list[Ask]:
    made = random.Random(seed)
    return [Ask([made.randrange(vocabulary) for _ in range(PROMPT)], ANSWER) for _ in range(count)]


def _run(engine: Engine, asks: list[Ask]) -> None:
    for start in range(0, len(asks), AT_ONCE):
        for number, ask in enumerate(asks[start : start + AT_ONCE], start):
            engine.add(make_request(str(number), ask))
        drain(engine)
