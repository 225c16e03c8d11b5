"""What makes a model call tools, or call them rightly: structural tags in the format of its family.

The notation is that of `grammar.tags`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from fourfold.answers import harmony
from fourfold.answers.answer import AnswerFormat
from fourfold.answers.formats import HERMES, Shape, ToolFormat

Node = dict[str, Any]
TokenOf = Callable[[str], int | None]
"""Id of a control token by its text; None for any other text."""

_NOT_AN_OBJECT = r"(\s*[^\s{](.|\n)*)?"
_ANY_OBJECT = {"type": "object"}
_TOKEN = re.compile(r"(<[｜|]?[^<>\s]{1,48}?[｜|]?>|\[[A-Z_]{2,16}\])")


class Forcible(msgspec.Struct, frozen=True):
    """A tool as far as a grammar needs it. strict: its arguments must satisfy the schema."""

    name: str
    schema: Mapping[str, Any] | bool
    strict: bool


def forcible_format(format: AnswerFormat) -> AnswerFormat:
    """The format for answers that must be calls: the model's own, or Hermes' where arguments are not JSON."""
    if format.harmony or (format.tools is not None and format.tools.shape is not None):
        return format
    return AnswerFormat(HERMES, format.reasoning)


def required(format: AnswerFormat, tools: Sequence[Forcible], parallel: bool, token_of: TokenOf) -> Node:
    """An answer that is calls and nothing else: one, or with `parallel` one or more."""
    writer = _Writer(token_of)
    if format.harmony:
        return _or([_sequence(writer.harmony_call(tool)) for tool in tools])
    shape = _shape(format.tools)
    return _sequence([*writer.text(shape.first), *writer.calls(shape, tools, parallel)])


def optional(
    format: AnswerFormat, tools: Sequence[Forcible], parallel: bool, token_of: TokenOf
) -> Node | None:
    """An answer that is free until a call begins; the call then is one of `tools`. None if the format
    gives no hold for that."""
    writer = _Writer(token_of)
    if format.harmony:
        calls = [_sequence(writer.harmony_call(tool)) for tool in tools]
        final = _sequence(
            [*writer.text(harmony.CHANNEL + "final" + harmony.MESSAGE), {"type": "any_text"}]
        )  # fmt: skip
        return _or([*calls, final])
    if format.tools is None or format.tools.shape is None:
        return None
    shape = format.tools.shape
    if not shape.trigger:
        calls_only = _sequence([*writer.text(shape.first), *writer.calls(shape, tools, parallel)])
        return _or([calls_only, {"type": "regex", "pattern": _NOT_AN_OBJECT}])
    trigger = token_of(shape.trigger)
    begin: Any = shape.trigger if trigger is None else {"type": "token", "token": trigger}
    if shape.first:
        inside = [*writer.text(shape.first[len(shape.trigger) :]), *writer.calls(shape, tools, parallel)]
    else:
        inside = writer.calls(shape, tools, False, begun=shape.trigger)
    tag = {"type": "tag", "begin": begin, "content": _sequence(inside), "end": ""}
    return {
        "type": "triggered_tags",
        "triggers": [begin],
        "tags": [tag],
        "stop_after_first": bool(shape.first) or not parallel,
    }


def _shape(format: ToolFormat | None) -> Shape:
    if format is None or format.shape is None:
        raise ValueError("this format's calls cannot be forced")
    return format.shape


class _Writer(msgspec.Struct, frozen=True):
    token_of: TokenOf

    def text(self, text: str) -> list[Node]:
        """A text, its control tokens as tokens."""
        return list(self._pieces(text))

    def _pieces(self, text: str) -> Iterator[Node]:
        plain = ""
        for piece in _TOKEN.split(text):
            token = self.token_of(piece) if _TOKEN.fullmatch(piece) else None
            if token is None:
                plain += piece
                continue
            if plain:
                yield {"type": "const_string", "value": plain}
            plain = ""
            yield {"type": "token", "token": token}
        if plain:
            yield {"type": "const_string", "value": plain}

    def calls(self, shape: Shape, tools: Sequence[Forcible], parallel: bool, begun: str = "") -> list[Node]:
        """begun: how much of the first call was written already."""
        one = _or([_sequence(self._call(shape, tool, begun)) for tool in tools])
        last = self.text(shape.last)
        if not parallel:
            return [one, *last]
        more = _sequence([*self.text(shape.between), one])
        return [one, {"type": "star", "content": more}, *last]

    def _call(self, shape: Shape, tool: Forcible, begun: str) -> list[Node]:
        head = (shape.before_name + tool.name + shape.before_arguments)[len(begun) :]
        return [*self.text(head), _arguments(tool), *self.text(shape.after)]

    def harmony_call(self, tool: Forcible) -> list[Node]:
        head = (
            f"{harmony.CHANNEL}commentary to=functions.{tool.name} {harmony.CONSTRAIN}json{harmony.MESSAGE}"
        )
        return [*self.text(head), _arguments(tool)]


def _arguments(tool: Forcible) -> Node:
    schema = tool.schema if isinstance(tool.schema, bool) or tool.schema else _ANY_OBJECT
    return {"type": "json_schema", "json_schema": schema, "strict": tool.strict}


def _sequence(nodes: list[Node]) -> Node:
    return nodes[0] if len(nodes) == 1 else {"type": "sequence", "elements": nodes}


def _or(nodes: list[Node]) -> Node:
    return nodes[0] if len(nodes) == 1 else {"type": "or", "elements": nodes}
