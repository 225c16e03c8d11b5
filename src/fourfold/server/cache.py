"""Pinned prefixes, and the events of the prefix cache. A caller sees and ends its own alone."""

from __future__ import annotations

import hashlib
import time
from array import array
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from fourfold.engine.operations import (
    MAX_PAGE,
    BlockMoved,
    BlockStored,
    CacheOperation,
    CacheOutcome,
    KVEvent,
    ListPins,
    PinPrefix,
    ReadEvents,
    UnpinPrefix,
)
from fourfold.errors import InvalidRequestError
from fourfold.server.chunks import collect
from fourfold.server.deadlines import allowed
from fourfold.server.debug import answer_of_engine
from fourfold.server.errors import JSON, HTTPError
from fourfold.server.front import Ask, Front, Prompt
from fourfold.server.gate import cache_salt
from fourfold.server.messages import render, template_of
from fourfold.server.stream import Watched
from fourfold.server.unsupported import refuse_unsupported
from fourfold.server.wire import GenerationBody, PinBody, UnpinBody
from fourfold.text.tools import declared_tools
from fourfold.types import PinInfo, SamplingParams

MAX_NAME = 256
"""Characters of a pin's name."""


async def pin(front: Front, request: Request) -> Response:
    """Computes what is not cached of the prompt, then pins its full blocks; answers when that is done."""
    body, extra = await front.body(request, PinBody)
    front.reader.warn_unknown(refuse_unsupported(extra, chat=body.messages is not None), "/v1/cache/pin")
    front.check_model(body.model)
    field, ids = await _prompt(front, body)
    name = _name(body.name) if body.name is not None else _name_of(ids)
    tenant: str = request.state.tenant
    ask = Ask(
        salt=cache_salt(tenant, body.cache_salt),
        tenant=tenant,
        user="",
        weight=request.state.weight,
        priority=0,
        arrival=time.monotonic(),
        allowed=allowed(request, GenerationBody(), front.settings),
        prompt_field=field,
        default_max_tokens=1,
        request_id=request.state.request_id,
    )
    jobs = front.jobs([Prompt(ids)], SamplingParams(temperature=0.0, max_tokens=1), ask, 1)

    async def work() -> Response:
        # An engine without a prefix cache says so before anything is computed.
        await _operate(front, ListPins(tenant))
        generation = front.generation(jobs)
        await collect(generation, 1)
        outcome = await _operate(front, PinPrefix(tenant, ask.salt, name, ids))
        usage = generation.usage
        return _json(
            {
                **_pin(outcome.pins[0]),
                "usage": {
                    "prompt_tokens": usage.prompt_tokens,
                    "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
                },
            }
        )

    return Watched(work, front.open_work)


async def unpin(front: Front, request: Request) -> Response:
    body, extra = await front.body(request, UnpinBody)
    front.reader.warn_unknown(extra, "/v1/cache/unpin")
    front.check_model(body.model)
    outcome = await _operate(front, UnpinPrefix(request.state.tenant, _name(body.name)))
    if not outcome.pins:
        raise HTTPError(
            404,
            f"no prefix is pinned as {body.name!r}; GET /v1/cache/pins lists those that are",
            "not_found_error",
            "name",
            "pin_not_found",
        )
    return _json({**_pin(outcome.pins[0]), "deleted": True})


async def pins(front: Front, request: Request) -> Response:
    outcome = await _operate(front, ListPins(request.state.tenant))
    return _json({"object": "list", "data": [_pin(info) for info in outcome.pins]})


async def events(front: Front, request: Request) -> Response:
    """?after=NUMBER&limit=COUNT. With API keys: the caller's own, narrowed like its requests by ?cache_salt.

    The answer's `next` is what to ask for `after` next. Another `epoch` is another engine process: begin
    at 0.
    """
    after = _number(request, "after", 0, 0, 2**62)
    limit = _number(request, "limit", MAX_PAGE, 1, MAX_PAGE)
    narrowed = request.query_params.get("cache_salt")
    everyone = narrowed is None and not front.settings.api_keys
    salt = None if everyone else cache_salt(request.state.tenant, narrowed)
    page = (await _operate(front, ReadEvents(after, limit, salt))).events
    assert page is not None
    return _json(
        {
            "object": "list",
            "epoch": page.epoch,
            "last": page.last,
            "lost": page.lost,
            "next": page.numbered[-1][0] if page.more else page.last,
            "has_more": page.more,
            "data": [_event(number, event) for number, event in page.numbered],
        }
    )


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type=JSON)


async def _operate(front: Front, operation: CacheOperation) -> CacheOutcome:
    """Raises InvalidRequestError for what the engine refuses, HTTPError 503 if it does not answer."""
    outcome = await answer_of_engine(front.client.operate(operation))
    if outcome.refused is not None:
        raise InvalidRequestError(outcome.refused, outcome.param)
    return outcome


async def _prompt(front: Front, body: PinBody) -> tuple[str, list[int]]:
    """The field that has it, and its tokens."""
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("give exactly one of prompt and messages", "prompt")
    if body.messages is not None:
        # What comes after these messages is not known, so it does not begin an answer unless asked to.
        if body.add_generation_prompt is None:
            body.add_generation_prompt = False
        special = bool(body.add_special_tokens)
        template = template_of(front, body.chat_template)
        rendered = await render(
            front,
            body,
            template,
            add_special_tokens=special,
            tools=[tool.shown for tool in declared_tools(body.tools, "tools").values()],
            variables=body.chat_template_kwargs,
        )
        return "messages", rendered.prompt.ids
    if isinstance(body.prompt, str):
        special = body.add_special_tokens is not False
        return "prompt", await front.encode(body.prompt, add_special_tokens=special)
    return "prompt", front.check_ids(body.prompt, "prompt")


def _name(name: str) -> str:
    if not 0 < len(name) <= MAX_NAME:
        raise InvalidRequestError(f"name must have 1 to {MAX_NAME} characters, got {len(name)}", "name")
    return name


def _name_of(ids: list[int]) -> str:
    return hashlib.blake2b(array("i", ids), digest_size=8, person=b"fourfold-pin").hexdigest()


def _pin(info: PinInfo) -> dict[str, Any]:
    return {"object": "cache.pin", "name": info.name, "tokens": info.tokens, "blocks": info.blocks}


def _number(request: Request, name: str, default: int, low: int, high: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    # Not int() of anything: it takes "1_0" and digits of other scripts, and refuses very long numbers oddly.
    if text.isascii() and text.isdigit() and len(text) < 20 and low <= int(text) <= high:
        return int(text)
    raise InvalidRequestError(f"{name} must be an integer from {low} to {high}, got {text[:40]!r}", name)


def _event(number: int, event: KVEvent) -> dict[str, Any]:
    """Digests in hexadecimal."""
    line: dict[str, Any] = {"number": number, "digest": event.digest.hex(), "tier": event.tier}
    if isinstance(event, BlockMoved):
        return {**line, "type": "moved", "present": event.present}
    line["salt"] = event.salt
    if isinstance(event, BlockStored):
        return {**line, "type": "stored", "parent": event.parent.hex(), "token_ids": event.tokens}
    return {**line, "type": "removed"}
