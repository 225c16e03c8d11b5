"""What a JSON Schema must be before anything is compiled: in limits, well-formed, its references resolved."""

from __future__ import annotations

from typing import Any

from fourfold.errors import InvalidRequestError
from fourfold.grammar.schema.patterns import check_pattern
from fourfold.grammar.schema.refs import References
from fourfold.grammar.schema.walk import LISTS, MAPS, SINGLE, Path, children, is_schema, refuse

MAX_BYTES = 1 << 20
MAX_NODES = 50_000
"""Subschemas of one schema."""
MAX_DEPTH = 100
"""Levels of JSON: an object in an object's property is two levels down."""
MAX_ENUM = 20_000
"""Values of one enum."""
MAX_REPEAT = 100_000
"""Largest minItems, maxLength and the like that a grammar is made of."""

TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
_COUNTS: tuple[str, ...] = ("maxContains", "maxItems", "maxLength", "maxProperties")
_COUNTS += ("minContains", "minItems", "minLength", "minProperties")
_NUMBERS = ("maximum", "minimum", "multipleOf")


def check_schema(schema: Any) -> None:
    """Raises InvalidRequestError naming the place in the schema, the value and the limit."""
    if not is_schema(schema):
        raise InvalidRequestError("a JSON schema must be an object, true or false")
    check_depth(schema)
    references = References(schema)
    work: list[tuple[Path, Any]] = [((), schema)]
    count = 0
    while work:
        path, node = work.pop()
        count += 1
        if count > MAX_NODES:
            raise InvalidRequestError(f"the JSON schema has more than {MAX_NODES} subschemas")
        if isinstance(node, dict):
            _check_node(node, path, references)
            work.extend((path + below, child) for below, child in children(node))


def check_depth(schema: Any) -> None:
    """Raises InvalidRequestError beyond MAX_DEPTH levels: recursive functions may follow."""
    level: list[Any] = [schema]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for value in level
            if isinstance(value, dict | list)
            for child in (value.values() if isinstance(value, dict) else value)
        ]
        if not level:
            return
    raise InvalidRequestError(f"the JSON schema nests more than {MAX_DEPTH} levels deep")


def _check_node(node: dict[str, Any], path: Path, references: References) -> None:
    given = node.get("type", [])
    for name in given if isinstance(given, list) else [given]:
        if name not in TYPES:
            raise refuse((*path, "type"), f"{name!r} is not a type; the types are {', '.join(TYPES)}")
    for key in ("$ref", "$dynamicRef"):
        if key in node:
            _check_ref(node, node[key], (*path, key), references)
    if "$recursiveRef" in node:
        raise refuse((*path, "$recursiveRef"), "$recursiveRef is not supported; use $ref")
    for key in LISTS & node.keys():
        if not (isinstance(node[key], list) and node[key] and all(map(is_schema, node[key]))):
            raise refuse((*path, key), "it must be a list of at least one schema")
    for key in MAPS & node.keys():
        value = node[key]
        allowed = (dict, bool, list, str) if key == "dependencies" else (dict, bool)
        if not (isinstance(value, dict) and all(isinstance(item, allowed) for item in value.values())):
            raise refuse((*path, key), "it must map names to schemas")
    for key in SINGLE & node.keys():
        value = node[key]
        if not (
            is_schema(value) or (key == "items" and isinstance(value, list) and all(map(is_schema, value)))
        ):
            raise refuse((*path, key), f"it must be a schema, got {str(value)[:60]!r}")
    _check_values(node, path)


def _check_ref(node: dict[str, Any], ref: Any, path: Path, references: References) -> None:
    if not isinstance(ref, str):
        raise refuse(path, f"a reference must be a string, got {ref!r}")
    try:
        references.target(node, ref)
    except (KeyError, ValueError) as error:
        raise refuse(
            path,
            f"{ref[:200]!r} names nothing in this schema; a reference begins with # and stays in the "
            "document (others are never fetched)",
        ) from error


def _check_values(node: dict[str, Any], path: Path) -> None:
    values = node.get("enum", [])
    if not isinstance(values, list):
        raise refuse((*path, "enum"), f"it must be a list, got {str(values)[:60]!r}")
    if len(values) > MAX_ENUM:
        raise refuse((*path, "enum"), f"it has {len(values)} values, the limit is {MAX_ENUM}")
    for key in ("pattern", "patternProperties"):
        if key in node:
            patterns = [node[key]] if key == "pattern" else list(node[key])
            for pattern in patterns:
                if not isinstance(pattern, str):
                    raise refuse((*path, key), f"a pattern must be a string, got {pattern!r}")
                try:
                    check_pattern(pattern)
                except InvalidRequestError as error:
                    raise refuse((*path, key), str(error)) from error
    for key in _COUNTS:
        value = node.get(key, 0)
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != int(value):
            raise refuse((*path, key), f"it must be a whole number of at least 0, got {value!r}")
        if value > MAX_REPEAT and key.startswith("min"):
            raise refuse((*path, key), f"it is {value}, the limit is {MAX_REPEAT}")
    for key in _NUMBERS:
        value = node.get(key, 1)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise refuse((*path, key), f"it must be a number, got {value!r}")
    if node.get("multipleOf", 1) <= 0:
        raise refuse((*path, "multipleOf"), f"it must be above 0, got {node['multipleOf']!r}")
    required = node.get("required", [])
    if not (
        isinstance(required, bool)
        or (isinstance(required, list) and all(isinstance(n, str) for n in required))
    ):
        raise refuse((*path, "required"), f"it must be a list of names, got {str(required)[:60]!r}")
