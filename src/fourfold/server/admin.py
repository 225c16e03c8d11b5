"""What operators ask: models, health, metrics, version."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from fourfold._version import __version__
from fourfold.errors import FourfoldError
from fourfold.server.debug import ENGINE_ANSWER_SECONDS
from fourfold.server.errors import JSON, HTTPError
from fourfold.server.front import Front
from fourfold.types import EngineStats

log = logging.getLogger("fourfold.server")


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type=JSON)


def _card(front: Front, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": front.created,
        "owned_by": "fourfold",
        "root": front.model.name,
        "parent": None,
        "max_model_len": front.model.max_model_len,
        "meta": {
            "family": front.model.family,
            "n_params": front.model.parameters,
            "n_vocab": front.model.vocab_size,
            "size": front.model.weight_bytes,
        },
    }


async def models(front: Front, _: Request) -> Response:
    return _json({"object": "list", "data": [_card(front, name) for name in front.names]})


async def model(front: Front, request: Request) -> Response:
    return _json(_card(front, front.check_model(request.path_params["name"])))


async def health(front: Front, _: Request) -> Response:
    """200 while the engine is alive and, if it has work, getting on with it; else 503 and why."""
    try:
        ok, reason = await asyncio.wait_for(front.client.healthy(), ENGINE_ANSWER_SECONDS)
    except TimeoutError:
        ok, reason = False, f"the engine did not answer within {ENGINE_ANSWER_SECONDS:g} s"
    except FourfoldError as error:
        ok, reason = False, str(error)
    if not ok:
        raise HTTPError(
            503, reason or "the engine is not well", "service_unavailable_error", code="unhealthy"
        )
    return _json({"status": "ok"})


async def ping(front: Front, request: Request) -> Response:
    return await health(front, request)


async def version(_: Front, __: Request) -> Response:
    return _json({"version": __version__})


async def _stats(front: Front) -> EngineStats | None:
    """None, and a line in the log, if the engine does not answer."""
    try:
        return await asyncio.wait_for(front.client.stats(), ENGINE_ANSWER_SECONDS)
    except (TimeoutError, FourfoldError) as error:
        log.warning("the engine gave no stats: %s", str(error) or "no answer")
        return None


async def metrics(front: Front, _: Request) -> Response:
    # prometheus-client takes 50 ms to import, which the time to the first token would pay for.
    from fourfold.server.exposition import CONTENT_TYPE, render

    text = render(front.metrics, front.model, front.names[0], await _stats(front))
    return Response(text, headers={"Content-Type": CONTENT_TYPE})
