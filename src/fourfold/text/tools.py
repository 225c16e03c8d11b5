"""The tools that a request declares, checked."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec

from fourfold.errors import InvalidRequestError
from fourfold.grammar.schema.adopt import adopt
from fourfold.grammar.schema.check import check_depth, check_schema

MAX_TOOLS = 1024
MAX_TOOLS_BYTES = 1 << 20
"""Of all tools of a request, as JSON."""

_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


@dataclass(frozen=True, slots=True)
class Tool:
    """schema: of the parameters, {} for any.  shown: as a chat template gets it, in OpenAI's form."""

    name: str
    schema: dict[str, Any]
    strict: bool
    shown: dict[str, Any]


def tools_size(given: Sequence[Any] | None, field: str) -> int:
    """Bytes of tools as JSON. Raises InvalidRequestError if there are more than MAX_TOOLS_BYTES."""
    if not given:
        return 0
    try:
        size = len(msgspec.json.encode(given))
    except (RecursionError, TypeError, ValueError) as error:
        raise InvalidRequestError(f"{field} cannot be written as JSON: {error}", field) from error
    if size > MAX_TOOLS_BYTES:
        raise InvalidRequestError(f"{field} has {size} bytes of JSON, the limit is {MAX_TOOLS_BYTES}", field)
    return size


def declared_tools(given: Sequence[Any] | None, field: str, *, legacy: bool = False) -> dict[str, Tool]:
    """By name. given: in OpenAI's form; legacy: as `functions`.  field: where they stand in the request.

    Raises InvalidRequestError naming the tool and what is wrong with it.
    """
    tools_size(given, field)
    if given is not None and len(given) > MAX_TOOLS:
        raise InvalidRequestError(f"{field} has {len(given)} entries; at most {MAX_TOOLS} are taken", field)
    tools: dict[str, Tool] = {}
    for index, entry in enumerate(given or ()):
        tool = _tool(entry, f"{field}[{index}]", field, legacy)
        if tool.name in tools:
            raise InvalidRequestError(f"{field}[{index}]: the name {tool.name!r} is there twice", field)
        tools[tool.name] = tool
    return tools


def _tool(entry: Any, place: str, field: str, legacy: bool) -> Tool:
    if not isinstance(entry, dict):
        raise InvalidRequestError(f"{place} must be an object, got {type(entry).__name__}", field)
    kind = "function" if legacy else entry.get("type", "function")
    function = entry if legacy else entry.get("function")
    if kind != "function":
        raise InvalidRequestError(
            f"{place}.type is {str(kind)[:60]!r}; this server has tools of type 'function' only", field
        )
    if not isinstance(function, dict):
        raise InvalidRequestError(f"{place}.function must be an object with a name", field)
    inner = place if legacy else f"{place}.function"
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequestError(
            f"{inner}.name must be 1 to 128 letters, digits and characters of _-.:/, got {str(name)[:160]!r}",
            field,
        )
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise InvalidRequestError(f"{inner}.description must be a string", field)
    strict = function.get("strict")
    if strict not in (None, True, False):
        raise InvalidRequestError(f"{inner}.strict must be true or false", field)
    schema = _schema(function.get("parameters"), f"{inner}.parameters", field)
    # Templates index these without asking whether they are there.
    shown = {**function, "description": description or "", "parameters": schema or _NO_PARAMETERS}
    shown.pop("strict", None)
    return Tool(name, schema, bool(strict), {"type": "function", "function": shown})


_NO_PARAMETERS = {"type": "object", "properties": {}}


def _schema(schema: Any, place: str, field: str) -> dict[str, Any]:
    if schema is None:
        return {}
    if not isinstance(schema, dict):
        raise InvalidRequestError(f"{place} must be a JSON Schema (an object)", field)
    if schema.get("type", "object") != "object":
        raise InvalidRequestError(
            f"{place}.type must be 'object', for arguments have names; got {str(schema['type'])[:60]!r}",
            field,
        )
    try:
        _check(msgspec.json.encode(schema))
    except (InvalidRequestError, RecursionError) as error:
        message = str(error) if isinstance(error, InvalidRequestError) else "it is nested too deeply"
        raise InvalidRequestError(f"{place}: {message}", field, "invalid_tool_schema") from error
    return schema


@lru_cache(1024)
def _check(encoded: bytes) -> None:
    schema = msgspec.json.decode(encoded)
    check_depth(schema)
    check_schema(adopt(schema))
