"""What a step costs, learned from the steps that ran: (tokens, context) → seconds.

Steps are put in buckets by their number of tokens, each bucket twice as wide as the one before, and each
bucket keeps running means. So the bend between "the weights are read once" and "every token is computed" is
found where it is, and no machine has to be described. What attention adds is linear in the context that is
read, with one coefficient for all buckets, estimated from how steps of one bucket differ.

No clock in here: who measures passes seconds in, and the same steps give the same costs.
"""

from __future__ import annotations

MEMORY = 1 / 16
"""Least share of a new step in its bucket's means: how fast a change of speed is followed."""

OUTLIER = 3.0
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

    @property
    def known(self) -> bool:
        """False until the first step was measured."""
        return bool(self._order)

    def observe(self, tokens: int, work: float, seconds: float) -> None:
        """A step of so much took so long. Raises ValueError unless tokens and seconds are positive."""
        if tokens < 1 or not seconds > 0:
            raise ValueError(f"a step has at least 1 token and takes time, got {tokens} in {seconds} s")
        size = (tokens - 1).bit_length()
        bucket = self._buckets.get(size)
        if bucket is None:
            bucket = self._buckets[size] = _Bucket()
            self._order = [self._buckets[each] for each in sorted(self._buckets)]
        elif bucket.count >= ENOUGH:
            seconds = min(seconds, OUTLIER * self.seconds(tokens, work))
        if bucket.count:
            self._learn_context(bucket, tokens, work, seconds)
        bucket.count += 1
        share = max(MEMORY, 1 / bucket.count)
        bucket.tokens += share * (tokens - bucket.tokens)
        bucket.work += share * (work - bucket.work)
        bucket.seconds += share * (seconds - bucket.seconds)

    def seconds(self, tokens: float, work: float) -> float:
        """Expected of a step; 0 while nothing is known."""
        order = self._order
        if not order:
            return 0.0
        above = next((i for i, bucket in enumerate(order) if bucket.tokens >= tokens), len(order))
        if above == 0:
            # Fewer tokens than ever: the weights are read all the same, so it may cost as much.
            base = self._base(order[0])
        elif above == len(order):
            last = order[-1]
            base = self._base(last) + self._slope(len(order) - 1) * (tokens - last.tokens)
        else:
            low, high = order[above - 1], order[above]
            base = self._base(low) + self._slope(above) * (tokens - low.tokens)
            base = min(base, max(self._base(low), self._base(high)))
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

    def tokens_per_second(self, most: int) -> float:
        """Of steps with `most` tokens of a prompt and nothing else; 0 while nothing is known."""
        seconds = self.seconds(most, span_work(0, most))
        return most / seconds if seconds > 0 else 0.0

    def _base(self, bucket: _Bucket) -> float:
        """The bucket's mean without what attention adds; at least a tenth of it, for that is an estimate."""
        return max(bucket.seconds - self._per_work * bucket.work, bucket.seconds / 10)

    def _slope(self, index: int) -> float:
        """Seconds per token between bucket `index` and the one below; never negative."""
        high = self._order[index]
        if index == 0:
            return self._base(high) / high.tokens
        low = self._order[index - 1]
        return max(0.0, (self._base(high) - self._base(low)) / max(1.0, high.tokens - low.tokens))

    def _learn_context(self, bucket: _Bucket, tokens: int, work: float, seconds: float) -> None:
        index = self._order.index(bucket)
        slope = self._slope(index) if len(self._order) > 1 else 0.0
        # Relative to the bucket's mean, so that large steps do not drown small ones.
        more_work = (work - bucket.work) / bucket.seconds
        more_time = (seconds - bucket.seconds - slope * (tokens - bucket.tokens)) / bucket.seconds
        self._products += MEMORY / 8 * (more_work * more_time - self._products)
        self._squares += MEMORY / 8 * (more_work * more_work - self._squares)
        if self._squares > 0:
            self._per_work = max(0.0, self._products / self._squares)


def span_work(context: int, tokens: int) -> float:
    """Context that `tokens` tokens read which follow `context` others: each sees all before it and itself."""
    return tokens * context + tokens * (tokens + 1) / 2
