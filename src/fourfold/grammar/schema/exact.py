"""Rewriting of keywords that a grammar cannot say into ones that it can, meaning exactly the same.

`not` of cases that can be counted out (types, bounds, const and enum beside an enum, presence of a property)
becomes what is left; oneOf whose branches exclude each other becomes anyOf; dependencies and conditionals
become alternatives; minProperties of a few names becomes sets of required ones.
"""

from __future__ import annotations

import itertools
from typing import Any

from fourfold.grammar.schema.check import TYPES
from fourfold.grammar.schema.counts import without_min_properties
from fourfold.grammar.schema.validate import equal
from fourfold.grammar.schema.walk import map_children

_ALL = frozenset(TYPES) - {"integer"}
"""The types that exclude each other: every integer is a number."""
_KEYS_OF_TYPE = {
    "minimum": "number", "maximum": "number", "exclusiveMinimum": "number", "exclusiveMaximum": "number",
    "minLength": "string", "maxLength": "string", "minItems": "array", "maxItems": "array",
    "minProperties": "object", "maxProperties": "object",
}  # fmt: skip
_MAX_ALTERNATIVES = 16
"""Alternatives made of one schema's dependencies; beyond them validation is cheaper than the grammar."""


def rewrite(schema: Any) -> Any:
    """The same schema in keywords that a grammar can say, as far as this is exact."""
    if not isinstance(schema, dict):
        return schema
    node = map_children(schema, lambda _, child: rewrite(child))
    if "$ref" in node:
        return node
    node = _without_not(node)
    node = _without_conditional(node)
    node = _without_dependencies(node)
    node = without_min_properties(node)
    if "oneOf" in node and "anyOf" not in node and _exclusive(node["oneOf"], node):
        node["anyOf"] = node.pop("oneOf")
    return node


def types_of(schema: Any) -> frozenset[str]:
    """Types that a valid value can have, at most."""
    if schema is False:
        return frozenset()
    if schema is True:
        return _ALL
    allowed = _ALL
    if "type" in schema:
        given = schema["type"]
        allowed &= {"number" if t == "integer" else t for t in ([given] if isinstance(given, str) else given)}
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if values is not None:
        allowed &= {type_of(value) for value in values}
    for branch in schema.get("allOf", ()):
        allowed &= types_of(branch)
    for key in ("anyOf", "oneOf"):
        if key in schema:
            allowed &= frozenset(itertools.chain(*map(types_of, schema[key])))
    return allowed


def type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    names = {str: "string", int: "number", float: "number", dict: "object", list: "array", type(None): "null"}
    return names[type(value)]


def negate(schema: Any) -> Any | None:
    """A schema for exactly the values that `schema` refuses; None if that cannot be said without `not`."""
    if isinstance(schema, bool):
        return not schema
    keys = schema.keys() - {"$schema", "$comment", "title", "description", "default", "examples"}
    if not keys:
        return False
    parts: list[Any] = []
    for key in keys:
        part = _negate_keyword(key, schema[key], schema)
        if part is None:
            return None
        parts.append(part)
    return parts[0] if len(parts) == 1 else {"anyOf": parts}


def _negate_keyword(key: str, value: Any, schema: dict[str, Any]) -> Any | None:
    if key == "type":
        names = {value} if isinstance(value, str) else set(value)
        if "integer" in names and "number" not in names:
            return None
        return {"type": sorted(_ALL - names)} if _ALL - names else False
    if key == "not":
        return value
    if key == "required" and isinstance(value, list):
        lacking = [{"type": "object", "properties": {name: False}} for name in value]
        return {"anyOf": lacking} if lacking else False
    if key in ("anyOf", "allOf"):
        parts = [negate(branch) for branch in value]
        if any(part is None for part in parts):
            return None
        return {"allOf" if key == "anyOf" else "anyOf": parts}
    if key in ("const", "enum"):
        values = [value] if key == "const" else value
        if all(isinstance(one, bool) or one is None for one in values):
            return _other_than_literals(values)
        return None
    return _negate_bound(key, value, schema)


def _other_than_literals(values: list[Any]) -> Any:
    left = [one for one in (True, False, None) if not any(equal(one, value) for value in values)]
    others: list[Any] = [{"type": sorted(_ALL - {"boolean", "null"})}]
    return {"anyOf": [*others, {"enum": left}]} if left else others[0]


