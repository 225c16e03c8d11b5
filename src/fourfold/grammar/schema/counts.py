"""minProperties, as far as a grammar can say it.

The grammar counts the properties that it writes, not the names: {"a": 1, "a": 2} has two properties there and
one for everybody who reads it. Where the names can be counted out, what must be there can be said exactly.
"""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

MAX_ALTERNATIVES = 16
"""Sets of names of which one must be there; beyond them validation is cheaper than the grammar."""

_FEW_NAMES = re.compile(r"\^(?:\((?:\?:)?([\w|]+)\)|\[([A-Za-z0-9_-]+)\]|(\w+))\$", re.ASCII)
"""^(one|other)$, ^[a-f]$ or ^name$."""


def without_min_properties(node: dict[str, Any]) -> dict[str, Any]:
    """The same object schema with minProperties said by `required`, if it allows a few names only."""
    least = node.get("minProperties", 0)
    if least < 1 or node.get("additionalProperties") is not False or "$ref" in node:
        return node
    properties = _every_property(node)
    needed = node.get("required", [])
    if properties is None or not isinstance(needed, list):
        return node
    others = [name for name, schema in properties.items() if schema is not False and name not in needed]
    missing = int(least) - len(set(needed))
    if missing > len(others) or math.comb(len(others), max(missing, 0)) > MAX_ALTERNATIVES:
        return node
    rest = {k: v for k, v in node.items() if k not in ("minProperties", "patternProperties")}
    rest["properties"] = properties
    if missing > 0:
        sets = [{"required": list(names)} for names in itertools.combinations(others, missing)]
        rest["allOf"] = [*rest.get("allOf", ()), {"anyOf": sets}]
    return rest


def can_miscount(node: dict[str, Any]) -> bool:
    """Whether the grammar of this object can write one name twice, or stop where no name is left, before it
    has minProperties of them."""
    least = node.get("minProperties", 0)
    closed = node.get("additionalProperties") is False
    return bool(least > 1 or (least == 1 and closed and node.get("patternProperties")))


def _every_property(node: dict[str, Any]) -> dict[str, Any] | None:
    """All that the object may have, by name; None if those are not a few, or two keywords speak of one."""
    found = dict(node.get("properties", {}))
    for pattern, schema in node.get("patternProperties", {}).items():
        names = _names(pattern)
        if names is None or not found.keys().isdisjoint(names):
            return None
        found |= dict.fromkeys(names, schema)
    return found


def _names(pattern: str) -> list[str] | None:
    """What a pattern matches, if that is a few names, in one order always."""
    match = _FEW_NAMES.fullmatch(pattern)
    if match is None:
        return None
    alternatives, letters, name = match.groups()
    if letters is None:
        return list(dict.fromkeys((alternatives or name).split("|")))
    return [letter for letter in map(chr, range(45, 123)) if re.fullmatch(f"[{letters}]", letter)]
