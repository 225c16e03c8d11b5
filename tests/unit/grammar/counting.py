"""Schemas whose values are objects nested to certain depths, as Handwritten/mod301 of the collection is."""

from __future__ import annotations

from typing import Any

WORD: Any = {"type": "object", "properties": {"a": {"$ref": "#/$defs/word"}}, "additionalProperties": False}
"""To be `word` of the definitions."""


def counter(name: str, length: int, ends: int) -> dict[str, Any]:
    """Definitions; {name}0 is of objects nested to a depth that is `ends` modulo `length`."""
    return {
        f"{name}{n}": {"additionalProperties": {"$ref": f"#/$defs/{name}{(n + 1) % length}"}}
        | ({} if n == ends else {"minProperties": 1})
        for n in range(length)
    }


def all_of(*names: str, **definitions: Any) -> dict[str, Any]:
    """A schema for what all of the named definitions (beside WORD) say."""
    return {
        "allOf": [{"$ref": f"#/$defs/{name}"} for name in ("word", *names)],
        "$defs": {"word": WORD, **definitions},
    }


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"a": value}
    return value
