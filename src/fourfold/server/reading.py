"""One sequence's events read as parts of an answer."""

from __future__ import annotations

from fourfold.answers.answer import AnswerParser
from fourfold.answers.parts import Part
from fourfold.text.output import Delta, OutputProcessor, TokenInfo
from fourfold.types import EngineEvent


class PartReader:
    """Feeds a parser token by token, so that what counts as reasoning does not depend on how many tokens an
    event brings.

    reasoning_tokens: how many tokens belong to the reasoning, its tags included.
    reasons: whether there can be any.
    """

    __slots__ = ("_output", "_parser", "reasoning_tokens", "reasons")

    def __init__(self, output: OutputProcessor, parser: AnswerParser) -> None:
        self._output = output
        self._parser = parser
        self.reasoning_tokens = 0
        self.reasons = parser.reasons

    @property
    def called(self) -> bool:
        """Whether a call has begun."""
        return self._parser.calls > 0

    def feed(self, event: EngineEvent) -> tuple[Delta, list[Part]]:
        """The delta's text is what the parts were made of."""
        ids, given = event.token_ids, event.logprobs
        whole = Delta("", [], None if given is None else [])
        parts: list[Part] = []
        for at in range(max(len(ids), 1)):
            last = at >= len(ids) - 1
            delta = self._output.feed(
                ids[at : at + 1],
                None if given is None else given[at : at + 1],
                event.finish_reason if last else None,
            )
            self._add(whole, delta)
            before = self._parser.in_reasoning
            parts += self._parser.push(delta.text)
            if delta.token_ids and (before or self._parser.in_reasoning):
                self.reasoning_tokens += 1
            if delta.done:
                parts += self._parser.finish()
                break
            if self._parser.done:
                whole.done, whole.finish_reason = True, "stop"
                break
        return whole, parts

    @staticmethod
    def _add(whole: Delta, delta: Delta) -> None:
        whole.text += delta.text
        whole.token_ids = whole.token_ids + delta.token_ids
        if whole.logprobs is not None:
            more: list[TokenInfo] = delta.logprobs or []
            whole.logprobs = whole.logprobs + more
        whole.finish_reason, whole.stop_reason, whole.done = (
            delta.finish_reason,
            delta.stop_reason,
            delta.done,
        )
