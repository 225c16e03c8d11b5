"""Writing an answer as it comes, and saying how fast it came."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from fourfold.text.output import Delta


@dataclass(slots=True)
class Answer:
    """What was written, and when (seconds of the monotonic clock)."""

    prompt_tokens: int
    started: float
    text: str = ""
    tokens: int = 0
    first: float | None = None
    last: float | None = None
    finish_reason: str | None = None
    gaps: list[float] = field(default_factory=list)

    def speeds(self) -> str:
        """Time to first token, prefill and decode speed in words."""
        if self.first is None or self.last is None:
            return f"{self.prompt_tokens} prompt tokens, no answer"
        wait = self.first - self.started
        parts = [
            f"{self.prompt_tokens} prompt tokens at {self.prompt_tokens / wait:.1f} tok/s",
            f"first token after {wait * 1e3:.0f} ms",
        ]
        if self.gaps:
            decode = f"{len(self.gaps) / (self.last - self.first):.1f} tok/s"
            parts.append(
                f"{self.tokens} tokens at {decode} (median {statistics.median(self.gaps) * 1e3:.1f} ms)"
            )
        parts.append(f"ended by {self.finish_reason or 'you'}")
        return ", ".join(parts)


def write_answer(
    deltas: Iterable[Delta],
    prompt_tokens: int,
    out: TextIO,
    stopped: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.perf_counter,
) -> Answer:
    """Writes and flushes each delta's text; ends early when `stopped` says so."""
    answer = Answer(prompt_tokens, clock())
    for delta in deltas:
        if delta.token_ids:
            now = clock()
            if answer.first is None or answer.last is None:
                answer.first = now
            else:
                answer.gaps.append(now - answer.last)
            answer.last = now
            answer.tokens += len(delta.token_ids)
        if delta.text:
            answer.text += delta.text
            out.write(delta.text)
            out.flush()
        if delta.done:
            answer.finish_reason = delta.finish_reason
        if stopped():
            break
    if answer.text and not answer.text.endswith("\n"):
        out.write("\n")
        out.flush()
    return answer


def tolerant_output() -> TextIO:
    """Standard output that writes `?` for what its encoding lacks, instead of failing in mid-answer."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")
    return sys.stdout
