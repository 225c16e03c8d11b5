"""EngineClient over an engine process: restarts it when it dies, retries what nobody has seen anything of."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from enum import Enum
from typing import Any

import msgspec

from fourfold.config import EngineConfig
from fourfold.engine.child import EngineProcess
from fourfold.engine.launch import DEFAULT_FACTORY
from fourfold.engine.operations import CacheOperation, CacheOutcome
from fourfold.engine.streams import Stream, Streams
from fourfold.engine.wire import (
    Abort,
    Add,
    Answer,
    AskTimelines,
    AskView,
    Heartbeat,
    LoadFailed,
    Operate,
    Operated,
    Output,
    Progress,
    Ready,
    Report,
    Stop,
    Timelines,
    View,
)
from fourfold.errors import DeadlineError, EngineDeadError, FourfoldError, LoadError, OverloadedError
from fourfold.timeline import EngineView, Timeline
from fourfold.types import EngineEvent, EngineRequest, EngineStats, ModelInfo

logger = logging.getLogger("fourfold.engine")

BACKOFF_FIRST, BACKOFF_MAX = 0.1, 10.0
"""Seconds before the first restart; doubled for each death soon after, up to the second number."""

STABLE_SECONDS = 30.0
"""An engine that was ready for so long starts the back-off anew when it dies."""

MAX_LOAD_FAILURES = 5
"""Restarts in a row that may end before the engine is ready."""

HEARTBEAT_LIMIT = 3.0
"""Seconds without a sign of life after which the engine counts as hung."""

STALL_SECONDS = 30.0
"""Seconds without a finished step, while there is work, after which the engine counts as stuck..."""

STALL_STEPS = 8.0
"""...or so many average steps, if that is longer (a big model on a slow machine)."""


LATE_SECONDS = 2.0
"""Seconds after a request's timeout in which the engine must have ended it."""

_STATES = frozenset({
    "running", "waiting", "free_blocks", "cached_blocks", "live_blocks", "in_transfer_blocks", "total_blocks",
    "last_progress", "rss_bytes", "tree_blocks", "pinned_blocks", "tiers",
})  # fmt: skip
"""What EngineStats has that is no counter."""


def add_counters(stats: EngineStats, other: EngineStats) -> EngineStats:
    """`stats` with its counters raised by those of `other`; what is a state and not a counter stays."""
    sums = {
        name: _sum(getattr(stats, name), getattr(other, name))
        for name in stats.__struct_fields__
        if name not in _STATES
    }
    return msgspec.structs.replace(stats, **sums)


def _sum(one: Any, other: Any) -> Any:
    """Of two numbers, or of two dictionaries by key."""
    if isinstance(one, dict):
        return {
            key: one.get(key, 0) + other.get(key, 0) for key in (*one, *(k for k in other if k not in one))
        }
    return one + other


class _State(Enum):
    LOADING = "the engine is loading the model"
    READY = ""
    RESTARTING = "the engine died and is being restarted"
    FAILED = "the engine failed"
    CLOSED = "the engine is shut down"


