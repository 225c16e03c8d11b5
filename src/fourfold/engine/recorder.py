"""Records each request's timeline while the engine runs it: bounded, and cheap enough to be always on.

What happens in every step (a decode) changes a few numbers of the newest entry; only what changes course
makes a new one. A finished timeline is kept as MessagePack: a few hundred bytes, nothing for the collector.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from fourfold.timeline import EventName, LiveRequest, State, Timeline, TimelineEvent, Totals
from fourfold.types import EngineRequest, FinishReason

MAX_EVENTS = 256
"""Entries of one timeline; beyond them only the newest is kept and the others of the middle are counted."""

MAX_FINISHED = 1024
"""Finished timelines kept."""

MAX_FINISHED_BYTES = 8 << 20
"""Their size together, encoded."""

Clock = Callable[[], float]


class Recording:
    """The open timeline of one sequence. All times are of the recorder's clock, in seconds."""

    __slots__ = (
        "_arrival",
        "_arrived",
        "_clock",
        "_dropped",
        "_events",
        "_first_token",
        "_last_token",
        "_open",
        "_recorder",
        "_step_started",
        "request_id",
        "state",
        "totals",
    )

    def __init__(self, recorder: Recorder, request: EngineRequest, now: float, wall: float) -> None:
        self.request_id = request.request_id
        self.state: State = "waiting"
        self.totals = Totals(prompt_tokens=len(request.prompt_ids))
        self._recorder = recorder
        self._clock = recorder.clock
        # A request made without a time, or by another machine's clock, arrives now.
        self._arrival = request.arrival if 0 < request.arrival <= now else now
        self._arrived = wall - (now - self._arrival)
        self._events: list[TimelineEvent] = []
        self._dropped = 0
        self._open: TimelineEvent | None = None
        """The newest entry, if what comes next may still belong to it."""
        self._first_token: float | None = None
        self._last_token = 0.0

    def compiling(self) -> None:
        """Its constraint is being compiled."""
        self.state = "compiling"
        self._open = self._add("compile", reason="compiling")

    def compiled(self, *, cached: bool = False) -> None:
        now = self._now()
        entry = self._open if self._open is not None and self._open.event == "compile" else None
        entry = entry or self._add("compile")
        entry.until, entry.reason = now, "cached" if cached else "compiled"

    def queued(self, ahead: int) -> None:
        """ahead: how many wait already."""
        self.state = "waiting"
        self._add("queued", tokens=self.totals.prompt_tokens, reason=f"{ahead} waiting" if ahead else "")

    def waits(self, reason: str) -> None:
        """The scheduler came to it in this step and could not take it."""
        self.state = "waiting"
        self._again("waiting", reason)

    def held(self) -> None:
        """It is cheaper to wait in this step for what a neighbour computes."""
        if self.state == "waiting":
            self.state = "held"
        self._again("held", "prefix_in_flight")

    def admitted(self, tokens: int, cached: int, tier: str = "ram") -> None:
        """It has a place and blocks. tokens: known ones; cached: how many of them need not be computed."""
        totals = self.totals
        entry = self._add("admitted", tokens=tokens, cached=cached, reason=tier if cached else "")
        if totals.queue_seconds is None:
            totals.queue_seconds = entry.at
        self._count_cached(cached, tier)
        self.state = "prefill"

    def cache_hit(self, tokens: int, tier: str = "ram") -> None:
        """`tokens` more came from the cache, after the admission."""
        if tokens > 0:
            self._add("cache_hit", cached=tokens, reason=tier)
            self._count_cached(tokens, tier)

    def recomputed(self, tokens: int, tier: str) -> None:
        """`tokens` that a lower tier has are computed all the same: that is faster."""
        if tokens > 0:
            self._add("recomputed", tokens=tokens, reason=tier)
            by_tier = self._recorder.recomputed_tokens
            by_tier[tier] = by_tier.get(tier, 0) + tokens

    def computed(self, now: float, tokens: int, produced: int, forced: int = 0) -> None:
        """A step that ended at `now` computed `tokens` of it and brought `produced` tokens of its answer,
        `forced` of them by its constraint."""
        totals = self.totals
        totals.steps += 1
        totals.computed_tokens += tokens
        at = now - self._arrival
        if self.state != "decode":
            started = max(self._recorder.step_started - self._arrival, self._newest)
            self._put(TimelineEvent(event="prefill", at=started, until=at, tokens=tokens))
            self._recorder.prefill_tokens += tokens
            self._open = None
            if not produced:
                return
            self.state = "decode"
        totals.generated_tokens += produced
        totals.forced_tokens += forced
        if self._first_token is None:
            self._first_token = at
            totals.prefill_seconds = at - (totals.queue_seconds or 0.0)
        entry = self._open
        if entry is None or entry.event != "decode":
            entry = TimelineEvent(event="decode", at=at, steps=0)
            self._put(entry)
            self._open = entry
        else:
            gap = at - self._last_token
            if gap > entry.slowest:
                entry.slowest = gap
        entry.steps += 1
        entry.tokens += produced
        entry.forced += forced
        entry.until = self._last_token = at

    def drew_more(self, produced: int, forced: int = 0) -> None:
        """The step just recorded brought more tokens: a draft was right."""
        self.totals.generated_tokens += produced
        self.totals.forced_tokens += forced
        if self._open is not None:
            self._open.tokens += produced
            self._open.forced += forced

    def speculated(self, drafted: int, accepted: int) -> None:
        """Of the step just recorded: so many tokens were drafted, and so many of them were right."""
        self.totals.drafted_tokens += drafted
        self.totals.accepted_tokens += accepted
        if self._open is not None:
            self._open.drafted += drafted
            self._open.accepted += accepted

    def preempted(self, tokens: int, reason: str) -> None:
        """It lost its place; `tokens` computed ones are to be found in the cache or computed again."""
        self.state = "waiting"
        self.totals.preemptions += 1
        by_reason = self._recorder.preemptions
        by_reason[reason] = by_reason.get(reason, 0) + 1
        self._add("preempted", tokens=tokens, reason=reason)

    def taken_back(self, tokens: int) -> None:
        """`tokens` of its answer were refused; it goes on before them."""
        self.state = "waiting"
        self.totals.taken_back_tokens += tokens
        self.totals.generated_tokens -= tokens
        self._add("taken_back", tokens=tokens, reason="validation")

    def snapshot(self) -> Timeline:
        """As it is now. Shares its entries with this object."""
        totals = self.totals
        if self._first_token is not None:
            totals.decode_seconds = self._last_token - self._first_token
        return Timeline(
            request_id=self.request_id,
            arrived=self._arrived,
            state=self.state,
            totals=totals,
            events=self._events,
            dropped=self._dropped,
        )

    def live(self, now: float) -> LiveRequest:
        totals, first = self.totals, self._first_token
        lasted = 0.0 if first is None else now - self._arrival - first
        return LiveRequest(
            request_id=self.request_id,
            state=self.state,
            age=now - self._arrival,
            prompt_tokens=totals.prompt_tokens,
            cached_tokens=totals.cached_tokens,
            computed_tokens=totals.computed_tokens,
            generated_tokens=totals.generated_tokens,
            preemptions=totals.preemptions,
            tokens_per_second=(totals.generated_tokens - 1) / lasted if lasted > 0 else 0.0,
        )

    def end(self, reason: FinishReason, error: str | None) -> Timeline:
        self.totals.total_seconds = self._add("finished", reason=reason).at
        self.state = "finished"
        timeline = self.snapshot()
        timeline.finish_reason, timeline.error = reason, error
        return timeline

    @property
    def _newest(self) -> float:
        """When the newest entry began or ended, whichever came later."""
        if not self._events:
            return 0.0
        entry = self._events[-1]
        return entry.at if entry.until is None else entry.until

    def _now(self) -> float:
        return self._clock() - self._arrival

    def _add(self, event: EventName, *, tokens: int = 0, cached: int = 0, reason: str = "") -> TimelineEvent:
        entry = TimelineEvent(event=event, at=self._now(), tokens=tokens, cached=cached, reason=reason)
        self._put(entry)
        self._open = None
        return entry

    def _again(self, event: EventName, reason: str) -> None:
        """Lengthens the newest entry if it is of the same kind; otherwise begins one."""
        entry = self._open
        if entry is not None and entry.event == event and entry.reason == reason:
            entry.steps += 1
            entry.until = self._now()
        else:
            self._open = self._add(event, reason=reason)

    def _put(self, entry: TimelineEvent) -> None:
        events = self._events
        if len(events) >= MAX_EVENTS:
            events.pop()
            self._dropped += 1
        events.append(entry)

    def _count_cached(self, tokens: int, tier: str) -> None:
        if tokens:
            by_tier = self._recorder.cached_tokens
            by_tier[tier] = by_tier.get(tier, 0) + tokens
        if self.totals.preemptions or self.totals.taken_back_tokens:
            self.totals.reused_tokens += tokens
        else:
            self.totals.cached_tokens += tokens


