"""Chat messages as OpenAI's clients send them, made into a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fourfold.errors import InvalidRequestError
from fourfold.server.errors import UnsupportedError
from fourfold.server.front import Front, Prompt
from fourfold.server.wire import ChatBody, PinBody, TokenizeBody
from fourfold.text.chat import ChatTemplate
from fourfold.text.conversation import for_template
from fourfold.text.tools import tools_size


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

    Raises UnsupportedError, and InvalidRequestError, also with the template's own words if it refuses the
    conversation.
    """
    for number, message in enumerate(options.messages or []):
        if message.get("audio"):
            place = f"messages[{number}].audio"
            raise UnsupportedError(place, f"{place} is not supported yet; leave it out")
    messages, tools = for_template(options.messages or [], tools, template)
    continues = bool(options.continue_final_message)
    # Who asks to continue need not also say that no new turn is to begin; asking for both is an error.
    begins = not continues if options.add_generation_prompt is None else options.add_generation_prompt
    size = sum(len(str(message["content"])) for message in messages) + tools_size(tools, "tools")

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
