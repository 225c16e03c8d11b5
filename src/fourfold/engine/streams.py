"""The open requests of a client, and the way of their events into the event loop that waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

from fourfold.errors import InvalidRequestError
from fourfold.types import EngineEvent, EngineRequest


class Stream:
    """One request's events. Its queue is bounded by the request's own length (one event per token at most)."""

    __slots__ = ("_queue", "delivered", "loop", "request", "retried")

    def __init__(self, request: EngineRequest) -> None:
        self.request = request
        self.loop = asyncio.get_running_loop()
        self.delivered = False
        """True once an event went in: from then on the request cannot be retried unseen."""
        self.retried = False
        self._queue: asyncio.Queue[EngineEvent | Exception] = asyncio.Queue()

    def put(self, item: EngineEvent | Exception) -> None:
        """Only in the stream's own loop."""
        self.delivered = True
        self._queue.put_nowait(item)

    async def events(self) -> AsyncIterator[EngineEvent]:
        """Until the event with a finish_reason, or the exception that ended it."""
        while True:
            item = await self._queue.get()
            if isinstance(item, Exception):
                raise item
            yield item
            if item.finish_reason is not None:
                return


class Streams:
    """All open streams by request id. Everything is called in the loop, but the *_soon methods, from any thread."""

    def __init__(self) -> None:
        self._open: dict[str, Stream] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterable[Stream]:
        return iter(tuple(self._open.values()))

    def open(self, request: EngineRequest) -> Stream:
        """Raises InvalidRequestError if the id is in use."""
        if request.request_id in self._open:
            raise InvalidRequestError(f"request id {request.request_id!r} is already in use", "request_id")
        stream = self._open[request.request_id] = Stream(request)
        return stream

    def discard(self, stream: Stream) -> bool:
        """Forgets a stream whose consumer left. True if it had not ended, so that the engine must be told."""
        if self._open.get(stream.request.request_id) is not stream:
            return False
        del self._open[stream.request.request_id]
        return True

    def get(self, request_id: str) -> Stream | None:
        return self._open.get(request_id)

    def deliver(self, events: Iterable[EngineEvent]) -> None:
        """Events of requests whose consumer left are dropped."""
        for event in events:
            stream = self._open.get(event.request_id)
            if stream is None:
                continue
            if event.finish_reason is not None:
                del self._open[event.request_id]
            stream.put(event)

    def fail(self, stream: Stream, error: Exception) -> None:
        if self.discard(stream):
            stream.put(error)

    def fail_all(self, error: Exception) -> None:
        for stream in tuple(self._open.values()):
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
        for stream in tuple(self._open.values()):
            self.fail_soon(stream, error)


def _call(loop: asyncio.AbstractEventLoop, function: object, *arguments: object) -> None:
    """A loop that was closed has no consumers left, so there is nobody to tell."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(function, *arguments)  # type: ignore[arg-type]
