"""A JSON Schema that the grammar compiler takes, accepting at least what the given one accepts.

What had to be left out is noted. With no notes the grammar alone says exactly what the schema says; with
notes the finished value is validated as well.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from fourfold.errors import InvalidRequestError
from fourfold.grammar.schema.check import TYPES
from fourfold.grammar.schema.counts import can_miscount
from fourfold.grammar.schema.exact import rewrite, types_of
from fourfold.grammar.schema.product import merge_references
from fourfold.grammar.schema.validate import _is_old
from fourfold.grammar.schema.walk import Path, count_subschemas, map_children, pointer, resolve_pointer

Compile = Callable[[dict[str, Any]], str]
"""The compiler's complaint about a schema; empty if there is none."""

_NEVER = (
    "not", "if", "then", "else", "dependencies", "dependentSchemas", "dependentRequired",
    "propertyNames", "unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "contains",
)  # fmt: skip
"""Keywords that the grammar compiler does not have."""
_RIDERS = {"if": ("then", "else"), "contains": ("minContains", "maxContains")}
"""Keywords that mean nothing without another."""
_SAY_MORE = ("not", "contains", "if")
"""Keywords that forbid something even if their schema allows everything."""
_BEYOND = tuple(f'"{key}"' for key in (*_NEVER, "oneOf", "uniqueItems", "minProperties", "x-guidance"))
"""A schema whose text has none of these is as it is what the compiler says it is."""
MAX_COMPILED = 16_600
"""Subschemas that the compiler takes, about; unlike check.MAX_NODES of those only that a value can reach."""
_HOPELESS = "schema too large"
"""A complaint of the compiler's that no relaxing helps."""
_ANNOTATIONS = (
    "$anchor", "$comment", "$dynamicAnchor", "contentEncoding", "contentMediaType", "contentSchema",
    "default", "deprecated", "description", "examples", "readOnly", "title", "writeOnly", "x-guidance",
)  # fmt: skip


class Relaxed(msgspec.Struct):
    """schema: for the grammar compiler.  notes: "#/path: keyword" of all that it leaves out."""

    schema: Any
    notes: list[str] = msgspec.field(default_factory=list)


def relax(schema: Any, compile: Compile) -> Relaxed:
    """Raises InvalidRequestError if not even the last resort compiles."""
    if not isinstance(schema, dict):
        return Relaxed(schema)
    text = json.dumps(schema)
    message = ""
    if not any(word in text for word in _BEYOND):
        message = compile(schema)
        if not message:
            return Relaxed(schema)
    if _HOPELESS not in message:
        for start, dropped in _starts(schema):
            relaxed = _Relaxer(dropped, compile, old=_is_old(schema)).run(start)
            message = compile(relaxed.schema)
            if not message:
                return relaxed
            if _HOPELESS in message:
                break
    if _HOPELESS in message:
        raise InvalidRequestError(
            f"the JSON schema has {count_subschemas(schema)} subschemas; a grammar can be made of about "
            f"{MAX_COMPILED}: leave out what no answer needs"
        )
    raise InvalidRequestError(f"the JSON schema cannot be made into a grammar: {message}")


def _starts(schema: dict[str, Any]) -> Iterator[tuple[Any, tuple[str, ...]]]:
    """(schema, what to leave out of it): each gives up more than the one before. Most need the first."""
    yield rewrite(schema), ()
    yield schema, ()
    merged = merge_references(schema)
    if merged is not schema:
        merged = rewrite(merged)
        yield merged, ()
        yield merged, _LEVELS[0]
    for level in _LEVELS:
        yield schema, level


_LEVELS: tuple[tuple[str, ...], ...] = (
    ("minProperties", "maxProperties"),
    ("minProperties", "maxProperties", "patternProperties"),
    ("minProperties", "maxProperties", "patternProperties", "all of allOf but one"),
    ("minProperties", "maxProperties", "patternProperties", "allOf"),
    ("minProperties", "maxProperties", "patternProperties", "allOf", "anyOf", "oneOf", "siblings"),
)
"""What is left out when the compiler still complains; "siblings" are the keywords beside a $ref."""


