"""Chat messages as OpenAI's clients send them, made into a prompt."""

from __future__ import annotations

from typing import Any

from fourfold.errors import InvalidRequestError
from fourfold.server.errors import UnsupportedError
from fourfold.server.front import Front, Prompt
from fourfold.server.wire import ChatBody, TokenizeBody
from fourfold.text.chat import ChatTemplate

MAX_MESSAGES = 4096

_ROLES = ("system", "developer", "user", "assistant")
_TOOL_ROLES = ("tool", "function")


async def render(
    front: Front, options: ChatBody | TokenizeBody, *, add_special_tokens: bool
) -> tuple[Prompt, str]:
    """The conversation as a prompt, and the role of the message that is to come (or to be continued).

    Raises InvalidRequestError, also with the template's own words if it refuses the conversation;
    UnsupportedError for what belongs to tools.
    """
    messages = plain_messages(options.messages or [])
    continues = bool(options.continue_final_message)
    # Who asks to continue need not also say that no new turn is to begin; asking for both is an error.
    begins = not continues if options.add_generation_prompt is None else options.add_generation_prompt
    template = _template(front, options.chat_template)
    size = sum(len(str(message["content"])) for message in messages)

    def tokens() -> list[int]:
        text = template.render(
            messages,
            add_generation_prompt=begins,
            continue_final_message=continues,
            variables=options.chat_template_kwargs,
        )
        return front.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    ids = await front.in_thread_if_long(size, tokens)
    role: str = messages[-1]["role"] if continues else "assistant"
    return Prompt(ids, continues_text=continues), role


def _template(front: Front, source: str | None) -> ChatTemplate:
    if source is None:
        return front.chat_template()
    if not front.settings.allow_request_chat_template:
        raise InvalidRequestError(
            "this server does not take chat templates from requests; leave chat_template out", "chat_template"
        )
    return ChatTemplate.of(front.tokenizer, source)


def plain_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with a role, a content and perhaps a name. Raises InvalidRequestError or UnsupportedError."""
    if not messages:
        raise InvalidRequestError("messages is empty; it must have at least one message", "messages")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequestError(
            f"messages has {len(messages)} entries; at most {MAX_MESSAGES} are taken", "messages"
        )
    return [_plain(message, f"messages[{number}]") for number, message in enumerate(messages)]


def _plain(message: dict[str, Any], place: str) -> dict[str, Any]:
    role = message.get("role")
    if role in _TOOL_ROLES:
        raise UnsupportedError(f"{place}.role", f"{place}.role is {role!r}, but tools are not supported yet")
    if role not in _ROLES:
        raise InvalidRequestError(
            f"{place}.role must be one of {', '.join(_ROLES)}, got {role!r}", f"{place}.role"
        )
    for field in ("tool_calls", "function_call", "audio"):
        if message.get(field):
            raise UnsupportedError(f"{place}.{field}", f"{place}.{field} is not supported yet; leave it out")
    content = message.get("content")
    if content is None and role != "assistant":
        raise InvalidRequestError(f"{place}.content is required", f"{place}.content")
    # "developer" is OpenAI's newer name for the same thing; no open model's template knows it.
    plain = {"role": "system" if role == "developer" else role, "content": content or ""}
    name = message.get("name")
    if name is not None:
        if not isinstance(name, str):
            raise InvalidRequestError(f"{place}.name must be a string", f"{place}.name")
        plain["name"] = name
    return plain
