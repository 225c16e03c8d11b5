"""Where in a JSON text a value stands."""

from __future__ import annotations

import json

from fourfold.grammar.schema.walk import Path

_SPACE = " \t\n\r"
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
