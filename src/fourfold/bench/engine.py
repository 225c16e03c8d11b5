"""Prefill and decode speed of the engine in this process, on any model.

Prompts are random token ids, so that lengths are exact; greedy, EOS ignored, prefix caching must be off.
Prefill of n tokens is n / (time to the first token). Decode at depth d is 128 / (time from the first to the
129th token) after a prompt of d tokens.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fourfold.types import SamplingParams

if TYPE_CHECKING:
    from fourfold.llm import LLM

PREFILL_LENGTHS = (512, 2048)
DECODE_DEPTH = 32
DECODE_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Speed:
    """name: "prefill" or "decode".  size: tokens of the prompt.  runs: tokens/s of each repeat."""

    name: str
    size: int
    runs: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.runs)


def measure(
    llm: LLM, repeats: int, seed: int = 0, clock: Callable[[], float] = time.perf_counter
) -> list[Speed]:
    """All figures that fit the model's context; the repeats are interleaved, after one warm-up."""
    jobs = [("prefill", n, 1) for n in PREFILL_LENGTHS] + [("decode", DECODE_DEPTH, DECODE_TOKENS + 1)]
    jobs = [job for job in jobs if job[1] + job[2] <= llm.model.max_model_len]
    rng = random.Random(seed)
    vocab = min(llm.model.vocab_size, llm.tokenizer.vocab_size)
    runs: dict[tuple[str, int], list[float]] = {(name, size): [] for name, size, _ in jobs}
    for repeat in range(repeats + 1):
        for name, size, tokens in jobs:
            prompt = [rng.randrange(vocab) for _ in range(size)]
            speed = _run(llm, prompt, tokens, clock)
            if repeat > 0:
                runs[name, size].append(speed)
    return [Speed(name, size, tuple(values)) for (name, size), values in runs.items()]


def _run(llm: LLM, prompt: Sequence[int], tokens: int, clock: Callable[[], float]) -> float:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    times = [clock()]
    with closing(llm.stream(prompt, params)) as deltas:
        for delta in deltas:
            times.extend([clock()] * len(delta.token_ids))
    if tokens == 1:
        return len(prompt) / (times[1] - times[0])
    return (len(times) - 2) / (times[-1] - times[1])
