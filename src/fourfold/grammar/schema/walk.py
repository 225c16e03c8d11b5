"""Where the subschemas of a JSON Schema are. Everything else under a keyword is data, not schema."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from fourfold.errors import InvalidRequestError

Schema = dict[str, Any] | bool
Path = tuple[str | int, ...]

SINGLE = frozenset(
    {"additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames"}
    | {"then", "unevaluatedItems", "unevaluatedProperties"}
)
"""Keywords whose value is a schema (items: or a list of them)."""
MAPS = frozenset(
    {"$defs", "definitions", "dependentSchemas", "dependencies", "patternProperties", "properties"}
)
"""Keywords whose value maps names to schemas (dependencies: or to lists of names)."""
LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})


def is_schema(value: object) -> bool:
    return isinstance(value, dict | bool)


def children(schema: Schema) -> Iterator[tuple[Path, Any]]:
    """(path below `schema`, subschema) of every direct subschema."""
    if not isinstance(schema, dict):
        return
    for key, value in schema.items():
        if key in SINGLE and is_schema(value):
            yield (key,), value
        elif key in MAPS and isinstance(value, dict):
            for name, item in value.items():
                if is_schema(item):
                    yield (key, name), item
        elif (key in LISTS or key == "items") and isinstance(value, list):
            for index, item in enumerate(value):
                if is_schema(item):
                    yield (key, index), item


def count_subschemas(schema: Schema) -> int:
    """How many there are, itself included."""
    count, pending = 0, [schema]
    while pending:
        count += 1
        pending += [child for _, child in children(pending.pop())]
    return count


def map_children(schema: dict[str, Any], change: Callable[[Path, Any], Any]) -> dict[str, Any]:
    """A copy whose direct subschemas are change(path below `schema`, subschema)."""
    result: dict[str, Any] = {}
    for key, value in schema.items():
        if key in SINGLE and is_schema(value):
            result[key] = change((key,), value)
        elif key in MAPS and isinstance(value, dict):
            result[key] = {n: change((key, n), v) if is_schema(v) else v for n, v in value.items()}
        elif (key in LISTS or key == "items") and isinstance(value, list):
            result[key] = [change((key, i), v) if is_schema(v) else v for i, v in enumerate(value)]
        else:
            result[key] = value
    return result


def pointer(path: Path) -> str:
    """A JSON Pointer (RFC 6901) as a URI fragment, without percent-encoding."""
    return "#" + "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in path)


def resolve_pointer(root: Any, fragment: str) -> Any:
    """What the JSON Pointer `fragment` (after the #, percent-decoded) names; KeyError if nothing."""
    value = root
    for part in fragment.split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, list):
            if not part.isdecimal() or int(part) >= len(value):
                raise KeyError(part)
            value = value[int(part)]
        elif isinstance(value, dict):
            value = value[part]
        else:
            raise KeyError(part)
    return value


def refuse(path: Path, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"the JSON schema at {pointer(path)}: {why}", None, "invalid_json_schema")
