"""The parser of one answer: reasoning first, then content and tool calls."""

from __future__ import annotations

import msgspec

from fourfold.answers import harmony
from fourfold.answers.calls import Tools
from fourfold.answers.formats import ToolFormat
from fourfold.answers.parts import Out, Part
from fourfold.answers.reader import Reader, Step, scan
from fourfold.answers.reasoning import ReasoningFormat


class AnswerFormat(msgspec.Struct, frozen=True):
    """How answers of one model are written. harmony: gpt-oss's, which takes the place of the two others."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    harmony: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that parsers must see even where they are control tokens."""
        if self.harmony:
            return harmony.MARKERS
        found = self.tools.markers if self.tools is not None else ()
        return found if self.reasoning is None else (*found, self.reasoning.begin, self.reasoning.end)


class Expected(msgspec.Struct, frozen=True):
    """What one request's answers may hold.

    tools: those that may be called; without any, no text is taken for a call.
    opened: reasoning was begun in the prompt.
    most_calls: the answer ends with that many. None for any number.
    """

    format: AnswerFormat
    tools: Tools = msgspec.field(default_factory=dict)
    opened: bool = False
    most_calls: int | None = None

    @property
    def plain(self) -> bool:
        """Answers are content and nothing else."""
        format = self.format
        return not (format.harmony or format.reasoning or (format.tools and self.tools))


class AnswerParser:
    """Text in, in any cut; parts out. Never raises for what a model writes, and loses no text but markup and
    the white space around it."""

    __slots__ = ("_ended", "_most", "_out", "_reader", "_step", "reasons")

    def __init__(self, expected: Expected) -> None:
        self.reasons = expected.format.harmony or expected.format.reasoning is not None
        """Whether answers of this format may hold reasoning."""
        self._most = expected.most_calls
        self._ended = 0
        self._reader = Reader()
        self._out = Out()
        self._step: Step[None] | None = self._run(expected)
        self._advance()

    @property
    def in_reasoning(self) -> bool:
        """Whether what was pushed last belongs to the reasoning."""
        return self._out.in_reasoning

    @property
    def calls(self) -> int:
        """How many calls have begun."""
        return self._out.calls

    @property
    def done(self) -> bool:
        """Whether there were as many calls as there may be; the rest is no part of the answer."""
        return self._most is not None and self._ended >= self._most

    def push(self, text: str) -> list[Part]:
        self._reader.feed(text)
        self._advance()
        return self._limited(self._out.take())

    def finish(self) -> list[Part]:
        """The parts that waited for what might have followed."""
        self._reader.end()
        self._advance()
        self._out.finish()
        return self._limited(self._out.take())

    def _limited(self, parts: list[Part]) -> list[Part]:
        for at, part in enumerate(parts):
            if self.done:
                return parts[:at]
            self._ended += part.kind == "end"
        return parts

    def _advance(self) -> None:
        if self._step is not None:
            try:
                next(self._step)
            except StopIteration:
                self._step = None

    def _run(self, expected: Expected) -> Step[None]:
        reader, out, format = self._reader, self._out, expected.format
        if format.harmony:
            yield from harmony.run(reader, out, expected.tools)
            return
        if format.reasoning is not None:
            yield from format.reasoning.run(reader, out, expected.opened)
        if format.tools is not None and expected.tools:
            yield from format.tools.run(reader, out, expected.tools)
        else:
            yield from scan(reader, (), out.content)
