"""The tools of a chat request: checked, and in one form whatever the client called them."""

from __future__ import annotations

import secrets
import string
import uuid
from dataclasses import dataclass, replace
from typing import Any

from fourfold.errors import InvalidRequestError
from fourfold.server.wire import ChatBody
from fourfold.text.tools import Tool, declared_tools

INLINE_TOOLS = 10_000
"""Bytes of tools that are checked in about a millisecond; more are in a thread, beside the streams."""
_ID_CHARACTERS = string.ascii_letters + string.digits


def openai_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def mistral_call_id() -> str:
    """Mistral's templates take nine letters and digits only."""
    return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(9))


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
    tools = declared_tools(body.functions if legacy else body.tools, field, legacy=legacy)
    # There is room for one function_call in a message.
    parallel = body.parallel_tool_calls is not False and not legacy
    every = Tooling(tuple(tools.values()), parallel=parallel, legacy=legacy)
    if body.function_call is not None:
        return _chosen(every, body.function_call, "function_call")
    return _chosen(every, body.tool_choice, "tool_choice")


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
