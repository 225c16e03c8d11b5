"""Responses that watch their client: when it leaves, the work for it ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from fourfold.server.errors import HTTPError, as_http, error_object, error_response

log = logging.getLogger("fourfold.server")

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Proxies such as nginx hold events back otherwise.
    (b"x-accel-buffering", b"no"),
]


class ClientGoneError(Exception):
    """The client closed its connection."""


class ShutdownError(HTTPError):
    """The server could not wait for this answer any longer."""

    def __init__(self) -> None:
        text = "the server is shutting down; send the request again"
        super().__init__(
            503, text, "service_unavailable_error", code="shutting_down", headers={"Retry-After": "1"}
        )


class OpenWork:
    """The answers that are being worked on."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ended = False

    def end(self) -> None:
        """Ends all of them, and any later one, with ShutdownError."""
        self._ended = True
        for task in self._tasks:
            task.cancel()

    async def until_disconnect(self, receive: Receive, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`. If the client leaves first, it is cancelled and ClientGoneError raised."""
        task = asyncio.create_task(work)
        watch = asyncio.create_task(_disconnected(receive))
        self._tasks.add(task)
        try:
            if self._ended:
                raise ShutdownError
            await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientGoneError
            if task.cancelled():
                raise ShutdownError
            return task.result()
        finally:
            self._tasks.discard(task)
            task.cancel()
            watch.cancel()
            await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Watched(Response):
    """Sends the response that `work` makes, unless the client has gone by then."""

    def __init__(self, work: Callable[[], Awaitable[Response]], open_work: OpenWork) -> None:
        super().__init__()
        self._work = work
        self._open = open_work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await self._open.until_disconnect(receive, self._answer())
        except ClientGoneError:
            log.debug("client left before its answer was ready")
            return
        except ShutdownError as error:
            response = error_response(error)
        await response(scope, receive, send)

    async def _answer(self) -> Response:
        try:
            return await self._work()
        except Exception as error:
            return error_response(error)


class EventStream(Response):
    """Server-sent events.

    chunks: encoded events; one write to the socket per item.
    preamble: written before the first of them.  headers: more of them.
    grace: seconds to wait for the first chunk before the headers are sent. A failure within them becomes a
    plain
        response with its own status; a later one an event {"error": ...} before [DONE].
    """

    def __init__(
        self,
        chunks: AsyncGenerator[bytes],
        preamble: bytes,
        grace: float,
        open_work: OpenWork,
        headers: Mapping[str, str],
    ) -> None:
        super().__init__()
        self._fields = [*_HEADERS, *((k.lower().encode(), v.encode()) for k, v in headers.items())]
        self._open = open_work
        self._started = False
        self._chunks = chunks
        self._preamble = preamble
        self._grace = grace

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._open.until_disconnect(receive, self._stream(scope, receive, send))
        except ClientGoneError:
            log.debug("client left before the end of its stream")
        except ShutdownError as error:
            if self._started:
                await send({"type": "http.response.body", "body": _last_words(error), "more_body": False})
            else:
                await error_response(error)(scope, receive, send)

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._chunks) as chunks:
            first = asyncio.create_task(_next(chunks))
            try:
                await asyncio.wait((first,), timeout=self._grace)
                if first.done() and (error := first.exception()) is not None:
                    await error_response(error)(scope, receive, send)
                    return
                self._started = True
                await send({"type": "http.response.start", "status": 200, "headers": self._fields})
                await self._body(first, chunks, send)
            finally:
                # The generator cannot be closed while a task is inside it.
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)

    async def _body(self, first: asyncio.Task[bytes], chunks: AsyncGenerator[bytes], send: Send) -> None:
        preamble = self._preamble
        if not first.done() and preamble:
            await send({"type": "http.response.body", "body": preamble, "more_body": True})
            preamble = b""
        try:
            await send({"type": "http.response.body", "body": preamble + await first, "more_body": True})
            async for chunk in chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            end = b""
        except Exception as error:
            end = _last_words(error)
        await send({"type": "http.response.body", "body": end, "more_body": False})


def _last_words(error: Exception) -> bytes:
    return b"data: " + error_object(as_http(error)) + b"\n\n" + DONE


async def _next(chunks: AsyncGenerator[bytes]) -> bytes:
    return await anext(chunks, b"")
