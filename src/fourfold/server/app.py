"""The application: routes, and what is wrapped around them."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from fourfold.engine.client import EngineClient
from fourfold.server import admin, cache, debug
from fourfold.server.answers import Formats
from fourfold.server.chat import chat_completions
from fourfold.server.completions import completions
from fourfold.server.errors import error_response, on_http_exception
from fourfold.server.front import Front
from fourfold.server.gate import ApiKeys, Gate
from fourfold.server.openapi import DOCS_PATH, Operation, docs_endpoint, document_endpoint
from fourfold.server.settings import ServerSettings
from fourfold.server.tokens import detokenize, tokenize
from fourfold.server.ui import UI_PATH, ui_endpoint
from fourfold.text.chat import ChatTemplate
from fourfold.text.tokenizer import Tokenizer

Handler = Callable[[Front, Request], Awaitable[Response]]

_ROUTES: tuple[tuple[str, str, Handler, str], ...] = (
    ("POST", "/v1/chat/completions", chat_completions, "Answer a conversation."),
    ("POST", "/v1/completions", completions, "Continue texts or token ids."),
    ("GET", "/v1/models", admin.models, "List the served models."),
    ("GET", "/v1/models/{name:path}", admin.model, "Describe one model."),
    ("POST", "/v1/tokenize", tokenize, "Text or messages to token ids."),
    ("POST", "/tokenize", tokenize, "Text or messages to token ids."),
    ("POST", "/v1/detokenize", detokenize, "Token ids to text."),
    ("POST", "/detokenize", detokenize, "Token ids to text."),
    ("POST", "/v1/cache/pin", cache.pin, "Keep the KV of a prompt's beginning until it is unpinned."),
    ("POST", "/v1/cache/unpin", cache.unpin, "End a pin."),
    ("GET", "/v1/cache/pins", cache.pins, "List the caller's pins."),
    ("GET", "/v1/cache/events", cache.events, "What changed in the prefix cache."),
    ("GET", "/health", admin.health, "Is the engine alive and making progress?"),
    ("GET", "/ping", admin.ping, "The same, where a platform expects it."),
    ("GET", "/metrics", admin.metrics, "Prometheus metrics."),
    ("GET", "/version", admin.version, "The version of Fourfold."),
    ("GET", "/v1/requests/{id:path}/trace", debug.trace, "What became of one request in the engine."),
    ("GET", "/debug/kv", debug.kv, "The states of all KV blocks, and the prefix cache."),
    ("GET", "/debug/requests", debug.requests, "The open requests."),
    ("GET", "/debug/status", debug.status, "All that `fourfold top` shows."),
)


_PARAMETER = re.compile(r"\{(\w+)")


def create_app(client: EngineClient, tokenizer: Tokenizer, settings: ServerSettings) -> Starlette:
    """The ASGI application over one engine. It does not own the client: who made it closes it.

    Bodies are decoded by msgspec and answers encoded by it, and the OpenAPI document comes from the same
    structs. So there is no FastAPI on top: it would take 0.25 s of a start that takes half a second.
    """
    has_template = settings.chat_template is not None or tokenizer.chat_template is not None
    template = ChatTemplate.of(tokenizer, settings.chat_template) if has_template else None
    front = Front(client, tokenizer, settings, Formats(tokenizer, settings), template)
    middleware = [
        Middleware(
            Gate,
            keys=ApiKeys(settings.api_keys, settings.key_weights),
            max_body_bytes=settings.max_body_bytes,
            errors=front.metrics.errors,
            access_log=settings.access_log,
        )
    ]
    if settings.cors_origins:
        # Outside the gate: a browser's preflight request carries no key.
        cors = Middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
        middleware.insert(0, cors)
    operations = [
        Operation(method, path.replace(":path", ""), summary, tuple(_PARAMETER.findall(path)))
        for method, path, _, summary in _ROUTES
    ]
    app = Starlette(
        routes=[
            *(
                Route(path, _endpoint(front, handler), methods=[method])
                for method, path, handler, _ in _ROUTES
            ),
            Route("/openapi.json", document_endpoint(operations), methods=["GET"]),
            Route(UI_PATH, ui_endpoint, methods=["GET"]),
            Route(DOCS_PATH, docs_endpoint(operations), methods=["GET"]),
        ],
        middleware=middleware,
        exception_handlers={HTTPException: on_http_exception},
    )
    app.router.redirect_slashes = False
    app.state.front = front
    return app


def _endpoint(front: Front, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        try:
            return await handler(front, request)
        except ClientDisconnect:
            # The client left while it was sending; nobody reads this.
            return Response(status_code=400)
        except Exception as error:
            return error_response(error)

    return endpoint
