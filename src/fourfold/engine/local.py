"""The engine inside this process: synchronous for the offline API, in a thread behind the client protocol."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from fourfold.engine.loop import Engine
from fourfold.engine.operations import CacheOperation, CacheOutcome
from fourfold.engine.policy import check_request
from fourfold.engine.streams import Stream, Streams
from fourfold.errors import DeadlineError, EngineDeadError, InvalidRequestError, OverloadedError
from fourfold.timeline import EngineView, Timeline
from fourfold.types import EngineEvent, EngineRequest, EngineStats, ModelInfo

T = TypeVar("T")

STALL_SECONDS = 30.0
"""Seconds without a finished step, while there is work, after which the engine counts as stuck."""


class LocalEngine:
    """Runs batches of requests in the calling thread: what the offline API uses."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @property
    def model(self) -> ModelInfo:
        return self.engine.model

    def generate(self, requests: Iterable[EngineRequest]) -> Iterator[EngineEvent]:
        """Events of all requests as they come. Leaving the iterator early aborts what is left.

        Raises InvalidRequestError before anything runs if one of them cannot be served. The queue's bound is
        respected by adding no more than fit.
        """
        engine = self.engine
        pending = deque(requests)
        for request in pending:
            check_request(request, engine.scheduler.limits)
        unfinished: set[str] = set()
        try:
            while pending or unfinished:
                self._feed(pending, unfinished)
                for event in engine.step():
                    if event.finish_reason is not None:
                        unfinished.discard(event.request_id)
                    yield event
        finally:
            for request_id in unfinished:
                engine.abort(request_id)
            if unfinished:
                engine.step()  # takes the abort events, which nobody waits for

    def stats(self) -> EngineStats:
        return self.engine.stats()

    def close(self) -> None:
        self.engine.close()

    def _feed(self, pending: deque[EngineRequest], unfinished: set[str]) -> None:
        limits = self.engine.scheduler.limits
        while pending and self.engine.scheduler.num_waiting < limits.max_waiting:
            request = pending.popleft()
            self.engine.add(request)
            unfinished.add(request.request_id)


class ThreadedEngine:
    """EngineClient over a core that runs in a thread of this process."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._streams = Streams()
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._crash: BaseException | None = None
        self._questions: set[concurrent.futures.Future[Any]] = set()
        self._thread = threading.Thread(target=self._run, name="fourfold-engine", daemon=True)
        self._thread.start()

    @property
    def model(self) -> ModelInfo:
        return self._engine.model

    async def submit(self, request: EngineRequest) -> AsyncIterator[EngineEvent]:
        """See EngineClient.submit."""
        stream = self._streams.open(request)
        self._post(lambda: self._add(stream))
        try:
            # Asked after the stream is open: either the dying thread finds the stream, or this finds it dead.
            if self._closing or self._crash is not None:
                raise EngineDeadError(f"the engine is not running: {self._crash or 'it was closed'}")
            while not stream.ended:
                yield await stream.next()
        finally:
            if self._streams.discard(stream):
                self._post(lambda: self._engine.abort(stream.key))

    async def abort(self, request_id: str) -> None:
        stream = self._streams.find(request_id)
        if stream is not None:
            key = stream.key
            self._post(lambda: self._engine.abort(key))

    async def stats(self) -> EngineStats:
        return self._engine.stats()

    async def timelines(self, request_ids: Sequence[str]) -> list[Timeline | None]:
        """See EngineClient.timelines."""
        keys = [self._streams.key_of(request_id) for request_id in request_ids]
        found = await self._ask(lambda: [self._engine.recorder.timeline(key) for key in keys])
        for request_id, timeline in zip(request_ids, found, strict=True):
            if timeline is not None:
                timeline.request_id = request_id
        return found

    async def view(self, salts: Sequence[str] | None) -> EngineView:
        """See EngineClient.view."""
        view = await self._ask(lambda: self._engine.view(salts))
        for line in view.requests:
            stream = self._streams.get(line.request_id)
            line.request_id = line.request_id if stream is None else stream.request.request_id
        return view

    async def operate(self, operation: CacheOperation) -> CacheOutcome:
        """See EngineClient.operate."""
        return await self._ask(lambda: self._engine.operate(operation))

    async def _ask(self, question: Callable[[], T]) -> T:
        """`question`'s answer, from the engine's thread."""
        answer: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            if answer.set_running_or_notify_cancel():
                answer.set_result(question())

        self._questions.add(answer)
        try:
            self._post(run)
            if self._closing or self._crash is not None:
                raise EngineDeadError(f"the engine is not running: {self._crash or 'it was closed'}")
            return await asyncio.wrap_future(answer)
        finally:
            self._questions.discard(answer)

    async def healthy(self) -> tuple[bool, str]:
        if self._closing or self._crash is not None:
            return False, f"the engine thread ended: {self._crash or 'it was closed'}"
        stats = self._engine.stats()
        silent = time.monotonic() - stats.last_progress
        if (stats.running or stats.waiting) and silent > STALL_SECONDS:
            return False, f"the engine has work but finished no step for {silent:.1f} s"
        return True, ""

    async def close(self) -> None:
        """Stops after the running step; unfinished requests get EngineDeadError."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)

    def _post(self, command: Callable[[], None]) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def _add(self, stream: Stream) -> None:
        try:
            self._engine.add(stream.engine_request)
        except (InvalidRequestError, OverloadedError, DeadlineError) as error:
            self._streams.fail_soon(stream, error)

    def _run(self) -> None:
        try:
            while True:
                with self._wake:
                    while not (self._commands or self._closing or self._engine.has_work):
                        self._wake.wait()
                    if self._closing:
                        break
                    commands, self._commands = self._commands, deque()
                for command in commands:
                    command()
                if self._engine.has_work:
                    self._streams.deliver_soon(self._engine.step())
        except BaseException as error:
            self._crash = error
            raise
        finally:
            stopped = EngineDeadError(f"the engine stopped: {self._crash or 'it was closed'}")
            self._streams.fail_all_soon(stopped)
            for answer in tuple(self._questions):
                if not answer.done() and answer.set_running_or_notify_cancel():
                    answer.set_exception(stopped)
            self._engine.close()
