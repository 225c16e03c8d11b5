"""The tools of a chat request: checked, and in one form whatever the client called them."""

from __future__ import annotations

import re
import secrets
import string
import uuid
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import msgspec

from fourfold.errors import InvalidRequestError
from fourfold.grammar.schema.adopt import adopt
from fourfold.grammar.schema.check import check_depth, check_schema
from fourfold.server.wire import ChatBody

MAX_TOOLS = 1024

_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


_ID_CHARACTERS = string.ascii_letters + string.digits


def openai_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def mistral_call_id() -> str:
    """Mistral's templates take nine letters and digits only."""
    return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(9))


@dataclass(frozen=True, slots=True)
class Tool:
    """schema: of the parameters, {} for any.  shown: as a chat template gets it, in OpenAI's form."""

    name: str
    schema: dict[str, Any]
    strict: bool
    shown: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Tooling:
    """What a request may call.

    tools: those it may call; none if tool_choice is "none".
    forced: whether the answer must be a call of one of them.
    parallel: whether it may call more than once.
    legacy: the client speaks of functions, not of tools.
    """

    tools: tuple[Tool, ...] = ()
    forced: bool = False
    parallel: bool = True
    legacy: bool = False

    @property
    def strict(self) -> bool:
        return any(tool.strict for tool in self.tools)


def read_tools(body: ChatBody) -> Tooling:
    """Raises InvalidRequestError naming the tool and what is wrong with it."""
    if body.functions and body.tools:
        raise InvalidRequestError("functions is the old name of tools; give one of them", "functions")
    legacy = bool(body.functions)
    field = "functions" if legacy else "tools"
    given = body.functions if legacy else body.tools
    if given is not None and len(given) > MAX_TOOLS:
        raise InvalidRequestError(f"{field} has {len(given)} entries; at most {MAX_TOOLS} are taken", field)
    tools: dict[str, Tool] = {}
    for index, entry in enumerate(given or ()):
        tool = _tool(entry, f"{field}[{index}]", field, legacy)
        if tool.name in tools:
            raise InvalidRequestError(f"{field}[{index}]: the name {tool.name!r} is there twice", field)
        tools[tool.name] = tool
    # There is room for one function_call in a message.
    parallel = body.parallel_tool_calls is not False and not legacy
    every = Tooling(tuple(tools.values()), parallel=parallel, legacy=legacy)
    if body.function_call is not None:
        return _chosen(every, body.function_call, "function_call")
    return _chosen(every, body.tool_choice, "tool_choice")


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


def _chosen(every: Tooling, choice: Any, field: str) -> Tooling:
    """`every` as far as the request's choice leaves it."""
    if choice is None or choice == "auto":
        return every
    if choice == "none":
        return replace(every, tools=())
    if choice == "required" and field == "tool_choice":
        if not every.tools:
            raise InvalidRequestError("tool_choice is 'required', but the request declares no tools", field)
        return replace(every, forced=True)
    if not isinstance(choice, dict):
        known = "none, auto, required or an object" if field == "tool_choice" else "none, auto or an object"
        raise InvalidRequestError(f"{field} must be {known} that names one, got {str(choice)[:60]!r}", field)
    if choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools")
        if not isinstance(allowed, dict) or not isinstance(allowed.get("tools"), list):
            raise InvalidRequestError(f"{field}.allowed_tools must have a mode and a list of tools", field)
        names = dict.fromkeys(_name_in(one, field) for one in allowed["tools"])
        fewer = replace(every, tools=tuple(_find(every, name, field) for name in names))
        return _chosen(fewer, allowed.get("mode"), field)
    name = choice.get("name") if field == "function_call" else _name_in(choice, field)
    return replace(every, tools=(_find(every, name, field),), forced=True, parallel=False)


def _name_in(choice: Any, field: str) -> Any:
    function = choice.get("function", choice) if isinstance(choice, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(
            f'{field} must be like {{"type": "function", "function": {{"name": "..."}}}}', field
        )
    return function["name"]


def _find(tooling: Tooling, name: Any, field: str) -> Tool:
    found = next((tool for tool in tooling.tools if tool.name == name), None)
    if found is None:
        names = ", ".join(repr(tool.name) for tool in tooling.tools[:20]) or "no tools"
        raise InvalidRequestError(
            f"{field} names {str(name)[:160]!r}, but the request declares {names}", field
        )
    return found
