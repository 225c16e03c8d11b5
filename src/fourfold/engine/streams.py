"""The open requests of a client, and the way of their events into the event loop that waits for them."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator

import msgspec

from fourfold.errors import InvalidRequestError
from fourfold.types import EngineEvent, EngineRequest


class Stream:
    """One request's events; at most one per token, so the queue is bounded by the request's length."""

    __slots__ = ("_items", "_waiting", "delivered", "ended", "key", "loop", "request", "retried", "sent")

    def __init__(self, request: EngineRequest, key: str) -> None:
        self.request = request
        self.key = key
        """The request's id inside the engine. Unlike the caller's it is never used again, so what is still
        under way for a request that was left cannot reach a later one of the same name."""
        self.loop = asyncio.get_running_loop()
        self.delivered = False
        """True once an event went in: from then on the request cannot be retried unseen."""
        self.sent = False
        """True while an engine process has the request."""
        self.retried = False
        self._items: deque[EngineEvent | Exception] = deque()
        self._waiting: asyncio.Future[None] | None = None
        self.ended = False
        """Whether the last event was taken."""

    def put(self, item: EngineEvent | Exception) -> None:
        """Only in the stream's own loop."""
        self.delivered = True
        self._items.append(item)
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    @property
    def engine_request(self) -> EngineRequest:
        """The request under its key."""
        return msgspec.structs.replace(self.request, request_id=self.key)

    async def next(self) -> EngineEvent:
        """The next event, unless it ended. Raises the exception that ended it. Only one task may wait."""
        if not self._items:
            self._waiting = self.loop.create_future()
            await self._waiting
        item = self._items.popleft()
        if isinstance(item, Exception):
            raise item
        self.ended = item.finish_reason is not None
        return item


REMEMBERED_KEYS = 4096
"""Requests that ended whose keys are known still."""


class Streams:
    """All open streams. Everything is called in the loop, but the *_soon methods, from any thread."""

    def __init__(self) -> None:
        self._open: dict[str, Stream] = {}
        self._keys: dict[str, str] = {}
        self._opened = 0
        self._ended: OrderedDict[str, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Stream]:
        return iter(tuple(self._open.values()))

    def open(self, request: EngineRequest) -> Stream:
        """Raises InvalidRequestError if the id is in use."""
        request_id = request.request_id
        if request_id in self._keys:
            raise InvalidRequestError(f"request id {request_id!r} is already in use", "request_id")
        self._opened += 1
        key = self._keys[request_id] = f"{request_id}#{self._opened}"
        stream = self._open[key] = Stream(request, key)
        return stream

    def discard(self, stream: Stream) -> bool:
        """Forgets a stream whose consumer left. True if it had not ended, so that the engine must be told."""
        if stream.key not in self._open:
            return False
        request_id = stream.request.request_id
        del self._open[stream.key], self._keys[request_id]
        self._ended[request_id] = stream.key
        if len(self._ended) > REMEMBERED_KEYS:
            self._ended.popitem(last=False)
        return True

    def find(self, request_id: str) -> Stream | None:
        """By the caller's id."""
        return self._open.get(self._keys.get(request_id, ""))

    def key_of(self, request_id: str) -> str:
        """The key of an open request, or of the last ended one of that id; "" if it is not remembered."""
        return self._keys.get(request_id) or self._ended.get(request_id, "")

    def get(self, key: str) -> Stream | None:
        return self._open.get(key)

    def deliver(self, events: Iterable[EngineEvent]) -> None:
        """Events under their keys; those of requests whose consumer left are dropped."""
        for event in events:
            stream = self._open.get(event.request_id)
            if stream is None:
                continue
            event.request_id = stream.request.request_id
            if event.finish_reason is not None:
                self.discard(stream)
            stream.put(event)

    def fail(self, stream: Stream, error: Exception) -> None:
        if self.discard(stream):
            stream.put(error)

    def fail_all(self, error: Exception) -> None:
        for stream in self:
            self.fail(stream, error)

    def deliver_soon(self, events: list[EngineEvent]) -> None:
        """One wake-up per loop and step, not one per event."""
        by_loop: dict[asyncio.AbstractEventLoop, list[EngineEvent]] = {}
        for event in events:
            stream = self._open.get(event.request_id)
            if stream is not None:
                by_loop.setdefault(stream.loop, []).append(event)
        for loop, share in by_loop.items():
            _call(loop, self.deliver, share)

    def fail_soon(self, stream: Stream, error: Exception) -> None:
        _call(stream.loop, self.fail, stream, error)

    def fail_all_soon(self, error: Exception) -> None:
        for stream in self:
            self.fail_soon(stream, error)


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: object) -> None:
    """A loop that was closed has no consumers left, so there is nobody to tell."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *arguments)
