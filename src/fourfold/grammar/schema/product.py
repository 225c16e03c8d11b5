"""allOf of references, as one schema: what all of them say together, found by following them in step.

Where {"allOf": [A, B]} is of recursive schemas, A and B of one property are again an allOf, and so on. Their
combinations are as finite as the definitions: each becomes a definition of its own (the product of two
automata), with exactly the same meaning.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from fourfold.grammar.schema.exact import types_of
from fourfold.grammar.schema.walk import children, map_children, resolve_pointer

MAX_PRODUCTS = 256
"""Combinations of one schema; beyond them it is left as it is."""

_LARGEST = ("minProperties", "minItems", "minLength", "minimum", "exclusiveMinimum")
_SMALLEST = ("maxProperties", "maxItems", "maxLength", "maximum", "exclusiveMaximum")
_PARTS = frozenset({"type", "properties", "additionalProperties", "required", "items", *_LARGEST, *_SMALLEST})
"""Keywords that can be merged."""
_SILENT = frozenset({"title", "description", "$comment", "default", "examples"})
_HOLDERS = frozenset({"$defs", "definitions", "$schema"})


class _CannotMergeError(Exception):
    """A schema that these rules say nothing of."""


def merge_references(schema: dict[str, Any]) -> dict[str, Any]:
    """`schema` with each allOf that has references made into one reference, where that is exact; `schema`
    itself if there is none, or too many combinations would come of it."""
    if any(isinstance(node.get("$id", node.get("id")), str) for node in _inner_nodes(schema)):
        return schema  # references may begin elsewhere
    merger = _Merger(schema)
    try:
        result = merger.rewrite(schema)
    except _CannotMergeError:
        return schema
    return {**result, "$defs": {**result.get("$defs", {}), **merger.made}} if merger.made else schema


def _inner_nodes(schema: dict[str, Any]) -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = []
    pending = [child for _, child in children(schema)]
    while pending:
        node = pending.pop()
        if isinstance(node, dict):
            nodes.append(node)
            pending += [child for _, child in children(node)]
    return nodes


class _Merger:
    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._names: dict[frozenset[str], str] = {}
        """Of combinations, by their schemas as JSON."""
        self.made: dict[str, Any] = {}

    def rewrite(self, node: Any) -> Any:
        """Raises _CannotMergeError if there are too many products."""
        if not isinstance(node, dict):
            return node
        node = map_children(node, lambda _, child: self.rewrite(child))
        branches = node.get("allOf")
        if not isinstance(branches, list) or "$ref" in node:
            return node
        references = [branch for branch in branches if _is_reference(branch)]
        if len(references) < 2:
            return node
        plain = [branch for branch in branches if _is_plain(branch)]
        before = self._names.copy(), self.made.copy()
        try:
            product = self._both([*references, *plain])
        except _TooMany:
            raise _CannotMergeError from None
        except _CannotMergeError:
            self._names, self.made = before
            return node
        left = [branch for branch in branches if not (_is_reference(branch) or _is_plain(branch))]
        return {**node, "allOf": [product, *left]}

    def _both(self, schemas: list[Any]) -> Any:
        """What is in all of `schemas`."""
        schemas = [one for one in schemas if one is not True and one != {}]
        if any(one is False for one in schemas):
            return False
        different = {json.dumps(one, sort_keys=True): one for one in schemas}
        if len(different) < 2:
            return next(iter(different.values()), True)
        # Every combination has a name, which it is found by when it comes again, below itself even.
        key = frozenset(different)
        name = self._names.get(key)
        if name is None:
            if len(self._names) >= MAX_PRODUCTS:
                raise _TooMany
            name = self._names[key] = f"all-of-{len(self._names)}"
            self.made[name] = self._merged(list(different.values()))
        return {"$ref": f"#/$defs/{name}"}

    def _target(self, ref: str) -> Any:
        if not ref.startswith("#/"):
            raise _CannotMergeError
        try:
            return resolve_pointer(self._root, ref[1:])
        except KeyError as error:
            raise _CannotMergeError from error

    def _merged(self, parts: list[Any]) -> Any:
        flat: list[dict[str, Any]] = []
        pending, followed = list(reversed(parts)), set()
        while pending:
            part = pending.pop()
            if _is_reference(part):
                if part["$ref"] in followed:
                    continue  # it says the same again
                followed.add(part["$ref"])
                part = self._target(part["$ref"])
            if not isinstance(part, dict):
                if part is True:
                    continue
                raise _CannotMergeError
            said = {k: v for k, v in part.items() if k not in _SILENT and k not in _HOLDERS}
            inner = said.pop("allOf", [])
            if said.keys() - _PARTS:
                raise _CannotMergeError
            pending += reversed(inner)
            flat.append(said)
        return self._merge_flat(flat)

    def _merge_flat(self, parts: list[dict[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        _keep(result, parts, _LARGEST, max)
        _keep(result, parts, _SMALLEST, min)
        types = _types(parts)
        if types is not None:
            result["type"] = types
        required = [name for part in parts for name in _names(part)]
        if required:
            result["required"] = list(dict.fromkeys(required))
        if any("properties" in part for part in parts):
            names = dict.fromkeys(name for part in parts for name in part.get("properties", {}))
            result["properties"] = {
                name: self._both(
                    [part.get("properties", {}).get(name, part.get("additionalProperties", True))
                     for part in parts]
                )
                for name in names
            }  # fmt: skip
        if any("additionalProperties" in part for part in parts):
            result["additionalProperties"] = self._both(
                [part.get("additionalProperties", True) for part in parts]
            )
        items = [part["items"] for part in parts if "items" in part]
        if any(isinstance(one, list) for one in items):
            raise _CannotMergeError
        if items:
            result["items"] = self._both(items)
        return result


class _TooMany(_CannotMergeError):
    """More combinations than MAX_PRODUCTS."""


def _is_reference(schema: Any) -> bool:
    return isinstance(schema, dict) and isinstance(schema.get("$ref"), str) and not schema.keys() - {"$ref"}


def _is_plain(schema: Any) -> bool:
    return isinstance(schema, dict) and not schema.keys() - _PARTS


def _keep(
    result: dict[str, Any], parts: list[dict[str, Any]], keys: tuple[str, ...], choose: Callable[..., Any]
) -> None:
    for key in keys:
        values = [part[key] for part in parts if key in part]
        if any(isinstance(value, bool) for value in values):
            raise _CannotMergeError  # draft 4's exclusiveMinimum
        if values:
            result[key] = choose(values)


def _types(parts: list[dict[str, Any]]) -> str | list[str] | None:
    given = [part["type"] for part in parts if "type" in part]
    if not given:
        return None
    integers = ["integer" in ([one] if isinstance(one, str) else one) for one in given]
    if any(integers):
        if all(one == given[0] for one in given):
            return given[0]  # type: ignore[no-any-return]
        raise _CannotMergeError  # an integer is a number as well
    left = types_of({"allOf": [{"type": one} for one in given]})
    if not left:
        raise _CannotMergeError
    return sorted(left) if len(left) > 1 else next(iter(left))


def _names(part: dict[str, Any]) -> list[str]:
    required = part.get("required", [])
    if not isinstance(required, list):
        raise _CannotMergeError
    return required