def _negate_bound(key: str, value: Any, schema: dict[str, Any]) -> Any | None:
    kind = _KEYS_OF_TYPE.get(key)
    strict = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    if kind is None or isinstance(value, bool) or any(isinstance(s, bool) for s in strict):
        return None
    if kind == "number":
        other = {
            "minimum": "exclusiveMaximum", "exclusiveMaximum": "minimum",
            "maximum": "exclusiveMinimum", "exclusiveMinimum": "maximum",
        }[key]  # fmt: skip
        return {"type": "number", other: value}
    if key.startswith("min"):
        return {"type": kind, "max" + key[3:]: value - 1} if value > 0 else False
    return {"type": kind, "min" + key[3:]: value + 1}


def _without_not(node: dict[str, Any]) -> dict[str, Any]:
    if "not" not in node:
        return node
    excluded = node["not"]
    rest = {key: value for key, value in node.items() if key != "not"}
    if isinstance(excluded, dict) and not excluded.keys() - {"const", "enum"} and excluded:
        values = [excluded["const"]] if "const" in excluded else excluded["enum"]
        if "const" in excluded and "enum" in excluded:
            return node
        if "enum" in rest:
            left = [one for one in rest["enum"] if not any(equal(one, value) for value in values)]
            return {**rest, "enum": left} if left else node
        values = [value for value in values if type_of(value) in types_of(rest)]
        if not values:
            return rest
    elif not types_of(excluded) & types_of(rest):
        return rest
    opposite = negate(excluded)
    return node if opposite is None else _both(rest, opposite)


def _both(node: dict[str, Any], other: Any) -> dict[str, Any]:
    if other is True:
        return node
    # Keywords of the two that do not meet can stand side by side, which is easier on the compiler.
    if isinstance(other, dict) and not node.keys() & other.keys() and "properties" not in other:
        return {**node, **other}
    if isinstance(other, dict) and other.keys() == {"type"} and isinstance(node.get("type"), str | list):
        own = [node["type"]] if isinstance(node["type"], str) else node["type"]
        kept = [name for name in own if ("number" if name == "integer" else name) in other["type"]]
        if kept:
            return {**node, "type": kept[0] if len(kept) == 1 else kept}
    return {**node, "allOf": [*node.get("allOf", ()), other]}


def _without_conditional(node: dict[str, Any]) -> dict[str, Any]:
    if "if" not in node:
        return node
    condition = node["if"]
    opposite = negate(condition)
    if opposite is None:
        return node
    rest = {key: value for key, value in node.items() if key not in ("if", "then", "else")}
    held = {"allOf": [condition, node.get("then", True)]}
    return _both(rest, {"anyOf": [held, {"allOf": [opposite, node.get("else", True)]}]})


def _without_dependencies(node: dict[str, Any]) -> dict[str, Any]:
    pairs = [
        (key, name, needed)
        for key in ("dependencies", "dependentRequired", "dependentSchemas")
        for name, needed in node.get(key, {}).items()
    ]
    if not pairs or 2 ** len(pairs) > _MAX_ALTERNATIVES:
        return node
    rest = {key: value for key, value in node.items() if not key.startswith("depend")}
    for _, name, needed in pairs:
        needs = {"required": [needed] if isinstance(needed, str) else needed}
        schema = needs if isinstance(needed, list | str) else needed
        # A value that is no object has no such property either.
        lacks = {"properties": {name: False}}
        rest["allOf"] = [
            *rest.get("allOf", ()),
            {"anyOf": [lacks, {"allOf": [{"required": [name]}, schema]}]},
        ]
    return rest


def _exclusive(branches: list[Any], node: dict[str, Any]) -> bool:
    """Whether no value matches two of `branches`."""
    if len(branches) > 64:
        return False
    return all(_disjoint(a, b) for a, b in itertools.combinations(branches, 2))


def _disjoint(a: Any, b: Any) -> bool:
    if not types_of(a) & types_of(b):
        return True
    if isinstance(a, bool) or isinstance(b, bool):
        return False
    values_a, values_b = _values(a), _values(b)
    if values_a is not None and values_b is not None:
        return not any(equal(x, y) for x in values_a for y in values_b)
    if types_of(a) == types_of(b) == {"object"}:
        return _disjoint_objects(a, b) or _disjoint_objects(b, a)
    return False


def _values(schema: Any) -> list[Any] | None:
    if not isinstance(schema, dict):
        return None
    values: list[Any] | None = [schema["const"]] if "const" in schema else schema.get("enum")
    return values


def _disjoint_objects(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Told apart by a property that `a` requires: of another type or value in `b`, or not allowed there."""
    required = a.get("required")
    for name in required if isinstance(required, list) else ():
        own, other = a.get("properties", {}), b.get("properties", {})
        if name in other:
            required_b = b.get("required")
            both = isinstance(required_b, list) and name in required_b
            if name in own and both and _disjoint(own[name], other[name]):
                return True
            if other[name] is False:
                return True
        elif b.get("additionalProperties") is False and not b.get("patternProperties"):
            return True
    return False
