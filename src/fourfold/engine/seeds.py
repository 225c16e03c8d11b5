"""Seeds of requests that bring none."""

from __future__ import annotations

from fourfold.types import SamplingParams

_MASK64 = 2**64 - 1


class Seeds:
    """SplitMix64 (Steele et al. 2014) of a counter of its own: requests with a seed do not advance it."""

    def __init__(self, base: int) -> None:
        self._base = base
        self._drawn = 0

    def of(self, sampling: SamplingParams) -> int:
        if sampling.seed is not None:
            return sampling.seed & _MASK64
        self._drawn += 1
        z = (self._base + self._drawn * 0x9E3779B97F4A7C15) & _MASK64
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
        return z ^ (z >> 31)
