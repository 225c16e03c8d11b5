"""Whether guessing pays: pure arithmetic on what steps cost and how often guesses were right.

A guess that is right with probability p saves p of a token's price. A token's price is what a step of this
many sequences costs, shared among them; a guess's is what one more token adds to the step. Both are fitted to
the steps seen: cost = base + slope * work, per (logarithm of the) number of sequences, older steps counting
less. The work of a step is the mean of its tokens and its logit rows: a guess has one of each, a token that
is forced only the one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MEMORY = 0.98
"""Weight of the step before, for costs."""
KIND_MEMORY = 0.995
OWN_MEMORY = 0.9
"""Of the guess before, for rates: of a kind of guess, and of one sequence."""
LEARNING = 12
"""Steps of a size before their cost is judged."""
USUAL_BASE = 8
"""Until then: tokens whose work is what a step costs in any case (weights are read once for all)."""
MARGIN = 1.15
"""By how much a guess must be worth more than it costs: both are estimates."""
PROBE_EVERY = 48
"""Steps without guesses after which some are tried again."""
PLAIN_EVERY = 24
"""Steps with guesses after which one is computed without: the price of a guess is a difference."""


@dataclass(slots=True)
class _Line:
    """Least squares of cost over work, weighted."""

    n: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0
    count: int = 0

    def add(self, x: float, y: float) -> None:
        if self.n > 0:
            # A step that something else held up says little.
            y = min(y, 3 * self.y / self.n)
        self.n, self.x, self.y = MEMORY * self.n + 1, MEMORY * self.x + x, MEMORY * self.y + y
        self.xx, self.xy = MEMORY * self.xx + x * x, MEMORY * self.xy + x * y
        self.count += 1

    def slope(self) -> float | None:
        """Seconds per unit of work; None if all steps had about as much."""
        spread = self.xx - self.x * self.x / self.n if self.n else 0.0
        if spread < 0.25 * self.n:
            return None
        return max(0.0, (self.xy - self.x * self.y / self.n) / spread)

    def at(self, x: float, slope: float) -> float:
        return max(self.y / self.n + slope * (x - self.x / self.n), 1e-9)


@dataclass(slots=True)
class _Rate:
    right: float
    guessed: float

    def add(self, right: int, guessed: int, memory: float) -> None:
        self.right = memory * self.right + right
        self.guessed = memory * self.guessed + guessed


@dataclass(slots=True)
class Governor:
    """most: guesses per sequence and step, at most."""

    most: int
    _lines: dict[int, _Line] = field(default_factory=dict)
    _kinds: dict[str, _Rate] = field(default_factory=dict)
    _drafting: dict[int, float] = field(default_factory=dict)
    pays: bool = True
    """Whether any guess was worth its price when that was last looked at."""
    _turn: int = 0

    def price(self, sequences: int, work: float) -> float:
        """What a guess costs, as a share of what a drawn token costs, in a step of `sequences` sequences and
        that `work` without guesses: a guess that is right less often does not pay."""
        size = sequences.bit_length()
        line = self._lines.get(size)
        slope = None if line is None or line.count < LEARNING else line.slope()
        if line is None or slope is None:
            return sequences / (sequences + USUAL_BASE)
        return (slope * sequences + self._drafting.get(size, 0.0)) / line.at(work, slope)

    def length(self, kind: str, own: Own, price: float) -> int:
        """How many tokens of one sequence are worth guessing."""
        rate = self.rate(kind, own)
        count, chance = 0, rate
        while count < self.most and chance > MARGIN * price:
            count, chance = count + 1, chance * rate
        if count == 0:
            own.fade()
        return count

    def rate(self, kind: str, own: Own) -> float:
        """How often a guess is right, if those before it are: what is known of the kind counts as four
        guesses, beside the sequence's own."""
        known = self._kinds.get(kind)
        prior = 0.5 if known is None else (known.right + 1) / (known.guessed + 2)
        return (own.right + 4 * prior) / (own.guessed + 4)

    def turn(self) -> bool:
        """Whether this step may guess. Counts steps: now and then one goes against what seems to pay."""
        self._turn += 1
        return self._turn % PLAIN_EVERY != 0 if self.pays else self._turn % PROBE_EVERY == 0

    def took(self, sequences: int, work: float, seconds: float) -> None:
        """A step's cost, if it computed no prompt."""
        self._lines.setdefault(sequences.bit_length(), _Line()).add(work, seconds)

    def drafted(self, sequences: int, guesses: int, seconds: float) -> None:
        """What `guesses` guesses for `sequences` sequences cost to make: per guess of each."""
        size = sequences.bit_length()
        cost = seconds * sequences / max(1, guesses)
        self._drafting[size] = cost if size not in self._drafting else 0.9 * self._drafting[size] + 0.1 * cost

    def came_true(self, kind: str, own: Own, right: int, guessed: int) -> None:
        """Of `guessed` guesses the first `right` were. Those behind the first wrong one were not tried."""
        tried = min(guessed, right + 1)
        self._kinds.setdefault(kind, _Rate(0.0, 0.0)).add(right, tried, KIND_MEMORY)
        own.add(right, tried, OWN_MEMORY)


class Own(_Rate):
    """How one sequence's guesses fared."""

    def __init__(self) -> None:
        super().__init__(0.0, 0.0)

    def fade(self) -> None:
        """Nothing is learned while nothing is guessed, so what was learned must not hold for ever."""
        self.right, self.guessed = MEMORY * self.right, MEMORY * self.guessed
