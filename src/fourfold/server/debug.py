"""What shows the engine from inside: timelines, open requests, the KV ledger and the prefix cache.

With API keys, a caller sees its own requests and prefixes; of others only that they are there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from fourfold._version import __version__
from fourfold.errors import FourfoldError
from fourfold.server.errors import JSON, HTTPError
from fourfold.server.front import Front
from fourfold.server.traces import trace_object
from fourfold.timeline import EngineView, HotPrefix
from fourfold.types import EngineStats

T = TypeVar("T")

ENGINE_ANSWER_SECONDS = 5.0
"""An engine that has not said anything for that long is reported as not answering."""


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type=JSON)


async def answer_of_engine(question: Awaitable[T]) -> T:
    """Raises HTTPError 503 if the engine does not answer."""
    try:
        return await asyncio.wait_for(question, ENGINE_ANSWER_SECONDS)
    except (TimeoutError, FourfoldError) as error:
        why = str(error) or f"the engine did not answer within {ENGINE_ANSWER_SECONDS:g} s"
        raise HTTPError(503, why, "service_unavailable_error", code="unhealthy") from error


async def trace(front: Front, request: Request) -> Response:
    """The timelines of one answer's sequences, finished or not. 404 if it is not the caller's."""
    name: str = request.path_params["id"]
    record = front.records.find(name, request.state.tenant)
    if record is not None:
        timelines = await answer_of_engine(front.client.timelines(record.sequence_ids))
        if any(timeline is not None for timeline in timelines) or not record.ended:
            return _json(trace_object(record, timelines))
    raise HTTPError(
        404,
        f"no request {name[:200]!r} is known; give the id of a response or its X-Request-Id, "
        "soon enough: only the last ones are kept, and a restarted engine has none",
        "not_found_error",
        "id",
        "request_not_found",
    )


async def kv(front: Front, request: Request) -> Response:
    """The states of all KV blocks, and what the prefix cache holds. If the engine does not answer, the states
    are those of its last heartbeat, and it says so."""
    view, stale = await _view_or_stats(front, request)
    return _json({**_kv(front, view), **_load(view.stats), "stale": stale})


async def requests(front: Front, request: Request) -> Response:
    """The caller's open requests; of others how many there are."""
    return _json(_requests(front, request, await _view(front, request)))


async def status(front: Front, request: Request) -> Response:
    """All that a live view shows, of one moment. Tokens and seconds only ever grow: differences are rates.

    Without an answer of the engine it is what its last heartbeat said, and no requests."""
    view, stale = await _view_or_stats(front, request)
    return _json(
        {
            "model": front.names[0],
            "version": __version__,
            "time": time.time(),
            "clock": time.monotonic(),
            "max_num_seqs": front.model.max_num_seqs,
            "max_model_len": front.model.max_model_len,
            "engine": {name: getattr(view.stats, name) for name in view.stats.__struct_fields__},
            "kv": _kv(front, view),
            "stale": stale,
            **_requests(front, request, view),
        }
    )


async def _view(front: Front, request: Request) -> EngineView:
    salts = [request.state.tenant] if front.settings.api_keys else None
    return await answer_of_engine(front.client.view(salts))


async def _view_or_stats(front: Front, request: Request) -> tuple[EngineView, str | None]:
    """What there is, and why it is not all. Raises HTTPError 503 if there is not even a heartbeat."""
    try:
        return await _view(front, request), None
    except HTTPError as error:
        stats = await answer_of_engine(front.client.stats())
        view = EngineView(stats=stats, requests=[], open_requests=stats.running + stats.waiting, tree=None)
        return view, str(error)


def _load(stats: EngineStats) -> dict[str, int]:
    return {name: getattr(stats, name) for name in ("running", "waiting", "preemptions", "aborted", "step")}


def _kv(front: Front, view: EngineView) -> dict[str, Any]:
    """balanced: the states add up to the pool (design rule 2)."""
    stats, tree = view.stats, view.tree
    states = {
        "free": stats.free_blocks,
        "cached": stats.cached_blocks,
        "live": stats.live_blocks,
        "in_transfer": stats.in_transfer_blocks,
    }
    return {
        **states,
        "total": stats.total_blocks,
        "balanced": sum(states.values()) == stats.total_blocks,
        "block_size": front.model.block_size,
        "pinned": stats.pinned_blocks,
        "evicted": stats.evicted_blocks,
        "tiers": {name: getattr(stats.tiers, name) for name in stats.tiers.__struct_fields__},
        "tree": None
        if tree is None
        else {
            "nodes": tree.nodes,
            "tokens": tree.tokens,
            "domains": tree.domains,
            "pinned_tokens": tree.pinned_tokens,
            "complete": tree.complete,
            "hottest": [_prefix(front, prefix) for prefix in tree.hottest],
        },
    }


def _prefix(front: Front, prefix: HotPrefix) -> dict[str, Any]:
    decode = front.tokenizer.decode
    return {
        "tokens": prefix.tokens,
        "hits": prefix.hits,
        "pinned": prefix.pinned,
        "in_use": prefix.in_use,
        "token_ids": prefix.head,
        "text": decode(prefix.head, skip_special_tokens=False),
        "last_token_ids": prefix.tail,
        "last_text": decode(prefix.tail, skip_special_tokens=False),
    }


def _requests(front: Front, request: Request, view: EngineView) -> dict[str, Any]:
    own = []
    for line in view.requests:
        record = front.records.of_sequence(line.request_id)
        if record is not None and record.tenant == request.state.tenant:
            data = msgspec.to_builtins(line)
            del data["request_id"]
            own.append({"id": line.request_id, "request_id": record.request_id, **data})
    return {"requests": own, "others": view.open_requests - len(own)}
