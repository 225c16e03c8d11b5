"""The engine's core: the three calls of a step, the numbers about it, and the line in the log."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from fourfold.config import DEFAULT_ITL_RATIO, EngineConfig
from fourfold.engine.batch import Backend, Batch, StepResult
from fourfold.engine.cache import KVEventSink, RadixCache
from fourfold.engine.compiling import CompileQueue
from fourfold.engine.hottest import view_tree
from fourfold.engine.kv import KVCache
from fourfold.engine.operations import CacheOperation, CacheOutcome
from fourfold.engine.outcome import check_result, refused_event
from fourfold.engine.pacing import Pace
from fourfold.engine.policy import Limits
from fourfold.engine.recorder import Recorder
from fourfold.engine.scheduler import Scheduler
from fourfold.engine.sequence import Sequence as Running
from fourfold.engine.speculate.build import LoadedDraft, make_speculator
from fourfold.engine.speculate.draft import Draft
from fourfold.errors import FourfoldError
from fourfold.grammar.compile import Compiler, TokenSource
from fourfold.timeline import MAX_VIEW_REQUESTS, EngineView
from fourfold.types import EngineEvent, EngineRequest, EngineStats, ModelInfo

logger = logging.getLogger("fourfold.engine")

COMPILE_WAIT = 0.005
"""Seconds a step waits for a constraint when there is nothing to compute."""

LOG_INTERVAL = 10.0
"""Seconds between two lines of the log under load."""


class Engine:
    """Not thread-safe: one thread calls add, abort and step. stats() may be called from any thread."""

    def __init__(
        self,
        backend: Backend,
        model: ModelInfo,
        config: EngineConfig,
        kv_events: KVEventSink | None = None,
        load_tokens: Callable[[], TokenSource] | None = None,
        draft: LoadedDraft | None = None,
    ) -> None:
        """kv_events: told of every block that becomes reusable or is evicted.
        load_tokens: called, in another thread, when the first constrained request comes; None: such requests
            are refused.
        draft: the draft model of config.speculation. Raises ConfigError if it does not fit."""
        self.backend = backend
        self._compiling = CompileQueue(
            None if load_tokens is None else Compiler(load_tokens, backend.vocab_size)
        )
        limits = Limits(
            max_model_len=model.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=min(config.max_num_batched_tokens, backend.max_batch_tokens),
            max_waiting=config.max_waiting,
            block_size=backend.block_size,
            num_blocks=backend.num_blocks,
            vocab_size=backend.vocab_size,
        )
        self.kv = KVCache(config, limits.num_blocks, backend, model.kv_identity, kv_events)
        self.cache = self.kv.cache
        seed = int.from_bytes(os.urandom(8), "little") if config.seed is None else config.seed
        self.recorder = Recorder()
        self._draft = draft
        self._speculator = make_speculator(config.speculation, backend.vocab_size, draft)
        self._mask_thread = ThreadPoolExecutor(1, "fourfold-masks")
        target = config.itl_target_ms
        ratio = DEFAULT_ITL_RATIO if config.max_itl_ratio is None else config.max_itl_ratio
        pace = Pace(ratio, None if target is None else target / 1e3)
        self.scheduler = Scheduler(limits, self.cache, seed, pace, self.recorder, self._speculator)
        self.kv.compares_with(self.scheduler.recompute_seconds)
        # What is advertised is what is enforced.
        self.model = msgspec.structs.replace(
            model,
            max_model_len=limits.max_len,
            max_num_seqs=limits.max_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            block_size=limits.block_size,
            num_blocks=limits.num_blocks,
            vocab_size=limits.vocab_size,
        )
        self._outbox: list[EngineEvent] = []
        # Held while blocks and queues change, not while the backend runs: stats() sees a balanced ledger.
        self._changing = threading.Lock()
        self._steps = 0
        self._step_seconds = 0.0
        self._backend_seconds = 0.0
        self._last_progress = time.monotonic()
        self._logged = EngineStats(last_progress=self._last_progress)
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")

    @property
    def has_work(self) -> bool:
        return (
            bool(self._outbox) or self.scheduler.has_work or bool(self._compiling) or self.kv.num_fetching > 0
        )

    def add(self, request: EngineRequest) -> None:
        """Raises InvalidRequestError, OverloadedError or DeadlineError; if not, events follow until a
        finish_reason.

        A constrained request is queued once its constraint is compiled; an error in it comes as an event.
        """
        if not self.scheduler.has_work:
            self._start_busy_period()
        now = time.monotonic()
        self.scheduler.check(request, len(self._compiling) + self.kv.num_fetching, now)
        if not self.kv.fetch(request, self.recorder):
            self._enqueue(request, now)

    def _enqueue(self, request: EngineRequest, now: float) -> None:
        if request.constraint is None:
            with self._changing:
                self.scheduler.add(request, now=now)
            return
        guide = self._compiling.add(request, request.constraint)
        if guide is None:
            self.recorder.open(request).compiling()
        else:
            self.recorder.open(request).compiled(cached=True)
            with self._changing:
                self.scheduler.add(request, guide, now)

    def abort(self, request_id: str) -> None:
        """Frees the request's blocks now; its last event comes with the next step. Ignores unknown ids."""
        event = self._compiling.abort(request_id) or self.kv.abort(request_id)
        if event is not None:
            self.recorder.finish(request_id, "abort")
        else:
            with self._changing:
                event = self.scheduler.abort(request_id)
        if event is not None:
            self._outbox.append(event)

    def step(self) -> list[EngineEvent]:
        """One batch. If the backend raises, the requests of that batch end with an error; others go on."""
        started = time.perf_counter()
        events, self._outbox = self._outbox, []
        events += self._take_fetched()
        events += self._take_compiled()
        drafts, drawing = self._propose()
        with self._changing:
            batch = self.scheduler.next_batch(drafts, time.monotonic())
        if batch is None:
            events += self.scheduler.take_orphans()
            if not events and self.kv.fetching is not None and len(self.kv.fetching):
                self.kv.fetching.wait(COMPILE_WAIT)
            elif not events:
                self._compiling.wait(COMPILE_WAIT)
            return events
        running = time.perf_counter()
        try:
            self.kv.flush(self.backend)
            result = self._run(batch)
            check_result(batch, result)
        except Exception as error:
            logger.exception(
                "step %d failed; its %d requests end with an error", self._steps, len(batch.seq_tokens)
            )
            with self._changing:
                events += self.scheduler.fail(
                    f"the engine failed on this batch: {type(error).__name__}: {error}"
                )
        else:
            took = time.perf_counter() - running
            self._backend_seconds += took
            if drawing and drawing == len(batch.seq_tokens):
                work = (len(batch.tokens) + len(batch.samples)) / 2
                self._speculator.governor.took(drawing, work, took)
            with self._changing:
                events += self.scheduler.commit(batch, result)
            self.scheduler.measured(time.perf_counter() - started)
            self.kv.flush(self.backend)
        self._steps += 1
        self._step_seconds += time.perf_counter() - started
        self._last_progress = time.monotonic()
        if self._last_progress - self._logged.last_progress >= LOG_INTERVAL:
            self._log()
        return events

    def _run(self, batch: Batch) -> StepResult:
        if batch.masks is None:
            return self.backend.run(batch)
        batch.masks.start(self._mask_thread)
        try:
            return self.backend.run(batch)
        finally:
            batch.masks.wait()  # the guides are the scheduler's again

    def _propose(self) -> tuple[dict[Running, Draft], int]:
        """Drafts for the next step, and of how many sequences it will be if all of them draw; else 0."""
        drawing = self.scheduler.drawing()
        started = time.perf_counter()
        drafts = self._speculator.propose(drawing)
        if drafts:
            guesses = sum(draft.guesses(len(draft.tokens)) for draft in drafts.values())
            self._speculator.governor.drafted(len(drawing), guesses, time.perf_counter() - started)
        return drafts, len(drawing)

    def operate(self, operation: CacheOperation) -> CacheOutcome:
        """Pins, and the log of KV events; in the engine's thread."""
        with self._changing:
            return self.kv.operate(operation)

    def _take_fetched(self) -> list[EngineEvent]:
        """Queues the requests that waited for the disk."""
        refused = []
        for request in () if self.kv.fetching is None else self.kv.fetching.take():
            try:
                self._enqueue(request, time.monotonic())
            except FourfoldError as error:
                self.recorder.finish(request.request_id, "error", str(error))
                refused.append(refused_event(request, error))
        return refused

    def _take_compiled(self) -> list[EngineEvent]:
        """Queues the requests whose constraints are ready; the events of those whose are bad."""
        refused = []
        for compiled in self._compiling.take():
            try:
                guide = compiled.guide()
                self.recorder.open(compiled.request).compiled()
                with self._changing:
                    self.scheduler.add(compiled.request, guide, time.monotonic())
            except FourfoldError as error:
                self.recorder.finish(compiled.request.request_id, "error", str(error))
                refused.append(refused_event(compiled.request, error))
        return refused

    def warm(self) -> None:
        """For an engine that has nothing to do: prepares, in the background, for the first constraint. That
        holds up Python for a moment (0.3 s for 49,000 tokens), which would otherwise be during a step."""
        self._compiling.warm()

    def stats(self) -> EngineStats:
        scheduler, counters = self.scheduler, self.scheduler.counters
        radix = self.cache if isinstance(self.cache, RadixCache) else None
        with self._changing:
            blocks = self.cache.ledger.counts()
            pinned = 0 if self.kv.pins is None else self.kv.pins.blocks
            running, waiting = scheduler.num_running, scheduler.num_waiting + len(self._compiling)
        return EngineStats(
            step=self._steps,
            running=running,
            waiting=waiting,
            free_blocks=blocks.free,
            cached_blocks=blocks.cached,
            live_blocks=blocks.live,
            in_transfer_blocks=blocks.in_transfer,
            total_blocks=blocks.total,
            pinned_blocks=pinned,
            tiers=self.kv.stats(),
            prompt_tokens=counters.prompt_tokens,
            generation_tokens=counters.generation_tokens,
            cached_prompt_tokens=counters.cached_prompt_tokens,
            preemptions=counters.preemptions,
            aborted=counters.aborted,
            finished=counters.finished,
            refused=counters.refused,
            timed_out=counters.timed_out,
            nan_requests=counters.nan_requests,
            forced_tokens=counters.forced_tokens,
            rejected_answers=counters.rejected_answers,
            draft_tokens=counters.draft_tokens,
            accepted_draft_tokens=counters.accepted_draft_tokens,
            tree_blocks=radix.num_nodes if radix else 0,
            evicted_blocks=radix.evicted_blocks if radix else 0,
            copied_tokens=radix.copied_tokens if radix else 0,
            prefill_tokens=self.recorder.prefill_tokens,
            cached_tokens_by_tier=self.recorder.cached_tokens.copy(),
            recomputed_tokens_by_tier=self.recorder.recomputed_tokens.copy(),
            preemptions_by_reason=self.recorder.preemptions.copy(),
            last_progress=self._last_progress,
            step_seconds=self._step_seconds,
            backend_seconds=self._backend_seconds,
            rss_bytes=self._rss(),
        )

    def view(self, salts: Sequence[str] | None) -> EngineView:
        """What a live view shows; in the engine's thread. salts: whose prefixes to name; None: everyone's."""
        requests = self.recorder.live()
        tree = view_tree(self.cache, salts) if isinstance(self.cache, RadixCache) else None
        return EngineView(
            stats=self.stats(), requests=requests[:MAX_VIEW_REQUESTS], open_requests=len(requests), tree=tree
        )

    def close(self) -> None:
        self._compiling.close()
        self._mask_thread.shutdown()
        self.kv.close()
        self.backend.close()
        if self._draft is not None:
            self._draft.backend.close()

    def _rss(self) -> int:
        """Resident bytes of this process; 0 where the system has no /proc."""
        try:
            return int(Path("/proc/self/statm").read_text().split()[1]) * self._page_bytes
        except OSError:
            return 0

    def _start_busy_period(self) -> None:
        """Rates are of the time under load, so an idle hour before does not count."""
        self._last_progress = time.monotonic()
        self._logged = self.stats()

    def _log(self) -> None:
        now, before = self.stats(), self._logged
        seconds = now.last_progress - before.last_progress
        prompt = (now.prompt_tokens - before.prompt_tokens) / seconds
        generated = (now.generation_tokens - before.generation_tokens) / seconds
        logger.info(
            "prompt %.1f tok/s, generation %.1f tok/s, running %d, waiting %d, KV use %.1f %%, "
            "prefix hits %.1f %%",
            prompt,
            generated,
            now.running,
            now.waiting,
            100 * now.live_blocks / now.total_blocks,
            100 * now.cached_prompt_tokens / max(1, now.prompt_tokens),
        )
        self._logged = now