class RemoteEngine:
    """The process starts in the constructor, or was started before it. Then `await ready()` in the loop that
    uses it."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        factory: str = DEFAULT_FACTORY,
        log_level: str = "info",
        on_progress: Callable[[str, float], None] | None = None,
        child: EngineProcess | None = None,
    ) -> None:
        """on_progress: called in the loop with (stage, fraction) while the model loads.

        child: a process that was started with the same arguments and is this client's from now on.
        """
        self._config = config
        self._factory, self._log_level = factory, log_level
        self._on_progress = on_progress
        self._streams = Streams()
        self._child = child or self._spawn()
        self._state = _State.LOADING
        self._reason = ""
        self._model: ModelInfo | None = None
        self._first: asyncio.Future[ModelInfo] | None = None
        self._stats = EngineStats()
        self._earlier = EngineStats()
        self._heard = self._progressed = self._ready_at = time.monotonic()
        self._deaths = self._load_failures = 0
        self._restarts = 0
        self._restart: asyncio.TimerHandle | None = None
        self._load_error: FourfoldError | None = None
        self._questions: dict[int, asyncio.Future[Answer]] = {}
        self._asked = 0
        self._draining = False
        self._idle = asyncio.Event()

    @property
    def model(self) -> ModelInfo:
        if self._model is None:
            raise EngineDeadError("the engine is not ready; await ready() first")
        return self._model

    @property
    def restarts(self) -> int:
        """How often the engine died and was started again."""
        return self._restarts

    @property
    def pid(self) -> int:
        return self._child.pid

    async def ready(self) -> ModelInfo:
        """Waits for the model. Raises LoadError with the engine's message, or EngineDeadError if it died."""
        if self._first is None:
            self._first = asyncio.get_running_loop().create_future()
            self._child.attach(self._on_report, self._on_exit)
        return await asyncio.shield(self._first)

    async def submit(self, request: EngineRequest) -> AsyncIterator[EngineEvent]:
        """See EngineClient.submit. While the engine restarts, requests wait for it."""
        if self._draining or self._state in (_State.FAILED, _State.CLOSED):
            raise EngineDeadError(self._reason or _State.CLOSED.value)
        bound = self._config.max_waiting + self.model.max_num_seqs
        if len(self._streams) >= bound:
            raise OverloadedError(
                f"{len(self._streams)} requests are open, the limit is {bound}; try again later"
            )
        stream = self._streams.open(request)
        if self._state is _State.READY:
            self._send(stream)
        timer = self._give_up_late(stream)
        try:
            while not stream.ended:
                yield await stream.next()
        finally:
            if timer is not None:
                timer.cancel()
            if self._streams.discard(stream) and stream.sent and self._state is _State.READY:
                self._child.send(Abort(stream.key))
            self._note_idle()

    def _give_up_late(self, stream: Stream) -> asyncio.TimerHandle | None:
        """The engine ends what is late. This is for when it cannot: while it is restarted, or stuck."""
        request = stream.request
        if request.timeout is None:
            return None
        left = request.timeout + LATE_SECONDS - (time.monotonic() - request.arrival if request.arrival else 0)

        def give_up() -> None:
            message = f"the answer was not complete within {request.timeout:g} s (timeout)"
            if stream.sent and self._state is _State.READY:
                self._child.send(Abort(stream.key))
            self._streams.fail(stream, DeadlineError(message, passed=True))

        return asyncio.get_running_loop().call_later(max(0.0, left), give_up)

    async def abort(self, request_id: str) -> None:
        stream = self._streams.find(request_id)
        if stream is None:
            return
        if self._state is _State.READY and stream.sent:
            self._child.send(Abort(stream.key))
        else:
            self._streams.deliver([EngineEvent(request_id=stream.key, finish_reason="abort")])

    async def stats(self) -> EngineStats:
        """As of the last heartbeat (several per second); counters go on over restarts."""
        return add_counters(self._stats, self._earlier)

    async def timelines(self, request_ids: Sequence[str]) -> list[Timeline | None]:
        """See EngineClient.timelines."""
        keys = [self._streams.key_of(request_id) for request_id in request_ids]
        answer = await self._ask(lambda number: AskTimelines(number, keys))
        assert isinstance(answer, Timelines)
        for request_id, timeline in zip(request_ids, answer.timelines, strict=True):
            if timeline is not None:
                timeline.request_id = request_id
        return answer.timelines

    async def view(self, salts: Sequence[str] | None) -> EngineView:
        """See EngineClient.view."""
        answer = await self._ask(lambda number: AskView(number, None if salts is None else list(salts)))
        assert isinstance(answer, View)
        view = answer.view
        view.stats = add_counters(view.stats, self._earlier)
        for line in view.requests:
            stream = self._streams.get(line.request_id)
            # One whose consumer left in the meantime keeps the engine's name for it.
            line.request_id = line.request_id if stream is None else stream.request.request_id
        return view

    async def operate(self, operation: CacheOperation) -> CacheOutcome:
        """See EngineClient.operate."""
        answer = await self._ask(lambda number: Operate(number, operation))
        assert isinstance(answer, Operated)
        return answer.outcome

    async def healthy(self) -> tuple[bool, str]:
        if self._state is not _State.READY:
            return False, self._reason or self._state.value
        now = time.monotonic()
        if now - self._heard > HEARTBEAT_LIMIT:
            return False, f"the engine process gave no sign of life for {now - self._heard:.1f} s"
        stats = self._stats
        limit = max(STALL_SECONDS, STALL_STEPS * stats.step_seconds / max(1, stats.step))
        if (stats.running or stats.waiting) and now - self._progressed > limit:
            return False, f"the engine has work but finished no step for {now - self._progressed:.1f} s"
        return True, ""

    async def drain(self, timeout: float) -> bool:
        """Takes no new requests and waits for the open ones. True if all ended within `timeout` seconds."""
        self._draining = True
        self._reason = _State.CLOSED.value
        self._note_idle()
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Ends the process; requests still open get EngineDeadError."""
        if self._state is _State.CLOSED:
            return
        was_ready = self._state is _State.READY
        self._state, self._reason = _State.CLOSED, _State.CLOSED.value
        if self._restart is not None:
            self._restart.cancel()
        self._streams.fail_all(EngineDeadError(self._reason))
        self._fail_questions(EngineDeadError(self._reason))
        self._child.detach()
        if was_ready:
            self._child.send(Stop())
            await asyncio.to_thread(self._child.wait, 2.0)
        self._child.close()
        self._fail_first(EngineDeadError(self._reason))

    async def _ask(self, question: Callable[[int], AskTimelines | AskView | Operate]) -> Answer:
        """Raises EngineDeadError if the engine is not there, or dies before it answers."""
        if self._state is not _State.READY:
            raise EngineDeadError(self._reason or self._state.value)
        self._asked += 1
        number = self._asked
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._questions[number] = answer
        try:
            self._child.send(question(number))
            return await answer
        finally:
            del self._questions[number]

    def _on_answer(self, report: Answer) -> None:
        answer = self._questions.get(report.number)
        # Who asked may have given up.
        if answer is not None and not answer.done():
            answer.set_result(report)

    def _fail_questions(self, error: FourfoldError) -> None:
        for answer in self._questions.values():
            if not answer.done():
                answer.set_exception(error)

    def _spawn(self) -> EngineProcess:
        return EngineProcess(self._config, factory=self._factory, log_level=self._log_level)

    def _send(self, stream: Stream) -> None:
        stream.sent = True
        self._child.send(Add(stream.engine_request))

    def _note_idle(self) -> None:
        if self._draining and not len(self._streams):
            self._idle.set()

    def _on_report(self, report: Report) -> None:
        self._heard = time.monotonic()
        if isinstance(report, Output):
            self._streams.deliver(report.events)
            for refused in report.refused:
                stream = self._streams.get(refused.request_id)
                if stream is not None:
                    self._streams.fail(stream, refused.error())
        elif isinstance(report, Heartbeat):
            self._on_heartbeat(report.stats)
        elif isinstance(report, Answer):
            self._on_answer(report)
        elif isinstance(report, Ready):
            self._on_ready(report.model)
        elif isinstance(report, Progress):
            if self._on_progress is not None:
                self._on_progress(report.stage, report.fraction)
        else:
            self._on_load_failed(report)

    def _on_heartbeat(self, stats: EngineStats) -> None:
        if (stats.step, stats.aborted) < (self._stats.step, self._stats.aborted):
            return  # two threads send them, so an older one may come second
        if stats.step > self._stats.step or not (stats.running or stats.waiting):
            self._progressed = self._heard
        self._stats = stats

    def _on_ready(self, model: ModelInfo) -> None:
        self._state, self._reason, self._model = _State.READY, "", model
        self._load_failures = 0
        self._ready_at = self._progressed = self._heard
        if self._first is not None and not self._first.done():
            self._first.set_result(model)
        for stream in self._streams:
            self._send(stream)

    def _on_load_failed(self, report: LoadFailed) -> None:
        self._load_error = LoadError(report.message) if report.expected else EngineDeadError(report.message)

    def _on_exit(self, child: EngineProcess, why: str) -> None:
        was_ready = self._state is _State.READY
        child.close()
        self._earlier, self._stats = add_counters(self._earlier, self._stats), EngineStats()
        error, self._load_error = self._load_error or EngineDeadError(why), None
        self._fail_questions(EngineDeadError(str(error)))
        if was_ready:
            stable = time.monotonic() - self._ready_at >= STABLE_SECONDS
            self._deaths = 1 if stable else self._deaths + 1
        else:
            self._load_failures += 1
            self._deaths += 1
            if self._model is None or self._load_failures >= MAX_LOAD_FAILURES:
                self._give_up(error)
                return
        self._state, self._reason = _State.RESTARTING, f"{error}; it is being restarted"
        for stream in self._streams:
            if not stream.sent:
                continue
            if stream.delivered or stream.retried:
                self._streams.fail(stream, EngineDeadError(f"{error} while it worked on this request"))
            else:
                stream.sent, stream.retried = False, True
        delay = min(BACKOFF_MAX, BACKOFF_FIRST * 2 ** min(self._deaths - 1, 16))
        logger.error("%s; restart in %.1f s, %d requests wait for it", error, delay, len(self._streams))
        self._restart = asyncio.get_running_loop().call_later(delay, self._start_again)

    def _start_again(self) -> None:
        self._restarts += 1
        self._child = self._spawn()
        self._child.attach(self._on_report, self._on_exit)

    def _give_up(self, error: FourfoldError) -> None:
        self._state, self._reason = _State.FAILED, str(error)
        self._fail_first(error)
        self._streams.fail_all(EngineDeadError(str(error)))

    def _fail_first(self, error: FourfoldError) -> None:
        if self._first is not None and not self._first.done():
            self._first.set_exception(error)
            # Who waited may have left with an error of his own; asyncio would log this one as unseen then.
            self._first.exception()
