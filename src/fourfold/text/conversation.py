"""Chat messages and tools as OpenAI's clients send them, made into what chat templates take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fourfold.answers import generic
from fourfold.errors import InvalidRequestError
from fourfold.text.chat import ChatTemplate

MAX_MESSAGES = 4096

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def for_template(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[dict[str, Any]], template: ChatTemplate
) -> tuple[list[dict[str, Any]], Sequence[dict[str, Any]]]:
    """(messages, tools) as `template` takes them. tools: in OpenAI's form; a template that has no place for
    them gets them in the system message. Raises InvalidRequestError."""
    plain = plain_messages(messages)
    with_tools = bool(tools) or any(message["role"] == "tool" or "tool_calls" in message for message in plain)
    if with_tools and not template.takes_tools:
        return generic.with_tools(plain, tools), ()
    return plain, tools


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages with a role and a content, and perhaps a name, tool calls, and reasoning; functions become
    tools. Raises InvalidRequestError."""
    if not messages:
        raise InvalidRequestError("messages is empty; it must have at least one message", "messages")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequestError(
            f"messages has {len(messages)} entries; at most {MAX_MESSAGES} are taken", "messages"
        )
    plain = [_plain(message, f"messages[{number}]") for number, message in enumerate(messages)]
    names: dict[str, str] = {}
    for message in plain:
        for call in message.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
        if message["role"] == "tool" and "name" not in message:
            # Several templates name the function beside its result, which OpenAI's messages do not.
            name = names.get(message.get("tool_call_id", ""))
            if name is not None:
                message["name"] = name
    return plain


def _plain(message: Mapping[str, Any], place: str) -> dict[str, Any]:
    role = message.get("role")
    if role not in _ROLES:
        raise InvalidRequestError(
            f"{place}.role must be one of {', '.join(_ROLES)}, got {role!r}", f"{place}.role"
        )
    content = message.get("content")
    if content is None and role != "assistant":
        raise InvalidRequestError(f"{place}.content is required", f"{place}.content")
    # "developer" is OpenAI's newer name for the same thing; no open model's template knows it.
    known_role = {"developer": "system", "function": "tool"}.get(role, role)
    plain = {"role": known_role, "content": content or ""}
    if role == "assistant":
        calls = _calls(message, place)
        if calls:
            plain["tool_calls"] = calls
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        if reasoning is not None:
            if not isinstance(reasoning, str):
                raise InvalidRequestError(f"{place}.reasoning_content must be a string", place)
            plain["reasoning_content"] = plain["thinking"] = reasoning
    call_id = message.get("tool_call_id")
    if role == "tool" and call_id is not None:
        if not isinstance(call_id, str):
            raise InvalidRequestError(f"{place}.tool_call_id must be a string", f"{place}.tool_call_id")
        plain["tool_call_id"] = call_id
    name = message.get("name")
    if name is not None:
        if not isinstance(name, str):
            raise InvalidRequestError(f"{place}.name must be a string", f"{place}.name")
        plain["name"] = name
    return plain


def _calls(message: Mapping[str, Any], place: str) -> list[dict[str, Any]]:
    """Tool calls in OpenAI's form, and the function call that they replaced. Raises InvalidRequestError."""
    calls = message.get("tool_calls") or []
    old = message.get("function_call")
    if old and not calls:
        calls = [{"id": "call_0", "type": "function", "function": old}]
    if not isinstance(calls, list):
        raise InvalidRequestError(f"{place}.tool_calls must be a list", f"{place}.tool_calls")
    result = []
    for number, call in enumerate(calls):
        where = f"{place}.tool_calls[{number}]"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidRequestError(f"{where} must be an object with a function that has a name", where)
        arguments = function.get("arguments")
        if arguments is not None and not isinstance(arguments, str | dict):
            raise InvalidRequestError(f"{where}.function.arguments must be JSON text", where)
        call_id = call.get("id") or f"call_{number}"
        if not isinstance(call_id, str):
            raise InvalidRequestError(f"{where}.id must be a string", where)
        given = {"name": function["name"], "arguments": arguments or "{}"}
        result.append({"id": call_id, "type": "function", "function": given})
    return result
