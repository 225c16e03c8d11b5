"""What every request passes before a handler sees it: request id, API key, size limit. Plain ASGI, no
wrapping of bodies that stream out."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import time
import uuid
from collections import Counter
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fourfold.server.errors import HTTPError, error_response

log = logging.getLogger("fourfold.access")

_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")

OPEN_PATHS = frozenset({"/health", "/ui"})
"""What needs no key: whether the server lives, and a page that holds nothing."""


class ApiKeys:
    """Knows keys by their digests, so that a comparison takes the same time for any candidate."""

    def __init__(self, keys: Sequence[str], weights: Sequence[tuple[str, float]] = ()) -> None:
        """weights: of keys whose share of the engine is not 1."""
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]
        self._weights = {self.tenant(key): weight for key, weight in weights}

    def __bool__(self) -> bool:
        return bool(self._digests)

    def tenant(self, candidate: str) -> str | None:
        """A name for the key's owner that does not give the key away, or None if the key is unknown."""
        digest = hashlib.sha256(candidate.encode()).digest()
        known = False
        for other in self._digests:
            known |= hmac.compare_digest(digest, other)
        return (
            hashlib.blake2b(digest, digest_size=16, person=b"fourfold-tenant").hexdigest() if known else None
        )

    def weight(self, tenant: str) -> float:
        """The tenant's share of the engine, relative to others."""
        return self._weights.get(tenant, 1.0)


def cache_salt(tenant: str, body_salt: str | None) -> str:
    """Who may share KV: the key's owner alone, narrowed by what the body says. A body can never widen it."""
    if body_salt is None:
        return tenant
    mixed = hashlib.blake2b(digest_size=16, person=b"fourfold-salt")
    mixed.update(f"{len(tenant)}:{tenant}".encode())
    mixed.update(body_salt.encode())
    return mixed.hexdigest()


class Gate:
    """ASGI middleware.

    errors: counts responses of status 400 and above, by status.

    Sets scope["state"]["tenant"] ("" without keys), ["weight"] and ["request_id"]; answers 401 and 413
    itself; adds x-request-id to every response.
    """

    def __init__(
        self, app: ASGIApp, keys: ApiKeys, max_body_bytes: int, errors: Counter[int], access_log: bool
    ) -> None:
        self._app = app
        self._keys = keys
        self._errors = errors
        self._limit = max_body_bytes
        self._access_log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex.encode()
        state = scope.setdefault("state", {})
        state["request_id"] = request_id.decode()
        started = time.monotonic()
        status = 0

        async def tagged(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if status >= 400:
                    self._errors[status] += 1
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        refusal = self._refuse(scope, headers, state)
        if refusal is not None:
            await refusal(scope, receive, tagged)
        else:
            await self._app(scope, receive, tagged)
        if self._access_log:
            took = time.monotonic() - started
            log.info("%s %s %d %.3fs %s", scope["method"], scope["path"], status, took, state["request_id"])

    def _refuse(self, scope: Scope, headers: dict[bytes, bytes], state: dict[str, object]) -> Response | None:
        state["tenant"], state["weight"] = "", 1.0
        if self._keys and scope["path"] not in OPEN_PATHS:
            tenant = self._keys.tenant(_candidate(headers))
            if tenant is None:
                return error_response(
                    HTTPError(
                        401,
                        "a valid API key is needed: send the header 'Authorization: Bearer KEY'",
                        "authentication_error",
                        code="invalid_api_key",
                        headers={"WWW-Authenticate": "Bearer"},
                    )
                )
            state["tenant"], state["weight"] = tenant, self._keys.weight(tenant)
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and len(length) < 20 and int(length) <= self._limit:
            return None
        return error_response(too_large(self._limit))


def _candidate(headers: dict[bytes, bytes]) -> str:
    scheme, _, value = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    return headers.get(b"x-api-key", b"").decode("latin-1")


def too_large(limit: int) -> HTTPError:
    return HTTPError(
        413,
        f"the request body is larger than the limit of {limit} bytes",
        "invalid_request_error",
        code="body_too_large",
    )


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body. Raises HTTPError 413 as soon as it is longer than `limit` bytes, whatever its headers
    said."""
    parts = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise too_large(limit)
        parts.append(part)
    return b"".join(parts)
