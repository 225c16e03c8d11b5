"""Request bodies as typed structs, and how bytes become one."""

from __future__ import annotations

import logging
from typing import Any, TypeVar

import msgspec

from fourfold.errors import InvalidRequestError

log = logging.getLogger("fourfold.server")


class StreamOptions(msgspec.Struct, kw_only=True):
    """include_usage: one last chunk with the usage.  continuous_usage_stats: usage in every chunk (vLLM)."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(msgspec.Struct, kw_only=True):
    """What completions and chat have in common. A null means the same as leaving the field out."""

    model: str | None = None
    max_tokens: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None
    # As vLLM and llama.cpp name them.
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    repeat_penalty: float | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: int | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None
    timeout: float | None = None
    ttft_timeout: float | None = None
    return_tokens_as_token_ids: bool | None = None
    return_trace: bool | None = None
    # What the answer must be: see constraints.py.
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: dict[str, Any] | bool | str | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None
    structural_tag: dict[str, Any] | str | None = None
    # What the answer will probably be (OpenAI's predicted outputs).
    prediction: dict[str, Any] | None = None


class CompletionBody(GenerationBody, kw_only=True):
    """POST /v1/completions. prompt: text, texts, token ids, or lists of token ids."""

    prompt: str | list[Any] | None = None
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None


class ChatBody(GenerationBody, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    # See tools.py.
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = None
    function_call: str | dict[str, Any] | None = None
    # See answers.py: OpenAI's, Anthropic's, vLLM's, SGLang's and llama.cpp's names.
    reasoning_effort: str | None = None
    thinking: dict[str, Any] | None = None
    thinking_budget: int | None = None
    thinking_token_budget: int | None = None
    reasoning_budget: int | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    reasoning_format: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    """POST /v1/tokenize: `prompt`, or `messages` and perhaps `tools` (vLLM), or `content` (llama.cpp)."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None
    with_pieces: bool | None = None
    return_token_strs: bool | None = None
    tools: list[Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class PinBody(msgspec.Struct, kw_only=True):
    """POST /v1/cache/pin: `prompt` (a text or token ids) or `messages` and perhaps `tools`, as in the
    requests that it is for.

    name: for unpin, and to replace a pin; made from the tokens if there is none.
    """

    model: str | None = None
    name: str | None = None
    prompt: str | list[Any] | None = None
    messages: list[dict[str, Any]] | None = None
    cache_salt: str | None = None
    add_special_tokens: bool | None = None
    tools: list[Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class UnpinBody(msgspec.Struct, kw_only=True):
    """POST /v1/cache/unpin."""

    model: str | None = None
    name: str


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """POST /v1/detokenize. Special tokens are kept in the text unless skip_special_tokens is true."""

    model: str | None = None
    tokens: list[int]
    skip_special_tokens: bool | None = None


Body = TypeVar("Body", bound=msgspec.Struct)

MAX_LIMITED_BYTES = 2 << 20
"""Of a field of _LIMITED as it was sent, white space and escapes included."""
_LIMITED = frozenset(
    {
        "ebnf", "functions", "grammar", "guided_choice", "guided_grammar", "guided_json", "guided_regex",
        "json_schema", "regex", "response_format", "structural_tag", "structured_outputs", "tools",
    }
)  # fmt: skip


class BodyReader:
    """Decodes bodies and remembers which unknown fields it has already warned of."""

    _MOST_WARNINGS = 256

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def read(self, data: bytes, kind: type[Body]) -> tuple[Body, dict[str, Any]]:
        """The typed body, and the fields that `kind` does not have. Raises InvalidRequestError."""
        check_sizes(data)
        raw = decode_object(data)
        known = kind.__struct_fields__
        fields = {name: value for name, value in raw.items() if name in known}
        for name, value in fields.items():
            # Clients in languages with one number type send 16.0 for 16.
            if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
                fields[name] = int(value)
        try:
            body = msgspec.convert(fields, kind)
        except msgspec.ValidationError as error:
            message, field = _explain(error)
            raise InvalidRequestError(message, field) from error
        return body, {name: value for name, value in raw.items() if name not in known}

    def warn_unknown(self, fields: dict[str, Any], endpoint: str) -> None:
        """Once per name: what a body holds and nobody here knows has no effect, and the log says so."""
        new = sorted(name[:64] for name in fields if name[:64] not in self._warned)
        if new and len(self._warned) < self._MOST_WARNINGS:
            self._warned.update(new)
            log.warning("%s: unknown fields were ignored: %s", endpoint, ", ".join(map(repr, new)))


def check_sizes(data: bytes) -> None:
    """Raises InvalidRequestError for a body with a constraint or tools larger than any that is taken, before
    millions of values are made of it. What is no JSON object is left to `decode_object`."""
    if len(data) <= MAX_LIMITED_BYTES:
        return
    try:
        raw = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return
    for name in _LIMITED & raw.keys():
        size = memoryview(raw[name]).nbytes
        if size > MAX_LIMITED_BYTES:
            raise InvalidRequestError(f"{name} has {size} bytes, the limit is {MAX_LIMITED_BYTES}", name)


def decode_object(data: bytes) -> dict[str, Any]:
    """A JSON object. Raises InvalidRequestError for anything else, with what is wrong and where."""
    if not data:
        raise InvalidRequestError("the request body is empty; it must be a JSON object")
    try:
        raw = msgspec.json.decode(data)
    except RecursionError as error:
        raise InvalidRequestError("the request body is nested too deeply") from error
    except (msgspec.MsgspecError, ValueError) as error:
        raise InvalidRequestError(f"the request body is not valid JSON in UTF-8: {error}") from error
    if not isinstance(raw, dict):
        raise InvalidRequestError(f"the request body must be a JSON object, got {_kind_of(raw)}")
    return raw


def _kind_of(value: object) -> str:
    names = {list: "an array", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _explain(error: msgspec.ValidationError) -> tuple[str, str | None]:
    """Turns msgspec's "... - at `$.stop[0]`" into a message that begins with the field, and the field."""
    text, _, path = str(error).partition(" - at `")
    field = path.rstrip("`").removeprefix("$").removeprefix(".")
    if "missing required field" in text:
        field = text.split("`")[1]
        return f"{field} is required", field
    text = text[:1].lower() + text[1:]
    return (f"{field}: {text}", field.partition("[")[0].partition(".")[0]) if field else (text, None)
