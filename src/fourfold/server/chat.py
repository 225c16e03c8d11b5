"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from fourfold.answers.parts import Answer, Part
from fourfold.errors import InvalidRequestError
from fourfold.server.answers import (
    answer_constraint,
    expected_answer,
    reasoning_variables,
    thinking_budget,
)
from fourfold.server.chunks import Choice, collect, events
from fourfold.server.constraints import guarantee_body, guarantee_headers
from fourfold.server.errors import JSON
from fourfold.server.front import Ask, Front
from fourfold.server.generate import Generation
from fourfold.server.logprobs import TokenNames, chat_content, prompt_infos, prompt_logprobs
from fourfold.server.messages import render, template_of
from fourfold.server.sampling import sampling_params, usage_wanted
from fourfold.server.stream import EventStream, Watched
from fourfold.server.tools import INLINE_TOOLS, mistral_call_id, openai_call_id, read_tools
from fourfold.server.unsupported import refuse_unsupported
from fourfold.server.wire import ChatBody
from fourfold.text.tools import tools_size
from fourfold.types import MAX_LOGPROBS

encode = msgspec.json.encode


class Asked(msgspec.Struct, frozen=True):
    """A checked request. role: of the message that the answer is, or continues.

    reasoning: whether it is shown.  legacy: calls are functions, of which there is one.
    call_id: makes the ids of calls.
    """

    id: str
    created: int
    model: str
    n: int
    prompt: list[int]
    role: str
    names: TokenNames
    logprobs: bool
    prompt_logprobs: bool
    reasoning: bool = True
    legacy: bool = False
    call_id: Callable[[], str] = openai_call_id

    def head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def choice_logprobs(self, choice: Choice) -> dict[str, Any] | None:
        return (
            {"content": chat_content(self.names, choice.logprobs), "refusal": None} if self.logprobs else None
        )

    def finish_reason(self, choice: Choice) -> str | None:
        return (
            "function_call" if self.legacy and choice.finish_reason == "tool_calls" else choice.finish_reason
        )

    def chunk_content(self, _: int, choice: Choice) -> bytes | None:
        choice.finish_reason = self.finish_reason(choice)
        if choice.parts:
            found = self._delta(choice.parts)
            if not (found or choice.finish_reason):
                return None
            delta = b'"delta":' + encode(found)
        elif choice.text and choice.content:
            delta = b'"delta":{"content":' + encode(choice.text) + b"}"
        elif choice.finish_reason:
            delta = b'"delta":{}'
        else:
            return None
        return delta + b',"logprobs":' + encode(self.choice_logprobs(choice))

    def _delta(self, parts: list[Part]) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        calls: dict[int, dict[str, Any]] = {}
        for part in parts:
            if part.kind == "content":
                delta["content"] = delta.get("content", "") + part.text
            elif part.kind == "reasoning":
                if self.reasoning:
                    text = delta.get("reasoning_content", "") + part.text
                    # The field's name in vLLM, and its newer one.
                    delta["reasoning_content"] = delta["reasoning"] = text
            elif part.kind == "call":
                head: dict[str, Any] = {"index": part.index, "id": self.call_id(), "type": "function"}
                calls[part.index] = head | {"function": {"name": part.text, "arguments": ""}}
            elif part.kind == "arguments":
                call = calls.setdefault(part.index, {"index": part.index, "function": {"arguments": ""}})
                call["function"]["arguments"] += part.text
        if calls and self.legacy:
            delta["function_call"] = next(iter(calls.values()))["function"]
        elif calls:
            delta["tool_calls"] = list(calls.values())
        return delta

    def message(self, choice: Choice) -> dict[str, Any]:
        """The whole answer of one choice."""
        if choice.content:
            return {"role": self.role, "content": choice.text, "refusal": None}
        answer = Answer()
        for part in choice.parts:
            answer.add(part)
        calls = [{"name": call.name, "arguments": call.arguments} for call in answer.calls]
        message: dict[str, Any] = {
            "role": self.role,
            "content": answer.content if answer.content or not calls else None,
            "refusal": None,
        }
        if answer.reasoning and self.reasoning:
            message["reasoning_content"] = message["reasoning"] = answer.reasoning
        if calls and self.legacy:
            message["function_call"] = calls[0]
        elif calls:
            message["tool_calls"] = [
                {"id": self.call_id(), "type": "function", "function": call} for call in calls
            ]
        return message


