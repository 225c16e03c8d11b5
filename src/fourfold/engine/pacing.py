"""How many tokens of prompts a step may have beside the answers that run, so that these keep their pace."""

from __future__ import annotations

from dataclasses import dataclass

from fourfold.config import DEFAULT_ITL_RATIO
from fourfold.engine.step_cost import StepCosts

LEAST_CHUNK = 1
"""Tokens of a prompt that a step always has room for, so that prompts advance whatever the costs. On a CPU
each further token may cost as much as each of the answers', so that more would break their pace."""


@dataclass(frozen=True, slots=True)
class Answers:
    """Those that run. (tokens, work): what they have in the step, as StepCosts counts.

    crowd: how many will run beside a prompt when all who wait have a place, as far as there are places.
    """

    count: int
    crowd: int
    tokens: int
    work: float


@dataclass(frozen=True, slots=True)
class Pace:
    """itl_ratio: how many times slower a step with answers in it may become by prompts that are computed in
        it; 0: prompts take what the token budget has. Slower than a step in which all who wait are answered
        as well: a crowd that comes at once is let in at the pace it will have.
    itl_target: seconds between two tokens of an answer, instead of the ratio. It also bounds how many answers
        run at a time.
    """

    itl_ratio: float = DEFAULT_ITL_RATIO
    itl_target: float | None = None

    def chunk(self, costs: StepCosts, answers: Answers, context: int, most: int) -> int:
        """Tokens of prompts for a step beside `answers`, as far as costs can be foreseen.

        context: where the first prompt's tokens are.  most: what is left of the token budget.
        """
        if not self._bounds(answers):
            return most
        target = self.itl_target
        if target is None:
            target = self.itl_ratio * costs.seconds(max(answers.tokens, answers.crowd), answers.work)
        least = min(LEAST_CHUNK, most)
        return costs.tokens_within(target, answers.tokens, answers.work, context, least, most)

    def next_chunk(self, costs: StepCosts, answers: Answers, context: int, most: int) -> int:
        """The same for the very next step: no larger than what was measured tells of. So a guess about steps
        of unknown size cannot hold up answers; the sizes become known step by step."""
        if self._bounds(answers) and costs.known:
            most = min(most, max(LEAST_CHUNK, costs.reach(answers.tokens) - answers.tokens))
        return self.chunk(costs, answers, context, most)

    def allows(self, costs: StepCosts, tokens: int, work: float) -> bool:
        """Whether a step of answers alone, (tokens, work) of them, is within the target."""
        return self.itl_target is None or tokens <= 1 or costs.seconds(tokens, work) <= self.itl_target

    def _bounds(self, answers: Answers) -> bool:
        return answers.count > 0 and (self.itl_target is not None or self.itl_ratio > 0)
