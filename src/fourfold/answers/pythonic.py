"""Calls written as Python: [f(a=1, b="x"), g()], or one a line in a block of tool_code."""

from __future__ import annotations

from fourfold.answers.calls import MAX_NAME, Tools
from fourfold.answers.literal import quoted, value
from fourfold.answers.parts import Out
from fourfold.answers.reader import Reader, Step

_PREFIXES = ("default_api.", "functions.", "tools.")


def call_list(reader: Reader, out: Out, tools: Tools, before: str) -> Step[bool]:
    """Reads [f(...), ...]. False if there is no call; then all of it was written as content."""
    space = yield from reader.spaces()
    if not (yield from reader.literal("[")):
        out.content(before + space)
        return False
    before += space + "["
    found = False
    while True:
        space = yield from reader.spaces()
        if found and (yield from reader.peek()) == "]":
            yield from reader.take()
            return True
        if not (yield from call(reader, out, tools, before + space)):
            return found
        found, before = True, ""
        space = yield from reader.spaces()
        if (yield from reader.peek()) == ",":
            before = yield from reader.take()
        elif (yield from reader.peek()) != "]":
            out.content(space)
            return True


def call_lines(reader: Reader, out: Out, tools: Tools, before: str, end: str) -> Step[bool]:
    """Reads calls up to `end`: one a line, within print(), or as a list."""
    found = False
    while True:
        space = yield from reader.spaces()
        char = yield from reader.peek()
        if found and (yield from reader.one_of((end,))):
            return True
        if char == "[":
            good = yield from call_list(reader, out, tools, before + space)
        else:
            good = yield from call(reader, out, tools, before + space)
        if not good:
            return found
        found, before = True, ""


def call(reader: Reader, out: Out, tools: Tools, before: str) -> Step[bool]:
    """Reads one call. False if it is none of a declared tool; then it was written as content."""
    name = yield from _name(reader)
    bracket = yield from reader.literal("(")
    if bracket and name == "print":
        before += "print("
        name = yield from _name(reader)
        bracket = yield from reader.literal("(")
        printed = True
    else:
        printed = False
    known = next((short for short in _spellings(name) if short in tools), None)
    if not bracket or known is None:
        out.content(before + name + ("(" if bracket else ""))
        return False
    out.call(known)
    whole = yield from _arguments(reader, out, list(tools[known].get("properties") or ()))
    out.end_call()
    if whole and printed:
        space = yield from reader.spaces()
        if not (yield from reader.literal(")")):
            out.content(space)
    return True


def _spellings(name: str) -> list[str]:
    return [name, *(name.removeprefix(prefix) for prefix in _PREFIXES), name.rpartition(".")[2]]


def _arguments(reader: Reader, out: Out, parameters: list[str]) -> Step[bool]:
    """Writes a=1, b="x") as {"a": 1, "b": "x"}; what has no name gets that of its place. An argument broken
    off leaves the object open."""
    out.arguments("{")
    count = 0
    while True:
        space = yield from reader.spaces()
        char = yield from reader.peek()
        if char == ")":
            yield from reader.take()
            out.arguments("}")
            return True
        name = ""
        if char.isalpha() or char == "_":
            name = yield from _name(reader)
            space = yield from reader.spaces()
            if not (yield from reader.literal("=")):
                out.content(name + space)
                return False
            yield from reader.spaces()
        elif char and count < len(parameters):
            name = parameters[count]
        if not name:
            return False
        out.arguments((", " if count else "") + f'"{quoted(name)}": ')
        count += 1
        if not (yield from value(reader, out.arguments)):
            return False
        yield from reader.spaces()
        char = yield from reader.peek()
        if char == ",":
            yield from reader.take()
        elif char != ")":
            return False


def _name(reader: Reader) -> Step[str]:
    name = ""
    while len(name) <= MAX_NAME:
        char = yield from reader.peek()
        if not (char.isalnum() or (char and char in "_.-")):
            break
        name += yield from reader.take()
    return name