class _Relaxer:
    def __init__(self, dropped: tuple[str, ...], compile: Compile, *, old: bool) -> None:
        self._dropped = dropped
        self._compile = compile
        self._old = old
        self._notes: list[str] = []
        self._root: Any = None
        self._formats: dict[str, bool] = {}
        self._patterns: dict[str, bool] = {}

    def run(self, schema: dict[str, Any]) -> Relaxed:
        self._root = json.loads(json.dumps(schema))
        relaxed = self._relax((), self._root)
        return Relaxed(relaxed, self._notes)

    def _relax(self, path: Path, node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        for key in _ANNOTATIONS:
            node.pop(key, None)
        if "$ref" in node:
            self._beside_ref(path, node)
        for key in _NEVER:
            if key in node:
                self._drop(path, node, key)
        for key in self._dropped:
            if key in node:
                self._drop(path, node, key)
        if "all of allOf but one" in self._dropped and len(node.get("allOf", ())) > 1:
            self._note(path, "allOf")
            node["allOf"] = [min(node["allOf"], key=self._width)]
        self._simplify(path, node)
        return map_children(node, lambda below, child: self._relax(path + below, child))

    def _width(self, branch: Any) -> int:
        """How many types a value of `branch` may have: of several, the first of the fewest says most."""
        if isinstance(branch, dict) and str(branch.get("$ref", "")).startswith("#/"):
            try:
                branch = resolve_pointer(self._root, branch["$ref"][1:])
            except KeyError:  # below an $id
                return len(TYPES)
        return len(types_of(branch))

    def _beside_ref(self, path: Path, node: dict[str, Any]) -> None:
        beside = [k for k in node if k not in ("$ref", "$defs", "definitions", "$schema", "$id", "id")]
        if self._old:
            for key in beside:  # means nothing in these drafts
                del node[key]
        elif "siblings" in self._dropped:
            for key in beside:
                self._note(path, key)
                del node[key]

    def _drop(self, path: Path, node: dict[str, Any], key: str) -> None:
        value = node.pop(key)
        riders = [node.pop(rider, None) for rider in _RIDERS.get(key, ())]
        if key in ("then", "else") or (key == "if" and riders == [None, None]):
            return  # without each other they mean nothing
        if (value is True or value == {}) and key not in _SAY_MORE:
            return
        self._note(path, key)
        if key == "patternProperties" and node.get("additionalProperties", True) is not True:
            # Names that only a pattern allowed would be refused now.
            del node["additionalProperties"]

    def _simplify(self, path: Path, node: dict[str, Any]) -> None:
        if node.pop("uniqueItems", False) and node.get("maxItems", 2) > 1:
            self._note(path, "uniqueItems")
        if can_miscount(node):
            self._note(path, "minProperties")  # and keep it: it is right but for that
        if "oneOf" in node:
            self._note(path, "oneOf")
            branches = node.pop("oneOf")
            if "anyOf" in node:
                node["allOf"] = [*node.get("allOf", ()), {"anyOf": branches}]
            else:
                node["anyOf"] = branches
        if "format" in node and not self._takes_format(node["format"]):
            del node["format"]  # an annotation, as far as the specification goes
        if "pattern" in node and not self._takes_pattern(node["pattern"]):
            self._note(path, "pattern")
            del node["pattern"]
        named = node.get("patternProperties", {})
        if not all(self._takes_pattern(pattern) for pattern in named):
            self._drop(path, node, "patternProperties")
        if isinstance(node.get("required"), bool):
            del node["required"]

    def _takes_format(self, name: Any) -> bool:
        if not isinstance(name, str):
            return False
        if name not in self._formats:
            self._formats[name] = not self._compile({"type": "string", "format": name})
        return self._formats[name]

    def _takes_pattern(self, pattern: str) -> bool:
        if pattern not in self._patterns:
            self._patterns[pattern] = not self._compile({"type": "string", "pattern": pattern})
        return self._patterns[pattern]

    def _note(self, path: Path, key: str) -> None:
        self._notes.append(f"{pointer(path)}: {key}")