async def chat_completions(front: Front, request: Request) -> Response:
    body, extra = await front.body(request, ChatBody)
    front.reader.warn_unknown(refuse_unsupported(extra, chat=True), "/v1/chat/completions")
    model = front.check_model(body.model)
    wanted = usage_wanted(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs to be true", "top_logprobs")
    if not 0 <= (body.top_logprobs or 0) <= MAX_LOGPROBS:
        raise InvalidRequestError(
            f"top_logprobs must be between 0 and {MAX_LOGPROBS}, got {body.top_logprobs}", "top_logprobs"
        )
    sampling = sampling_params(
        body,
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    size = tools_size(body.functions or body.tools, "functions" if body.functions else "tools")
    tooling = read_tools(body) if size <= INLINE_TOOLS else await asyncio.to_thread(read_tools, body)
    template = template_of(front, body.chat_template)
    format = front.formats.of(template.source)
    budget = thinking_budget(body, template.source, exact=front.formats.ends_reasoning(format))
    rendered = await render(
        front,
        body,
        template,
        add_special_tokens=bool(body.add_special_tokens),
        tools=[tool.shown for tool in tooling.tools],
        variables=reasoning_variables(body, template.source, format),
    )
    expected = expected_answer(front.formats, format, body, tooling, rendered.text)
    ask = await Ask.of(front, request, body, "messages")
    promised, constraint = await answer_constraint(
        front.formats, front.checker, body, tooling, expected, ask.constraint, budget
    )
    ask = replace(ask, constraint=constraint, expected=None if expected.plain else expected)
    generation = front.generation(front.jobs([rendered.prompt], sampling, ask, sampling.n), body.return_trace)
    short_ids = expected.format.tools is not None and expected.format.tools.ids == "mistral"
    asked = Asked(
        id=f"chatcmpl-{generation.id}",
        created=int(time.time()),
        model=model,
        n=sampling.n,
        prompt=rendered.prompt.ids,
        role=rendered.role,
        names=TokenNames(front.tokenizer, bool(body.return_tokens_as_token_ids)),
        logprobs=bool(body.logprobs),
        prompt_logprobs=body.prompt_logprobs is not None,
        reasoning=body.include_reasoning is not False,
        legacy=tooling.legacy,
        call_id=mistral_call_id if short_ids else openai_call_id,
    )
    # Strict tools of a model whose calls no grammar can begin: they are hoped for.
    headers = guarantee_headers(promised, hoped=tooling.strict)
    guarantee = guarantee_body(promised, hoped=tooling.strict)
    if body.stream:
        head = encode(asked.head("chat.completion.chunk"))[:-1]
        chunks = events(generation, asked.n, head, wanted, asked.chunk_content)
        return EventStream(
            chunks, _opening(asked, head), front.settings.first_event_grace, front.open_work, headers
        )

    async def answer() -> Response:
        return await _answer(asked, generation, guarantee, headers)

    return Watched(answer, front.open_work)


def _opening(asked: Asked, head: bytes) -> bytes:
    """The chunks that give each choice its role, once."""
    start = b"data: " + head
    delta = encode({"role": asked.role, "content": ""})
    end = b',"logprobs":null,"finish_reason":null}]}\n\n'
    return b"".join(
        start + b',"choices":[{"index":%d,"delta":' % index + delta + end for index in range(asked.n)
    )


async def _answer(
    asked: Asked, generation: Generation, guarantee: Mapping[str, Any], headers: Mapping[str, str]
) -> Response:
    choices = await collect(generation, asked.n)
    body = asked.head("chat.completion") | {
        "choices": [
            {
                "index": index,
                "message": asked.message(choice),
                "logprobs": asked.choice_logprobs(choice),
                "finish_reason": asked.finish_reason(choice),
                "stop_reason": choice.stop_reason,
            }
            for index, choice in enumerate(choices)
        ],
        "usage": generation.usage.as_dict(),
        **guarantee,
        **await generation.trace_field(),
    }
    if asked.prompt_logprobs:
        given = choices[0].prompt_logprobs
        if given is None:
            raise RuntimeError("the engine sent no prompt logprobs though they were asked for")
        infos = prompt_infos(asked.names.tokenizer, asked.prompt, given, ())
        body["prompt_logprobs"] = prompt_logprobs(asked.names, infos)
    return Response(encode(body), media_type=JSON, headers=headers)
