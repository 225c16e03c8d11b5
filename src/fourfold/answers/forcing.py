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
from fourfold.answers.spelling import CannotSpellError, spelled_call

Node = dict[str, Any]
TokenOf = Callable[[str], int | None]
"""Id of a control token by its text; None for any other text."""

_NOT_AN_OBJECT = r"(\s*[^\s{](.|\n)*)?"
_PYTHON_START, _PYTHON_END = "<|python_start|>", "<|python_end|>"
_NO_LIST = r"""start: T
T: /(\s*[^\s\[](.|\n)*)?/ & ~/(.|\n)*<\|python_(start|tag)\|>(.|\n)*/
"""
"""Text that begins with no list of calls, nor names one."""
_ANY_OBJECT = {"type": "object"}
_TOKEN = re.compile(r"(<[｜|]?[^<>\s]{1,48}?[｜|]?>|\[[A-Z_]{2,16}\])")


class Forcible(msgspec.Struct, frozen=True):
    """A tool as far as a grammar needs it. strict: its arguments must satisfy the schema."""

    name: str
    schema: Mapping[str, Any] | bool
    strict: bool


def forcible_format(format: AnswerFormat, tools: Sequence[Forcible], token_of: TokenOf) -> AnswerFormat:
    """The format for answers that must be calls of `tools`: the model's own, or Hermes' where no grammar says
    their arguments in it."""
    if format.harmony or (format.tools is not None and format.tools.shape is not None):
        return format
    if format.tools is not None and _Writer(token_of).spelled(format.tools, tools) is not None:
        return format
    return AnswerFormat(HERMES, format.reasoning)


def required(format: AnswerFormat, tools: Sequence[Forcible], parallel: bool, token_of: TokenOf) -> Node:
    """An answer that is calls and nothing else: one, or with `parallel` one or more."""
    writer = _Writer(token_of)
    if format.harmony:
        return _or([_sequence(writer.harmony_call(tool)) for tool in tools])
    if format.tools is not None and format.tools.arguments != "json":
        spelled = writer.spelled(format.tools, tools)
        if spelled is not None:
            return _sequence(writer.spelled_calls(format.tools, spelled, parallel))
    shape = _shape(format.tools)
    return _sequence([*writer.text(shape.first), *writer.calls(shape, tools, parallel)])


def optional(
    format: AnswerFormat, tools: Sequence[Forcible], parallel: bool, token_of: TokenOf
) -> Node | None:
    """An answer that is free until a call begins; the call then is one of `tools`. None if the format
    gives no hold for that, or no grammar says the arguments in it."""
    writer = _Writer(token_of)
    if format.harmony:
        calls = [_sequence(writer.harmony_call(tool)) for tool in tools]
        final = _sequence(
            [*writer.text(harmony.CHANNEL + "final" + harmony.MESSAGE), {"type": "any_text"}]
        )  # fmt: skip
        return _or([*calls, final])
    if format.tools is None:
        return None
    if format.tools.arguments != "json":
        return writer.spelled_optional(format.tools, tools, parallel)
    if format.tools.shape is None:
        return None
    shape = format.tools.shape
    if not shape.trigger:
        calls_only = _sequence([*writer.text(shape.first), *writer.calls(shape, tools, parallel)])
        return _or([calls_only, {"type": "regex", "pattern": _NOT_AN_OBJECT}])
    if shape.first:
        inside = [*writer.text(shape.first[len(shape.trigger) :]), *writer.calls(shape, tools, parallel)]
    else:
        inside = writer.calls(shape, tools, False, begun=shape.trigger)
    return writer.triggered({shape.trigger: inside}, once=bool(shape.first) or not parallel)


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
        return self._repeated(one, parallel, "", shape.between, shape.last)

    def _call(self, shape: Shape, tool: Forcible, begun: str) -> list[Node]:
        head = (shape.before_name + tool.name + shape.before_arguments)[len(begun) :]
        return [*self.text(head), _arguments(tool), *self.text(shape.after)]

    def triggered(self, by_trigger: Mapping[str, list[Node]], once: bool) -> Node:
        """Free text until a trigger, and what follows that."""
        tags = []
        for trigger, inside in by_trigger.items():
            token = self.token_of(trigger)
            begin: Any = trigger if token is None else {"type": "token", "token": token}
            tags.append({"type": "tag", "begin": begin, "content": _sequence(inside), "end": ""})
        return {
            "type": "triggered_tags",
            "triggers": [tag["begin"] for tag in tags],
            "tags": tags,
            "stop_after_first": once,
        }

    def spelled(self, format: ToolFormat, tools: Sequence[Forcible]) -> list[list[Node]] | None:
        """A call of each tool in a format whose arguments are not JSON; None if one cannot be said."""
        if format.arguments == "json":
            return None
        try:
            return [
                spelled_call(format.arguments, tool.name, tool.schema, self.text, strict=tool.strict)
                for tool in tools
            ]
        except CannotSpellError:
            return None

    def spelled_calls(self, format: ToolFormat, calls: list[list[Node]], parallel: bool) -> list[Node]:
        """One call or, with `parallel`, one or more, and what stands around all and each of them."""
        if format.arguments == "pythonic":
            return self._repeated(_or(list(map(_sequence, calls))), parallel, "[", ", ", "]")
        one = _sequence([*self.text("<tool_call>"), *self._after_trigger(format, calls)])
        return self._repeated(one, parallel, "", "\n", "")

    def spelled_optional(self, format: ToolFormat, tools: Sequence[Forcible], parallel: bool) -> Node | None:
        calls = self.spelled(format, tools)
        if calls is None:
            return None
        if format.arguments != "pythonic":
            triggers = {"<tool_call>": self._after_trigger(format, calls)}
            if format.arguments == "xml":
                # Some models leave the tag around it out.
                begun = len("<function=")
                rests = [self._without_beginning(call, begun) for call in calls]
                triggers["<function="] = [_or(list(map(_sequence, rests)))]
            return self.triggered(triggers, once=not parallel)
        listed = self.spelled_calls(format, calls, parallel)
        ways = [_sequence(listed), {"type": "grammar", "grammar": _NO_LIST}]
        if self.token_of(_PYTHON_START) is not None:
            ways.append(_sequence([*self.text(_PYTHON_START), *listed, *self.text(_PYTHON_END)]))
        return _or(ways)

    def _after_trigger(self, format: ToolFormat, calls: list[list[Node]]) -> list[Node]:
        line = [{"type": "const_string", "value": "\n"}] if format.arguments == "xml" else []
        return [*line, _or(list(map(_sequence, calls))), *line, *self.text("</tool_call>")]

    def _without_beginning(self, call: list[Node], begun: int) -> list[Node]:
        """A call whose first `begun` characters were written already."""
        first = call[0]["value"][begun:]
        return [{"type": "const_string", "value": first}, *call[1:]]

    def _repeated(self, one: Node, more: bool, first: str, between: str, last: str) -> list[Node]:
        again = {"type": "star", "content": _sequence([*self.text(between), one])}
        return [*self.text(first), one, *([again] if more else []), *self.text(last)]

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
