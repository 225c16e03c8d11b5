"""What a long prompt does to answers that are running: their time between tokens before and meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from fourfold.bench.load.http import Server
from fourfold.bench.load.measure import Answer, Prepared, send
from fourfold.bench.stats import Distribution
from fourfold.errors import FourfoldError


@dataclass(frozen=True, slots=True)
class Interference:
    """quiet: seconds between two tokens while nothing else ran.  beside: while the long prompt was computed.
    prompt_seconds: until the long prompt's first token."""

    quiet: Distribution
    beside: Distribution
    prompt_seconds: float

    def ratio(self, percent: float) -> float:
        return self.beside.percentiles[percent] / self.quiet.percentiles[percent]

    def record(self) -> dict[str, object]:
        """For JSON."""
        return {
            "quiet_itl_seconds": self.quiet.record(),
            "itl_seconds_beside_prompt": self.beside.record(),
            "prompt_ttft_seconds": self.prompt_seconds,
            "ratios": {f"p{percent:g}": self.ratio(percent) for percent in self.quiet.percentiles},
        }


async def interference(
    server: Server,
    streams: Sequence[Prepared],
    prompt: Prepared,
    quiet_seconds: float,
    *,
    timeout: float = 600.0,
    percents: Sequence[float] = (50, 90, 99),
) -> Interference:
    """Starts all streams, waits until they have run for `quiet_seconds`, then sends the prompt; when that is
    answered, the streams are left.

    Raises FourfoldError if an answer failed, or ended before the prompt had its first token.
    """
    answered = asyncio.Event()
    running = [asyncio.create_task(send(server, each, timeout, enough=answered)) for each in streams]
    try:
        # As long again for the streams' own prompts, and for the pace to settle.
        await asyncio.sleep(2 * quiet_seconds)
        sent = time.perf_counter()
        long = await send(server, prompt, timeout)
        answered.set()
        answers = [await each for each in running]
    finally:
        for each in running:
            each.cancel()
    for answer in (long, *answers):
        if answer.error is not None:
            raise FourfoldError(f"an answer failed: {answer.error}")
    first = long.arrivals[0]
    if any(answer.finish_reason is not None and answer.arrivals[-1] < first for answer in answers):
        raise FourfoldError("an answer ended before the long prompt was computed; let answers be longer")
    quiet = _gaps(answers, sent - quiet_seconds, sent)
    beside = _gaps(answers, sent, first)
    before, meanwhile = Distribution.of(quiet, percents), Distribution.of(beside, percents)
    if before is None or meanwhile is None:
        raise FourfoldError("no tokens came in one of the two spans; let answers be longer")
    return Interference(before, meanwhile, long.ttft)


def _gaps(answers: Sequence[Answer], start: float, end: float) -> list[float]:
    """Times between tokens that lie in a span altogether, or end after its start."""
    return [
        after - before
        for answer in answers
        for before, after in zip(answer.arrivals, answer.arrivals[1:], strict=False)
        if start < after <= end
    ]
