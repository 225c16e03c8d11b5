"""How many tokens of prompts a step may have beside the answers that run, so that these keep their pace."""

from __future__ import annotations

from dataclasses import dataclass

from fourfold.engine.step_cost import StepCosts

LEAST_CHUNK = 8
"""Tokens of a prompt that a step always has room for, so that prompts advance whatever the costs."""

FIRST_CHUNK = 32
"""The same while no step with answers was measured."""


@dataclass(frozen=True, slots=True)
class Pace:
    """itl_ratio: how many times slower a step with answers in it may become by prompts that are computed in
    it;
        0: prompts take what the token budget has.
    itl_target: seconds between two tokens of an answer, instead of the ratio. It also bounds how many answers
        run at a time.
    """

    itl_ratio: float = 1.75
    itl_target: float | None = None

    def chunk(self, costs: StepCosts, answers: int, tokens: int, work: float, context: int, most: int) -> int:
        """Tokens of prompts for a step of `answers` running answers, which have (tokens, work) in it.

        context: where the first prompt's tokens are.  most: what is left of the token budget.
        """
        if answers == 0 or (self.itl_target is None and self.itl_ratio == 0):
            return most
        if not costs.known:
            return min(most, FIRST_CHUNK)
        target = self.itl_target
        if target is None:
            target = self.itl_ratio * costs.seconds(tokens, work)
        return costs.tokens_within(target, tokens, work, context, min(LEAST_CHUNK, most), most)

    def allows(self, costs: StepCosts, tokens: int, work: float) -> bool:
        """Whether a step of answers alone, (tokens, work) of them, is within the target."""
        return self.itl_target is None or tokens <= 1 or costs.seconds(tokens, work) <= self.itl_target
