"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from fourfold.errors import InvalidRequestError
from fourfold.server.chunks import Choice, collect, events
from fourfold.server.constraints import guarantee_body, guarantee_headers
from fourfold.server.errors import JSON
from fourfold.server.front import Ask, Front
from fourfold.server.generate import Generation
from fourfold.server.logprobs import TokenNames, chat_content, prompt_infos, prompt_logprobs
from fourfold.server.messages import render
from fourfold.server.sampling import sampling_params, usage_wanted
from fourfold.server.stream import EventStream, Watched
from fourfold.server.unsupported import refuse_unsupported
from fourfold.server.wire import ChatBody
from fourfold.types import MAX_LOGPROBS, Constraint

encode = msgspec.json.encode


@dataclass(frozen=True, slots=True)
class Asked:
    """A checked request. role: of the message that the answer is, or continues."""

    id: str
    created: int
    model: str
    n: int
    prompt: list[int]
    role: str
    names: TokenNames
    logprobs: bool
    prompt_logprobs: bool

    def head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def choice_logprobs(self, choice: Choice) -> dict[str, Any] | None:
        return (
            {"content": chat_content(self.names, choice.logprobs), "refusal": None} if self.logprobs else None
        )

    def chunk_content(self, _: int, choice: Choice) -> bytes | None:
        if choice.text:
            delta = b'"delta":{"content":' + encode(choice.text) + b"}"
        elif choice.finish_reason:
            delta = b'"delta":{}'
        else:
            return None
        return delta + b',"logprobs":' + encode(self.choice_logprobs(choice))


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
    prompt, role = await render(front, body, add_special_tokens=bool(body.add_special_tokens))
    ask = await Ask.of(request, body, "messages")
    generation = front.generation(front.jobs([prompt], sampling, ask, sampling.n), body.return_trace)
    asked = Asked(
        id=f"chatcmpl-{generation.id}",
        created=int(time.time()),
        model=model,
        n=sampling.n,
        prompt=prompt.ids,
        role=role,
        names=TokenNames(front.tokenizer, bool(body.return_tokens_as_token_ids)),
        logprobs=bool(body.logprobs),
        prompt_logprobs=body.prompt_logprobs is not None,
    )
    headers = guarantee_headers(ask.constraint)
    if body.stream:
        head = encode(asked.head("chat.completion.chunk"))[:-1]
        chunks = events(generation, asked.n, head, wanted, asked.chunk_content)
        return EventStream(
            chunks, _opening(asked, head), front.settings.first_event_grace, front.open_work, headers
        )

    async def answer() -> Response:
        return await _answer(asked, generation, ask.constraint, headers)

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
    asked: Asked, generation: Generation, constraint: Constraint | None, headers: Mapping[str, str]
) -> Response:
    choices = await collect(generation, asked.n)
    body = asked.head("chat.completion") | {
        "choices": [
            {
                "index": index,
                "message": {"role": asked.role, "content": choice.text, "refusal": None},
                "logprobs": asked.choice_logprobs(choice),
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
            }
            for index, choice in enumerate(choices)
        ],
        "usage": generation.usage.as_dict(),
        **guarantee_body(constraint),
        **await generation.trace_field(),
    }
    if asked.prompt_logprobs:
        given = choices[0].prompt_logprobs
        if given is None:
            raise RuntimeError("the engine sent no prompt logprobs though they were asked for")
        infos = prompt_infos(asked.names.tokenizer, asked.prompt, given, ())
        body["prompt_logprobs"] = prompt_logprobs(asked.names, infos)
    return Response(encode(body), media_type=JSON, headers=headers)
