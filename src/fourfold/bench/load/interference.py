"""What a long prompt does to answers that are running: their time between tokens before, meanwhile and after.

Answers become longer while the prompt is computed, and slower by that alone: hence the look at both ends.
"""

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
    """Seconds between two tokens. before, after: while nothing else ran.  beside: while the long prompt was
    computed.  prompt_seconds: until the long prompt's first token."""

    before: Distribution
    beside: Distribution
    after: Distribution
    prompt_seconds: float

    def ratio(self, percent: float) -> float:
        """Beside the prompt, to the mean of before and after."""
        quiet = (self.before.percentiles[percent] + self.after.percentiles[percent]) / 2
        return self.beside.percentiles[percent] / quiet

    @property
    def max_ratio(self) -> float:
        return self.beside.max / ((self.before.max + self.after.max) / 2)

    def record(self) -> dict[str, object]:
        """For JSON."""
        return {
            "itl_seconds_before": self.before.record(),
            "itl_seconds_beside_prompt": self.beside.record(),
            "itl_seconds_after": self.after.record(),
            "prompt_ttft_seconds": self.prompt_seconds,
            "ratios": {f"p{percent:g}": self.ratio(percent) for percent in self.before.percentiles},
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
    """Starts all streams, waits until they have run for `quiet_seconds`, then sends the prompt; as long after
    that is answered, the streams are left.

    Raises FourfoldError if an answer failed or ended before that.
    """
    answered = asyncio.Event()
    running = [asyncio.create_task(send(server, each, timeout, enough=answered)) for each in streams]
    try:
        # As long again for the streams' own prompts, and for the pace to settle.
        await asyncio.sleep(2 * quiet_seconds)
        sent = time.perf_counter()
        long = await send(server, prompt, timeout)
        await asyncio.sleep(quiet_seconds)
        left = time.perf_counter()
        answered.set()
        answers = [await each for each in running]
    finally:
        for each in running:
            each.cancel()
    for answer in (long, *answers):
        if answer.error is not None:
            raise FourfoldError(f"an answer failed: {answer.error}")
    first = long.arrivals[0]
    if any(answer.finish_reason is not None and answer.arrivals[-1] < left for answer in answers):
        raise FourfoldError("an answer ended before the look at it did; let answers be longer")
    spans = ((sent - quiet_seconds, sent), (sent, first), (long.arrivals[-1], left))
    before, beside, after = (Distribution.of(_gaps(answers, *span), percents) for span in spans)
    if before is None or beside is None or after is None:
        raise FourfoldError("no tokens came in one of the three spans; let answers be longer")
    return Interference(before, beside, after, long.ttft)


def _gaps(answers: Sequence[Answer], start: float, end: float) -> list[float]:
    """Times between tokens that lie in a span altogether, or end after its start."""
    return [
        after - before
        for answer in answers
        for before, after in zip(answer.arrivals, answer.arrivals[1:], strict=False)
        if start < after <= end
    ]
