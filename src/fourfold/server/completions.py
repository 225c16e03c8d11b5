"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from fourfold.errors import InvalidRequestError
from fourfold.server.chunks import Choice, collect, events
from fourfold.server.constraints import guarantee_body, guarantee_headers
from fourfold.server.errors import JSON
from fourfold.server.front import Ask, Front, Prompt
from fourfold.server.generate import Generation
from fourfold.server.logprobs import TokenNames, completion_logprobs, prompt_infos, prompt_logprobs
from fourfold.server.sampling import sampling_params, usage_wanted
from fourfold.server.stream import EventStream, Watched
from fourfold.server.unsupported import refuse_unsupported
from fourfold.server.wire import CompletionBody
from fourfold.text.output import TokenInfo
from fourfold.types import Constraint

encode = msgspec.json.encode

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for this endpoint."""


class Source(msgspec.Struct, frozen=True):
    """One prompt.

    text: what echo gives back.
    hidden: tokens of `ids` that stand for nothing in it (a BOS that was put before a text).
    """

    ids: list[int]
    text: str
    hidden: Collection[int] = ()


class Asked(msgspec.Struct, frozen=True):
    """A checked request."""

    head: dict[str, Any]
    prompts: list[Source]
    echo: bool
    n: int
    best_of: int
    names: TokenNames
    logprobs: bool
    prompt_logprobs: bool

    def prompt_infos(self, index: int, choice: Choice) -> list[TokenInfo | None]:
        """Raises RuntimeError if the engine did not do what it was asked."""
        prompt = self.prompts[index // self.n]
        if choice.prompt_logprobs is None:
            raise RuntimeError("the engine sent no prompt logprobs though they were asked for")
        return prompt_infos(self.names.tokenizer, prompt.ids, choice.prompt_logprobs, prompt.hidden)

    def text_and_logprobs(
        self, index: int, choice: Choice, *, echo: bool
    ) -> tuple[str, dict[str, Any] | None]:
        """What `choice` says, after the prompt if `echo`."""
        prompt = self.prompts[index // self.n]
        text = prompt.text + choice.text if echo else choice.text
        if not self.logprobs:
            return text, None
        before = self.prompt_infos(index, choice) if echo else []
        return text, completion_logprobs(self.names, [*before, *choice.logprobs], prompt.ids[0])


async def completions(front: Front, request: Request) -> Response:
    body, extra = await front.body(request, CompletionBody)
    front.reader.warn_unknown(refuse_unsupported(extra, chat=False), "/v1/completions")
    model = front.check_model(body.model)
    wanted = usage_wanted(body)
    n = 1 if body.n is None else body.n
    best_of = n if body.best_of is None else body.best_of
    if best_of < n:
        raise InvalidRequestError(f"best_of ({best_of}) must be at least n ({n})", "best_of")
    if best_of > n and body.stream:
        raise InvalidRequestError("best_of larger than n cannot be streamed", "best_of")
    logprobs = 0 if body.logprobs is None and best_of > n else body.logprobs
    sampling = sampling_params(body, max_tokens=body.max_tokens, logprobs=logprobs)
    if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
        sampling = msgspec.structs.replace(sampling, prompt_logprobs=body.logprobs)
    prompts = await _prompts(front, body)
    to_continue = [
        Prompt(prompt.ids, continues_text=True, echoed=len(prompt.text) if body.echo else 0)
        for prompt in prompts
    ]
    ask = await Ask.of(front, request, body, "prompt", DEFAULT_MAX_TOKENS)
    jobs = front.jobs(to_continue, sampling, ask, best_of)
    generation = front.generation(jobs, body.return_trace)
    asked = Asked(
        head={
            "id": f"cmpl-{generation.id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        },
        prompts=prompts,
        echo=bool(body.echo),
        n=n,
        best_of=best_of,
        names=TokenNames(front.tokenizer, bool(body.return_tokens_as_token_ids)),
        logprobs=body.logprobs is not None,
        prompt_logprobs=body.prompt_logprobs is not None,
    )
    headers = guarantee_headers(ask.constraint)
    if body.stream:
        head = encode(asked.head)[:-1]
        chunks = events(generation, len(jobs), head, wanted, _chunk_content(asked, len(jobs)))
        return EventStream(chunks, b"", front.settings.first_event_grace, front.open_work, headers)

    async def answer() -> Response:
        return await _answer(asked, generation, len(jobs), ask.constraint, headers)

    return Watched(answer, front.open_work)


async def _prompts(front: Front, body: CompletionBody) -> list[Source]:
    """Every prompt of the request. Raises InvalidRequestError."""
    prompt = body.prompt
    if prompt is None:
        raise InvalidRequestError("prompt is required", "prompt")
    if isinstance(prompt, str):
        items: list[Any] = [prompt]
    elif not prompt:
        raise InvalidRequestError(
            "prompt is an empty list; it must have at least one token or text", "prompt"
        )
    elif all(isinstance(item, str | list) for item in prompt):
        items = prompt
    else:
        items = [prompt]
    if len(items) > front.settings.max_sequences:
        raise InvalidRequestError(
            f"prompt holds {len(items)} prompts; one request may have at most {front.settings.max_sequences}",
            "prompt",
        )
    special = body.add_special_tokens is not False
    sources = []
    for item in items:
        if isinstance(item, str):
            ids = await front.encode(item, add_special_tokens=special)
            sources.append(Source(ids, item, front.tokenizer.spec.prefix_ids))
        else:
            ids = front.check_ids(item, "prompt")
            text = front.tokenizer.decode(ids, skip_special_tokens=False) if body.echo else ""
            sources.append(Source(ids, text))
    return sources


async def _answer(
    asked: Asked,
    generation: Generation,
    count: int,
    constraint: Constraint | None,
    headers: Mapping[str, str],
) -> Response:
    choices = _best(asked, await collect(generation, count))
    body = asked.head | {
        "choices": [_choice(asked, index, choice) for index, choice in enumerate(choices)],
        "usage": generation.usage.as_dict(),
        **guarantee_body(constraint),
        **await generation.trace_field(),
    }
    return Response(encode(body), media_type=JSON, headers=headers)


def _best(asked: Asked, choices: list[Choice]) -> list[Choice]:
    """The n of best_of with the highest mean logprob per token, for each prompt."""
    if asked.best_of == asked.n:
        return choices

    def mean(choice: Choice) -> float:
        return sum(one.logprob for one in choice.logprobs) / max(1, len(choice.logprobs))

    kept: list[Choice] = []
    for start in range(0, len(choices), asked.best_of):
        kept += sorted(choices[start : start + asked.best_of], key=mean, reverse=True)[: asked.n]
    return kept


def _choice(asked: Asked, index: int, choice: Choice) -> dict[str, Any]:
    text, logprobs = asked.text_and_logprobs(index, choice, echo=asked.echo)
    result = {
        "index": index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
    }
    if asked.prompt_logprobs:
        result["prompt_logprobs"] = prompt_logprobs(asked.names, asked.prompt_infos(index, choice))
    return result


def _chunk_content(asked: Asked, count: int) -> Callable[[int, Choice], bytes | None]:
    echo_due = [asked.echo] * count

    def content(index: int, choice: Choice) -> bytes | None:
        if not (choice.text or choice.finish_reason or echo_due[index]):
            return None
        text, logprobs = asked.text_and_logprobs(index, choice, echo=echo_due[index])
        echo_due[index] = False
        return b'"text":' + encode(text) + b',"logprobs":' + encode(logprobs)

    return content
