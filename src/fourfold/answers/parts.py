"""The parts of an answer, as parsers give them and as servers send them."""

from __future__ import annotations

from typing import Literal

import msgspec

Kind = Literal["content", "reasoning", "call", "arguments", "end"]


class Part(msgspec.Struct):
    """One step of an answer.

    kind: "content" and "reasoning" bring text; "call" begins a tool call, its name in text; "arguments"
        brings the next piece of that call's JSON; "end" closes it.
    index: of the call, from 0; -1 for text.
    """

    kind: Kind
    text: str
    index: int = -1


class Call(msgspec.Struct):
    """A tool call. arguments: JSON text, not finished if the answer was cut."""

    name: str
    arguments: str = ""
    ended: bool = False


class Answer(msgspec.Struct):
    """Parts put together."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = msgspec.field(default_factory=list)

    def add(self, part: Part) -> None:
        if part.kind == "content":
            self.content += part.text
        elif part.kind == "reasoning":
            self.reasoning += part.text
        elif part.kind == "call":
            self.calls.append(Call(part.text))
        elif part.kind == "arguments":
            self.calls[part.index].arguments += part.text
        else:
            self.calls[part.index].ended = True


class Out:
    """Where a parser writes. White space that touches markup (a tag, a call) belongs to the markup: what ends
    a text is held until it is known what follows, and what begins one after markup is left out."""

    __slots__ = ("_calls", "_fresh", "_kind", "_parts", "_space", "in_reasoning")

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._calls = 0
        self._kind: Kind | None = None
        self._fresh = False
        """Whether nothing but white space came since the last markup."""
        self._space = ""
        self.in_reasoning = False
        """Set by parsers while what they read is reasoning."""

    @property
    def calls(self) -> int:
        """How many calls have begun."""
        return self._calls

    def content(self, text: str) -> None:
        self._text("content", text)

    def reasoning(self, text: str) -> None:
        self._text("reasoning", text)

    def markup(self) -> None:
        """A tag was read."""
        self._space = ""
        self._fresh = True

    def paragraph(self) -> None:
        """Markup between two texts, which get a line break between them if both are of one kind."""
        self._space, self._fresh = "\n", False

    def call(self, name: str) -> None:
        self.markup()
        self._parts.append(Part("call", name, self._calls))
        self._calls += 1

    def arguments(self, text: str) -> None:
        self._add("arguments", text, self._calls - 1)

    def end_call(self) -> None:
        self._parts.append(Part("end", "", self._calls - 1))

    def finish(self) -> None:
        """Nothing follows: white space at the end of a content is a part of it."""
        if self._space and self._kind == "content" and not self._fresh:
            self._add("content", self._space, -1)
        self._space = ""

    def take(self) -> list[Part]:
        """What was written since the last time."""
        parts, self._parts = self._parts, []
        return parts

    def _text(self, kind: Kind, text: str) -> None:
        if kind != self._kind:
            self._kind, self._space = kind, ""
        if self._fresh:
            text = text.lstrip()
        solid = text.rstrip()
        if not solid:
            self._space += text
            return
        self._fresh = False
        self._add(kind, self._space + solid, -1)
        self._space = text[len(solid) :]

    def _add(self, kind: Kind, text: str, index: int) -> None:
        last = self._parts[-1] if self._parts else None
        if last is not None and last.kind == kind and last.index == index:
            last.text += text
        elif text:
            self._parts.append(Part(kind, text, index))
