"""Chat messages as OpenAI's clients send them, made into a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fourfold.answers import generic
from fourfold.errors import InvalidRequestError
from fourfold.server.errors import UnsupportedError
from fourfold.server.front import Front, Prompt
from fourfold.server.wire import ChatBody, PinBody, TokenizeBody
from fourfold.text.chat import ChatTemplate

MAX_MESSAGES = 4096

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation made into a prompt, and the prompt's text.  role: of the message that is to come, or to
    be continued."""

    prompt: Prompt
    text: str
    role: str


async def render(
    front: Front,
    options: ChatBody | PinBody | TokenizeBody,
    template: ChatTemplate,
    *,
    add_special_tokens: bool,
    tools: Sequence[dict[str, Any]] = (),
    variables: Mapping[str, Any] | None = None,
) -> Rendered:
    """tools: in OpenAI's form; a template that has no place for them gets them in the system message.
    variables: for the template.

    Raises InvalidRequestError, also with the template's own words if it refuses the conversation.
    """
    messages = plain_messages(options.messages or [])
    with_tools = bool(tools) or any(
        message["role"] == "tool" or "tool_calls" in message for message in messages
    )
    if with_tools and not template.takes_tools:
        messages, tools = generic.with_tools(messages, tools), ()
    continues = bool(options.continue_final_message)
    # Who asks to continue need not also say that no new turn is to begin; asking for both is an error.
    begins = not continues if options.add_generation_prompt is None else options.add_generation_prompt
    size = sum(len(str(message["content"])) for message in messages)

    def tokens() -> tuple[str, list[int]]:
        text = template.render(
            messages,
            tools=tools or None,
            add_generation_prompt=begins,
            continue_final_message=continues,
            variables=variables,
        )
        return text, front.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    text, ids = await front.in_thread_if_long(size, tokens)
    role: str = messages[-1]["role"] if continues else "assistant"
    return Rendered(Prompt(ids, continues_text=continues), text, role)


def template_of(front: Front, source: str | None) -> ChatTemplate:
    """The template that a request is rendered with. Raises InvalidRequestError."""
    if source is None:
        return front.chat_template()
    if not front.settings.allow_request_chat_template:
        raise InvalidRequestError(
            "this server does not take chat templates from requests; leave chat_template out", "chat_template"
        )
    return ChatTemplate.of(front.tokenizer, source)


def plain_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with a role and a content, and perhaps a name, tool calls, and reasoning; functions become
    tools. Raises InvalidRequestError or UnsupportedError."""
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


def _plain(message: dict[str, Any], place: str) -> dict[str, Any]:
    role = message.get("role")
    if role not in _ROLES:
        raise InvalidRequestError(
            f"{place}.role must be one of {', '.join(_ROLES)}, got {role!r}", f"{place}.role"
        )
    if message.get("audio"):
        raise UnsupportedError(f"{place}.audio", f"{place}.audio is not supported yet; leave it out")
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


def _calls(message: dict[str, Any], place: str) -> list[dict[str, Any]]:
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
