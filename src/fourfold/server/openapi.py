"""The OpenAPI document, made from the structs that decode the bodies. Built when first asked for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from fourfold._version import __version__
from fourfold.server.errors import JSON
from fourfold.server.wire import ChatBody, CompletionBody, DetokenizeBody, PinBody, TokenizeBody, UnpinBody

_BODIES: dict[str, type[msgspec.Struct]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/v1/cache/pin": PinBody,
    "/v1/cache/unpin": UnpinBody,
    "/v1/tokenize": TokenizeBody,
    "/tokenize": TokenizeBody,
    "/v1/detokenize": DetokenizeBody,
    "/detokenize": DetokenizeBody,
}

DOCS_PATH = "/docs"

Endpoint = Callable[[Request], Awaitable[Response]]


class Operation(msgspec.Struct, frozen=True):
    """One documented route. path: with {parameters} in OpenAPI's notation."""

    method: str
    path: str
    summary: str
    parameters: tuple[str, ...] = ()


def document(operations: Iterable[Operation]) -> dict[str, Any]:
    """OpenAPI 3.1."""
    kinds = sorted(set(_BODIES.values()), key=lambda kind: kind.__name__)
    schemas, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(kinds, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        entry: dict[str, Any] = {
            "summary": operation.summary,
            "responses": {
                "200": {"description": "OK"},
                "default": {"description": 'An {"error": ...} object'},
            },
        }
        if operation.parameters:
            entry["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                for name in operation.parameters
            ]
        if operation.method == "POST":
            schema = schema_of[_BODIES[operation.path]]
            entry["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
        paths.setdefault(operation.path, {})[operation.method.lower()] = entry
    return {
        "openapi": "3.1.0",
        "info": {"title": "Fourfold", "version": __version__},
        "paths": paths,
        "components": {"schemas": components},
    }


def document_endpoint(operations: Sequence[Operation]) -> Endpoint:
    async def endpoint(_: Request) -> Response:
        return Response(msgspec.json.encode(document(operations)), media_type=JSON)

    return endpoint


def docs_endpoint(operations: Sequence[Operation]) -> Endpoint:
    """A page that needs nothing from other hosts: the routes, and where the whole document is."""

    async def endpoint(_: Request) -> Response:
        rows = "".join(
            f"<tr><td>{each.method}</td><td><code>{each.path}</code></td><td>{each.summary}</td></tr>"
            for each in operations
        )
        return HTMLResponse(
            "<!doctype html><html lang=en><meta charset=utf-8><title>Fourfold</title>"
            f"<h1>Fourfold {__version__}</h1><table>{rows}</table>"
            "<p>Fields and types: <a href=openapi.json>openapi.json</a></p></html>"
        )

    return endpoint
