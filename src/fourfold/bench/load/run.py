"""Sending many requests: so many at a time, or at random times."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fourfold.bench.load.http import Server
from fourfold.bench.load.measure import Answer, Prepared, send


@dataclass(frozen=True, slots=True)
class Arrivals:
    """When requests are sent.

    concurrency: at most so many are in flight; the next is sent when one ends.  rate: requests per second on
    average, at the times of a Poisson process; None sends them as soon as concurrency allows.
    burstiness: of the gaps' gamma distribution; 1 is a Poisson process, less comes in bursts.
    """

    concurrency: int | None = None
    rate: float | None = None
    burstiness: float = 1.0


@dataclass(frozen=True, slots=True)
class LoadRun:
    """seconds: from the first request sent to the last answer's end."""

    arrivals: Arrivals
    answers: tuple[Answer, ...]
    seconds: float


async def run_load(
    server: Server,
    requests: Sequence[Prepared],
    arrivals: Arrivals,
    *,
    seed: int = 0,
    timeout: float | None = None,
    on_done: Callable[[int], None] = lambda done: None,
    clock: Callable[[], float] = time.perf_counter,
) -> LoadRun:
    """Sends every request once. timeout: seconds for each.  on_done: called with the number of ended ones."""
    rng = random.Random(seed)
    gate = asyncio.Semaphore(arrivals.concurrency or len(requests) or 1)
    ended = 0

    async def one(request: Prepared) -> Answer:
        nonlocal ended
        try:
            return await send(server, request, timeout, clock)
        finally:
            gate.release()
            ended += 1
            on_done(ended)

    started = clock()
    due = started
    tasks: list[asyncio.Task[Answer]] = []
    async with asyncio.TaskGroup() as group:
        for request in requests:
            if arrivals.rate is not None:
                await asyncio.sleep(max(0.0, due - clock()))
                due += rng.gammavariate(arrivals.burstiness, 1 / (arrivals.rate * arrivals.burstiness))
            await gate.acquire()
            tasks.append(group.create_task(one(request)))
    answers = tuple(task.result() for task in tasks)
    return LoadRun(arrivals, answers, max(answer.ended for answer in answers) - started if answers else 0.0)
