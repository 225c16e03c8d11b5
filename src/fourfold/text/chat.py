"""Chat messages to one prompt, through the model's own template, with the meaning Hugging Face gives it.

Semantics: https://huggingface.co/docs/transformers/chat_templating
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from fourfold.errors import InvalidRequestError
from fourfold.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from fourfold.text.sandbox import Sandbox

_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_MARK = "\ue0f1continue\ue0f2"
"""Ends the message to be continued while rendering; no template writes private-use characters."""
_PROBE = "\ue0f3probe\ue0f4"

Message = Mapping[str, Any]


class ChatTemplate:
    """A model's chat template.

    source: Jinja.  special_tokens: bos_token, eos_token, ... as the template may print them.
    tool_source: used instead of `source` when a request brings tools.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str] | None = None, tool_source: str | None = None
    ) -> None:
        self.source = source
        self._special = dict(special_tokens or {})
        self._tool_source = tool_source

    @classmethod
    def of(cls, tokenizer: Tokenizer, override: str | None = None) -> ChatTemplate:
        """The template of a model, or `override`, the text of a Jinja template.

        Raises InvalidRequestError when the model has none, saying how to give one.
        """
        special = tokenizer.spec.special_tokens
        if override is not None:
            return cls(override, special)
        templates = tokenizer.spec.chat_templates
        source = templates.get("default")
        if source is None:
            raise InvalidRequestError(
                "this model has no chat template, so chat messages cannot be turned into a prompt; "
                "give one with --chat-template FILE, or use /v1/completions with a plain prompt"
            )
        return cls(source, special, templates.get("tool_use"))

    @cached_property
    def _plain(self) -> Sandbox:
        return _compile(self.source)

    @cached_property
    def _with_tools(self) -> Sandbox:
        return self._plain if self._tool_source is None else _compile(self._tool_source)

    @cached_property
    def takes_parts(self) -> bool:
        """Whether the template reads content given as a list of parts, found out by trying."""
        text = self._try([{"role": "user", "content": [{"type": "text", "text": _PROBE}]}])
        return text is not None and _PROBE in text and "'type'" not in text and '"type"' not in text

    @cached_property
    def takes_tools(self) -> bool:
        """Whether the template shows tools to the model, found out by trying."""
        function = {"name": _PROBE, "description": "", "parameters": {"type": "object", "properties": {}}}
        text = self._try(
            [{"role": "user", "content": "x"}], tools=[{"type": "function", "function": function}]
        )
        return text is not None and _PROBE in text

    @cached_property
    def takes_argument_objects(self) -> bool:
        """Whether arguments of earlier calls must be given as objects; otherwise as JSON text."""
        call = {"id": "x00000000", "type": "function", "function": {"name": "x", "arguments": {_PROBE: 1}}}
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "x", "tool_call_id": "x00000000", "name": "x"},
        ]
        text = self._try(messages)
        if text is None:
            messages[1] = {**messages[1], "tool_calls": [_as_text(call)]}
            return self._try(messages) is None
        # Printed as Python would: the template pastes what it takes for text.
        return f"'{_PROBE}'" not in text

    def _try(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str | None:
        """None if the template refuses that."""
        variables = {"messages": messages, "tools": tools, "add_generation_prompt": True}
        try:
            return self._run(self._with_tools if tools else self._plain, {**self._special, **variables})
        except InvalidRequestError:
            return None

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt. Tokenizer.encode does not double a BOS that it begins with.

        messages: OpenAI messages. Content may be text, a list of {"type": "text", "text": ...} (handed to
            templates that read lists, otherwise joined by newlines), or None beside tool calls. Arguments of
            tool calls are handed over as the template needs them, as objects or as JSON text.
        continue_final_message: the prompt ends in the last message's text, without an end-of-turn mark.
        variables: more names for the template (chat_template_kwargs).
        Raises InvalidRequestError: the template's own refusal, an error or too much work in it, a malformed
            message, both add_generation_prompt and continue_final_message.
        """
        if add_generation_prompt and continue_final_message:
            raise InvalidRequestError(
                "add_generation_prompt and continue_final_message exclude each other: an answer is either "
                "begun or continued; set add_generation_prompt to false to continue",
                "continue_final_message",
            )
        if not messages:
            raise InvalidRequestError("messages must have at least one message", "messages")
        clash = _RESERVED & set(variables or ())
        if clash:
            raise InvalidRequestError(
                f"chat_template_kwargs must not contain {sorted(clash)[0]!r}; the request itself sets it",
                "chat_template_kwargs",
            )
        prepared = [self._prepare(message, index) for index, message in enumerate(messages)]
        if continue_final_message:
            _mark_final(prepared)
        text = self._run(
            self._with_tools if tools else self._plain,
            {
                **self._special,
                **(variables or {}),
                "messages": prepared,
                "tools": list(tools) if tools else None,
                "documents": list(documents) if documents else None,
                "add_generation_prompt": add_generation_prompt,
            },
        )
        return _cut_at_mark(text) if continue_final_message else text

    def _run(self, sandbox: Sandbox, variables: dict[str, Any]) -> str:
        import jinja2

        from fourfold.text.sandbox import TemplateBudgetError

        try:
            return sandbox.render(variables)
        except TemplateBudgetError as error:
            raise InvalidRequestError(f"the chat template {error}", "messages") from error
        except jinja2.UndefinedError as error:
            raise InvalidRequestError(
                f"the chat template needs something missing: {error}", "messages"
            ) from error
        except jinja2.TemplateError as error:
            raise InvalidRequestError(
                f"the chat template refuses these messages: {error}", "messages"
            ) from error
        except RecursionError as error:
            raise InvalidRequestError("the chat template calls itself without end", "messages") from error
        except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError, LookupError) as error:
            raise InvalidRequestError(
                f"the chat template failed on these messages: {type(error).__name__}: {error}", "messages"
            ) from error

    def _prepare(self, message: Message, index: int) -> dict[str, Any]:
        if not isinstance(message, Mapping):
            raise InvalidRequestError(
                f"messages[{index}] must be an object, got {type(message).__name__}", f"messages[{index}]"
            )
        if not isinstance(message.get("role"), str):
            raise InvalidRequestError(
                f"messages[{index}].role must be a string, got {message.get('role')!r}",
                f"messages[{index}].role",
            )
        prepared = dict(message)
        content = message.get("content")
        if content is None:
            prepared["content"] = ""
        elif isinstance(content, list):
            texts = [_part_text(part, index, at) for at, part in enumerate(content)]
            prepared["content"] = (
                [{"type": "text", "text": text} for text in texts] if self.takes_parts else "\n".join(texts)
            )
        elif not isinstance(content, str):
            raise InvalidRequestError(
                f"messages[{index}].content must be a string or a list of parts, "
                f"got {type(content).__name__}",
                f"messages[{index}].content",
            )
        if message.get("tool_calls"):
            calls = [_parsed_call(call, index) for call in message["tool_calls"]]
            prepared["tool_calls"] = calls if self.takes_argument_objects else [_as_text(c) for c in calls]
        return prepared


def _compile(source: str) -> Sandbox:
    # Imported late: a server that only completes text never needs Jinja.
    import jinja2

    from fourfold.text.sandbox import Sandbox

    try:
        return Sandbox(source)
    except jinja2.TemplateSyntaxError as error:
        raise InvalidRequestError(
            f"the model's chat template has a syntax error in line {error.lineno}: {error.message}; "
            "give another one with --chat-template FILE"
        ) from error


def _part_text(part: Any, index: int, at: int) -> str:
    where = f"messages[{index}].content[{at}]"
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping) or part.get("type") != "text":
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise InvalidRequestError(
            f"{where} is of type {kind!r}; this model reads only parts of type 'text'", where
        )
    if not isinstance(part.get("text"), str):
        raise InvalidRequestError(f"{where}.text must be a string, got {part.get('text')!r}", f"{where}.text")
    text: str = part["text"]
    return text


def _parsed_call(call: Any, index: int) -> Any:
    """The call with its arguments as an object: OpenAI sends JSON text, templates print objects as JSON."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise InvalidRequestError(
            f"messages[{index}].tool_calls must be objects with a function", f"messages[{index}].tool_calls"
        )
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments) if arguments else {}
    except ValueError as error:
        raise InvalidRequestError(
            f"messages[{index}].tool_calls: arguments of {function.get('name')!r} are not JSON: {error}",
            f"messages[{index}].tool_calls",
        ) from error
    return {**call, "function": {**function, "arguments": parsed}}


def _as_text(call: dict[str, Any]) -> dict[str, Any]:
    """The call with its arguments as JSON text."""
    function = call["function"]
    text = json.dumps(function.get("arguments") or {}, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def _mark_final(messages: list[dict[str, Any]]) -> None:
    content = messages[-1]["content"]
    if isinstance(content, list) and content:
        content[-1] = {**content[-1], "text": content[-1]["text"] + _MARK}
    elif isinstance(content, str):
        messages[-1]["content"] = content + _MARK
    else:
        raise InvalidRequestError(
            "continue_final_message needs a last message with text", f"messages[{len(messages) - 1}].content"
        )


def _cut_at_mark(text: str) -> str:
    at = text.rfind(_MARK)
    if at < 0:
        raise InvalidRequestError(
            "continue_final_message is set, but the chat template does not print the last message's text",
            "continue_final_message",
        )
    return text[:at]
