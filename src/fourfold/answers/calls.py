"""Calls written as JSON objects with a name and arguments, and calls with the name before the arguments."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fourfold.answers.literal import text_of, value
from fourfold.answers.parts import Out
from fourfold.answers.reader import Reader, Step

MAX_NAME = 256

Tools = Mapping[str, Mapping[str, Any]]
"""JSON Schema of the parameters of each declared tool, by name."""

_NAME_KEYS = frozenset({"name", "function", "tool_name", "function_name"})
_ARGUMENT_KEYS = frozenset({"arguments", "parameters", "args", "params", "tool_arguments", "input"})


def call_object(reader: Reader, out: Out, tools: Tools, before: str) -> Step[bool]:
    """Reads {"name": ..., "arguments": {...}}, keys in any order; arguments are written as they come once
    the name is known. False if that is no call of a declared tool: then `before` (what was read of the markup
    already) and what was read here was written as content.

    If it breaks off after the call has begun, the call keeps what it has and the rest is content.
    """
    mark = reader.mark()
    begun = yield from _object(reader, out, tools, mark)
    if begun is None:
        out.content(before + reader.since(mark))
    reader.forget()
    return begun is not None


def _object(reader: Reader, out: Out, tools: Tools, mark: int) -> Step[bool | None]:
    """None if no call began; whether it is whole otherwise."""
    name: str | None = None
    arguments: str | None = None
    begun = False

    def broken() -> bool | None:
        if not begun:
            return None
        out.end_call()
        out.content(reader.since(mark))
        return False

    if not (yield from reader.literal("{")):
        return None
    first = True
    while True:
        yield from reader.spaces()
        char = yield from reader.peek()
        if char == "," and not first:
            yield from reader.take()
            yield from reader.spaces()
            char = yield from reader.peek()
        if char == "}":
            yield from reader.take()
            break
        key = yield from text_of(reader)
        if key is None:
            return broken()
        yield from reader.spaces()
        if not (yield from reader.literal(":")):
            return broken()
        yield from reader.spaces()
        first = False
        if key in _NAME_KEYS and name is None:
            name = yield from text_of(reader)
            if name is None or name not in tools:
                return None
            if arguments is not None:
                begun = _begin(reader, out, name)
                out.arguments(arguments)
                mark = reader.mark()
        elif key in _ARGUMENT_KEYS and arguments is None:
            if name is None:
                arguments = yield from _held_value(reader)
                if arguments is None:
                    return None
                continue
            begun = _begin(reader, out, name)
            arguments = ""
            if not (yield from streamed_arguments(reader, out)):
                mark = reader.mark()
                return broken()
            mark = reader.mark()
        elif not (yield from value(reader, _nowhere)):
            return broken()
    if name is None:
        return None
    if not begun:
        _begin(reader, out, name)
        out.arguments("{}")
    out.end_call()
    return True


def _begin(reader: Reader, out: Out, name: str) -> bool:
    out.call(name)
    reader.forget()
    return True


def streamed_arguments(reader: Reader, out: Out) -> Step[bool]:
    """Reads the arguments of a call that has begun: an object as it comes; a string holding JSON, or nothing,
    when it is whole. False if they are broken."""
    if (yield from reader.peek()) == "{":
        return (yield from value(reader, out.arguments))
    held: list[str] = []
    whole = yield from value(reader, held.append)
    out.arguments(_unwrapped("".join(held)) if whole else "".join(held))
    return whole


def _held_value(reader: Reader) -> Step[str | None]:
    pieces: list[str] = []
    if not (yield from value(reader, pieces.append)):
        return None
    return _unwrapped("".join(pieces))


def _unwrapped(text: str) -> str:
    """Arguments given as null, as an empty text or as JSON within a text."""
    if text == "null":
        return "{}"
    if not text.startswith('"'):
        return text
    inner: str = json.loads(text)
    try:
        parsed = json.loads(inner or "{}")
    except (ValueError, RecursionError):
        return text
    return (inner or "{}") if isinstance(parsed, dict) else text


def call_objects(
    reader: Reader, out: Out, tools: Tools, before: str, separators: tuple[str, ...]
) -> Step[bool]:
    """Reads one call object, several with `separators` or white space between, or an array of them. False if
    not even one was read; then all of it was written as content."""
    space = yield from reader.spaces()
    char = yield from reader.peek()
    array = char == "["
    if array:
        before += space + (yield from reader.take())
        space = yield from reader.spaces()
        char = yield from reader.peek()
    if char != "{":
        out.content(before + space)
        return False
    if not (yield from call_object(reader, out, tools, before + space)):
        return False
    while True:
        space = yield from reader.spaces()
        char = yield from reader.peek()
        if array and char == "]":
            yield from reader.take()
            return True
        separator = ""
        if char and char in (",", *separators):
            separator = yield from reader.take()
            space += separator + (yield from reader.spaces())
            char = yield from reader.peek()
        if char != "{" or not (array or separator or space):
            out.content(space)
            return True
        if not (yield from call_object(reader, out, tools, space)):
            return True


def named_call(
    reader: Reader, out: Out, tools: Tools, before: str, name: str, ends: tuple[str, ...]
) -> Step[bool]:
    """Reads the arguments that follow a name (read as `name`), and one of `ends` if it is there. False if it
    is no declared tool, or if something else follows; then `before` was written as content."""
    before += yield from reader.spaces()
    char = yield from reader.peek()
    ended = ""
    if char != "{":
        ended = yield from reader.one_of(ends)
    if name not in tools or (char != "{" and char and not ended):
        out.content(before + ended)
        return False
    out.call(name)
    if char == "{":
        yield from value(reader, out.arguments)
    else:
        out.arguments("{}")
    out.end_call()
    if not ended:
        space = yield from reader.spaces()
        if not (yield from reader.one_of(ends)):
            out.content(space)
    return True


def name_until(reader: Reader, stops: tuple[str, ...]) -> Step[tuple[str, str]]:
    """Reads a name up to one of `stops`: the name and the stop, which is taken; the stop is "" if none came
    within a name's length."""
    name = ""
    while len(name) <= MAX_NAME:
        stop = yield from reader.one_of(stops)
        if stop:
            return name, stop
        char = yield from reader.take()
        if not char:
            break
        name += char
    return name, ""


def _nowhere(_: str) -> None:
    pass
