"""Where in a JSON text a value stands, and what an unfinished text says so far."""

from __future__ import annotations

import json
import re
from typing import Any

from fourfold.grammar.schema.walk import Path

_SPACE = " \t\n\r"
_LEXEME = re.compile(r'"(?:[^"\\]|\\.)*\\?"?|[\[\]{},]', re.DOTALL)
"""A string, finished or not, or what holds values together."""
_STRING = json.JSONDecoder()


def span_of(text: str, path: Path) -> tuple[int, int]:
    """(start, end) in characters of the value at `path` in `text`, a valid JSON text.

    A path that leads nowhere gives the last value on its way.
    """
    at = _skip(text, 0)
    for part in path:
        found = _child(text, at, part)
        if found is None:
            break
        at = found
    return at, _STRING.raw_decode(text, at)[1]


def finished_part(text: str) -> tuple[str, str] | None:
    """`text`, the beginning of a JSON text, up to its last finished item or property, and the brackets that
    close it there. None if no array or object was begun."""
    closers: list[str] = []
    cut, missing = 0, ""
    for lexeme in _LEXEME.finditer(text):
        sign = lexeme[0]
        if sign in "[{":
            closers.append("]" if sign == "[" else "}")
        elif sign in "]}":
            closers.pop()
        elif sign != ",":
            continue
        cut = lexeme.end() - (sign == ",")
        missing = "".join(reversed(closers))
    return (text[:cut], missing) if cut else None


def growing(value: Any, depth: int) -> list[Path] | None:
    """Paths of the last array or object in each of the outer `depth` levels of `value`: where it grows.

    None if there are not that many (a name was given twice).
    """
    paths: list[Path] = []
    path: Path = ()
    for _ in range(depth):
        if not isinstance(value, list | dict):
            return None
        paths.append(path)
        if value:
            last = len(value) - 1 if isinstance(value, list) else next(reversed(value))
            value, path = value[last], (*path, last)
    return paths


def _child(text: str, at: int, part: str | int) -> int | None:
    """Where the value of the property or item `part` of the value at `at` starts; the last one of a name."""
    if text[at] not in "{[":
        return None
    is_object, found, index = text[at] == "{", None, 0
    at = _skip(text, at + 1)
    while text[at] not in "}]":
        name: str | int = index
        if is_object:
            name, at = _STRING.raw_decode(text, at)
            at = _skip(text, _skip(text, at) + 1)
        if name == part:
            found = at
        at = _skip(text, _STRING.raw_decode(text, at)[1])
        if text[at] == ",":
            at = _skip(text, at + 1)
        index += 1
    return found


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in _SPACE:
        at += 1
    return at
