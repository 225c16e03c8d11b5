"""What a step costs, learned from the steps that ran: (tokens, context) → seconds.

Steps are put in buckets by their number of tokens, four to each doubling, and each bucket keeps running
means. So the bend between "the weights are read once" and "every token is computed" is found where it is, and
no machine has to be described. What attention adds is linear in the context that is read, with one
coefficient for all buckets, estimated from how steps of one bucket differ.

No clock in here: who measures passes seconds in, and the same steps give the same costs.
"""

from __future__ import annotations

from bisect import bisect_left

MEMORY = 1 / 16
"""Least share of a new step in its bucket's means: how fast a change of speed is followed."""

OUTLIER = 2.0
"""A step this many times slower than expected was disturbed; it counts as this much slower and no more."""

ENOUGH = 8
"""Steps after which a bucket knows what to expect."""


class _Bucket:
    """Running means over steps of similar size."""

    __slots__ = ("count", "seconds", "tokens", "work")

    def __init__(self) -> None:
        self.count = 0
        self.tokens = self.work = self.seconds = 0.0


class StepCosts:
    """Tokens are those computed in a step; work is their context: for each token, the tokens it attends
    to."""

    def __init__(self) -> None:
        self._buckets: dict[int, _Bucket] = {}
        self._order: list[_Bucket] = []
        """Those with a measurement, by size."""
        self._products = self._squares = 0.0
        self._per_work = 0.0
        """Seconds per token of context read."""
        self._curve: tuple[list[float], list[float]] | None = None
        """Tokens and seconds without context of the buckets, as of the last step."""

    @property
    def known(self) -> bool:
        """False until the first step was measured."""
        return bool(self._order)

    def observe(self, tokens: int, work: float, seconds: float) -> None:
        """A step of so much took so long. Raises ValueError unless tokens and seconds are positive."""
        if tokens < 1 or not seconds > 0:
            raise ValueError(f"a step has at least 1 token and takes time, got {tokens} in {seconds} s")
        size = _size(tokens)
        bucket = self._buckets.get(size)
        if bucket is None:
            if self._order:
                # If that was too little, the next steps of this size tell.
                seconds = min(seconds, OUTLIER * self.seconds(tokens, work))
            bucket = self._buckets[size] = _Bucket()
            self._order = [self._buckets[each] for each in sorted(self._buckets)]
        else:
            expected = bucket.seconds + self._per_work * max(0.0, work - bucket.work)
            seconds = min(seconds, OUTLIER * expected)
            self._learn_context(bucket, tokens, work, seconds)
        bucket.count += 1
        share = max(MEMORY, 1 / bucket.count)
        bucket.tokens += share * (tokens - bucket.tokens)
        bucket.work += share * (work - bucket.work)
        bucket.seconds += share * (seconds - bucket.seconds)
        self._curve = None

    def seconds(self, tokens: float, work: float) -> float:
        """Expected of a step; 0 while nothing is known. More tokens never cost less."""
        if not self._order:
            return 0.0
        sizes, bases = self._curve or self._fit()
        above = bisect_left(sizes, tokens)
        if above == 0:
            # Fewer tokens than ever: the weights are read all the same, so it may cost as much.
            base = bases[0]
        elif above == len(sizes):
            base = bases[-1] + self._slope(above - 1) * (tokens - sizes[-1])
        else:
            share = (tokens - sizes[above - 1]) / (sizes[above] - sizes[above - 1])
            base = bases[above - 1] + share * (bases[above] - bases[above - 1])
        return base + self._per_work * work

    def tokens_within(
        self, seconds: float, tokens: int, work: float, context: int, least: int, most: int
    ) -> int:
        """How many tokens at `context` may join a step of (tokens, work) so that it takes `seconds` at most.

        Between `least` and `most`, whatever the costs say; `most` while nothing is known.
        """
        if not self._order or most <= least:
            return min(least, most) if self._order else most
        low, high = least, most
        while low < high:
            middle = (low + high + 1) // 2
            if self.seconds(tokens + middle, work + span_work(context, middle)) <= seconds:
                low = middle
            else:
                high = middle - 1
        return low

    def reach(self, tokens: int) -> int:
        """The most tokens that a step may have, if it has `tokens` already, so that its cost is more than a
        guess: about twice a known one's at most."""
        sizes, _ = self._curve or self._fit()
        known = float(max(1, tokens))
        while True:
            end = bisect_left(sizes, 2 * known + 1) - 1  # the largest of at most twice the size
            if end < 0 or sizes[end] <= known:
                return int(2 * known)
            known = sizes[end]

    def prompt_seconds(self, context: int, tokens: int, most: int) -> float:
        """Of `tokens` tokens of a prompt behind `context` others, in steps of at most `most` and with nothing
        else; 0 while nothing is known."""
        whole, rest = divmod(tokens, most)
        # Context grows evenly, so the mean of the whole steps is that of the middle one.
        middle = context + (whole - 1) * most // 2
        total = whole * self.seconds(most, span_work(middle, most)) if whole else 0.0
        return total + (self.seconds(rest, span_work(context + whole * most, rest)) if rest else 0.0)

    def tokens_per_second(self, most: int) -> float:
        """Of steps with `most` tokens of a prompt and nothing else; 0 while nothing is known."""
        seconds = self.seconds(most, span_work(0, most))
        return most / seconds if seconds > 0 else 0.0

    def _fit(self) -> tuple[list[float], list[float]]:
        # Means without what attention adds; at least a tenth of them, for that is an estimate.
        bases = [max(each.seconds - self._per_work * each.work, each.seconds / 10) for each in self._order]
        # More tokens never cost less. Where they seem to, a size of few steps was disturbed, or the larger
        # size's steps are of long ago, when the machine was faster.
        for i in range(len(bases) - 2, -1, -1):
            if self._order[i].count < ENOUGH:
                bases[i] = min(bases[i], bases[i + 1])
        for i in range(1, len(bases)):
            bases[i] = max(bases[i], bases[i - 1])
        self._curve = [bucket.tokens for bucket in self._order], bases
        return self._curve

    def _slope(self, index: int) -> float:
        """Seconds per token around bucket `index`, from it and one of at most half its size: between closer
        ones a little noise makes any slope. Never negative."""
        sizes, bases = self._curve or self._fit()
        low = next((i for i in range(index, -1, -1) if 2 * sizes[i] <= sizes[index]), None)
        if low is None:
            return bases[index] / sizes[index]
        return (bases[index] - bases[low]) / (sizes[index] - sizes[low])

    def _learn_context(self, bucket: _Bucket, tokens: int, work: float, seconds: float) -> None:
        slope = self._slope(self._order.index(bucket)) if tokens != bucket.tokens else 0.0
        # Relative to the bucket's mean, so that large steps do not drown small ones.
        more_work = (work - bucket.work) / bucket.seconds
        more_time = (seconds - bucket.seconds - slope * (tokens - bucket.tokens)) / bucket.seconds
        self._products += MEMORY / 8 * (more_work * more_time - self._products)
        self._squares += MEMORY / 8 * (more_work * more_work - self._squares)
        if self._squares > 0:
            self._per_work = max(0.0, self._products / self._squares)


def _size(tokens: int) -> int:
    """Number of the bucket: each size up to 8 has its own, then 10, 12, 14, 16, 20, 24... end one."""
    octave = max(0, (tokens - 1).bit_length() - 3)
    return 4 * octave + ((tokens - 1) >> octave)


def span_work(context: int, tokens: int) -> float:
    """Context that `tokens` tokens read which follow `context` others: each sees all before it and itself."""
    return tokens * context + tokens * (tokens + 1) / 2