class Recorder:
    """All timelines of one engine: the open ones, and the last finished ones. Of one thread.

    clock: monotonic seconds, the same clock that EngineRequest.arrival is of. wall: seconds since 1970.
    """

    def __init__(self, clock: Clock = time.monotonic, wall: Clock = time.time) -> None:
        self.clock = clock
        self.step_started = clock()
        self.prefill_tokens = 0
        """Tokens computed so far that were known before, of prompts and after preemptions."""
        self.preemptions: dict[str, int] = {}
        """How many so far, by reason."""
        self.cached_tokens: dict[str, int] = {}
        """Tokens found in the cache so far, by tier, also after preemptions."""
        self.recomputed_tokens: dict[str, int] = {}
        """Tokens that were computed although a lower tier had them, by tier."""
        self._wall = wall
        self._open: dict[str, Recording] = {}
        self._finished: OrderedDict[str, bytes] = OrderedDict()
        self._bytes = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Timeline)

    def start_step(self) -> None:
        """A batch was planned and is computed from now on."""
        self.step_started = self.clock()

    def open(self, request: EngineRequest) -> Recording:
        """The recording of a request; begun if there is none yet."""
        recording = self._open.get(request.request_id)
        if recording is None:
            recording = Recording(self, request, self.clock(), self._wall())
            self._open[request.request_id] = recording
        return recording

    def finish(self, request_id: str, reason: FinishReason, error: str | None = None) -> None:
        """Closes a recording and keeps it as one of the last. Nothing happens if there is none."""
        recording = self._open.pop(request_id, None)
        if recording is None:
            return
        encoded = self._encoder.encode(recording.end(reason, error))
        self._bytes += len(encoded) - len(self._finished.pop(request_id, b""))
        self._finished[request_id] = encoded
        while len(self._finished) > MAX_FINISHED or self._bytes > MAX_FINISHED_BYTES:
            self._bytes -= len(self._finished.popitem(last=False)[1])

    def timeline(self, request_id: str) -> Timeline | None:
        """Of a request that is open or among the last finished; None of any other."""
        recording = self._open.get(request_id)
        encoded = self._finished.get(request_id)
        if recording is not None:
            encoded = self._encoder.encode(recording.snapshot())  # a copy, for the original goes on changing
        return None if encoded is None else self._decoder.decode(encoded)

    def live(self) -> list[LiveRequest]:
        """A line for each open request, in order of arrival in the engine."""
        now = self.clock()
        return [recording.live(now) for recording in self._open.values()]
