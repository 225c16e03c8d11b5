"""What to compute next, and what came of it. Pure Python, no I/O, no clock: the same calls, the same result.

There is no prefill and no decode: a sequence has tokens computed and tokens known, and each step spends a
budget of tokens on the gaps. Answers that run go first; prompts share what is left of the budget, fairly
(`fairness`), and as much of it as leaves the answers their pace (`pacing`, from the measured costs of steps).
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping

from fourfold.engine.admission import Admission
from fourfold.engine.batch import Batch, StepResult
from fourfold.engine.batch_builder import Scheduled, build_batch
from fourfold.engine.cache import BlockTable, PrefixCache
from fourfold.engine.deadlines import Deadlines
from fourfold.engine.outcome import Counters, finish_event, hold, joined, token_event
from fourfold.engine.pacing import Pace
from fourfold.engine.planner import NO_DRAFTS, Planner
from fourfold.engine.policy import Limits, check_request, rank_of, retry_after
from fourfold.engine.recorder import Recorder
from fourfold.engine.seeds import Seeds
from fourfold.engine.sequence import Sequence, SequenceState
from fourfold.engine.speculate.draft import NO_DRAFT, Draft
from fourfold.engine.speculate.speculator import Speculator
from fourfold.engine.step_cost import StepCosts
from fourfold.errors import DeadlineError, InvalidRequestError, OverloadedError
from fourfold.grammar.guide import Guide
from fourfold.grammar.schema.validate import Violation
from fourfold.grammar.schema.walk import pointer
from fourfold.types import EngineEvent, EngineRequest, FinishReason


class Scheduler:
    """Call next_batch, run it, call commit (or fail), and again. Between the two, add and abort are allowed.

    Times are passed in: seconds of the clock that EngineRequest.arrival is of. Whoever passes none has
    requests without deadlines, and no measured costs.
    """

    def __init__(
        self,
        limits: Limits,
        cache: PrefixCache,
        seed: int = 0,
        pace: Pace | None = None,
        recorder: Recorder | None = None,
        speculator: Speculator | None = None,
    ) -> None:
        """recorder: writes what happens to each request down; it has the clock, and decides nothing.
        speculator: told what came of the drafts that next_batch is given."""
        self.limits = limits
        self.cache = cache
        self.recorder = recorder or Recorder()
        self._speculator = speculator
        self.counters = Counters()
        self._planner = Planner(limits, cache, pace or Pace(), self.counters)
        self._admission = Admission(self._planner)
        self._deadlines = Deadlines()
        self._seeds = Seeds(seed)
        self._ordinal = 0
        self._now = 0.0
        self._sequences: dict[str, Sequence] = {}
        self._plan: dict[Sequence, Scheduled] = {}
        self._orphans: list[EngineEvent] = []

    @property
    def costs(self) -> StepCosts:
        """What steps cost, as measured."""
        return self._planner.costs

    def recompute_seconds(self, context: int, tokens: int, rest: int) -> float:
        """See tiers.choice.Recompute."""
        costs, most = self.costs, self.limits.max_num_batched_tokens
        if not costs.known:
            return float("inf")
        if rest == 0:
            return costs.prompt_seconds(context, most, most) * tokens / most
        together = costs.prompt_seconds(context, tokens + rest, most)
        return together - costs.prompt_seconds(context + tokens, rest, most)

    @property
    def num_running(self) -> int:
        return len(self._planner.running)

    @property
    def num_waiting(self) -> int:
        return len(self._planner.waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._sequences or self._orphans)

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Ids of all requests that have not ended."""
        return tuple(self._sequences)

    def tables(self) -> list[BlockTable]:
        """Every table there is (for the integrity check)."""
        return [seq.table for seq in self._planner.running if seq.table is not None]

    def check(self, request: EngineRequest, pending: int = 0, now: float = 0.0) -> float | None:
        """Raises InvalidRequestError (never servable), OverloadedError (queue full) or DeadlineError (not in
        the time it allows). The seconds its first token will take, if it has a deadline and speeds are known.

        pending: requests that will be added and are not yet.
        """
        check_request(request, self.limits)
        if request.request_id in self._sequences:
            raise InvalidRequestError(f"request id {request.request_id!r} is already in use", "request_id")
        if len(self._planner.waiting) + pending >= self.limits.max_waiting:
            queued = sum(min(seq.work_left, self.limits.max_model_len) for seq in self._planner.waiting)
            raise OverloadedError(
                f"{len(self._planner.waiting) + pending} requests are waiting, the limit is "
                f"{self.limits.max_waiting}; try again later",
                retry_after(queued, self.costs.tokens_per_second(self.limits.max_num_batched_tokens)),
            )
        prompt = request.prompt_ids
        try:
            return self._admission.check(
                request,
                lambda: self.cache.known(array("i", prompt), request.cache_salt, len(prompt) - 1),
                now,
            )
        except DeadlineError:
            self.counters.refused += 1
            raise

    def add(self, request: EngineRequest, guide: Guide | None = None, now: float = 0.0) -> None:
        """Queues a request that passes `check`. guide: of its constraint."""
        predicted = self.check(request, now=now)
        seq = Sequence(
            request,
            rank_of(request, self._ordinal),
            self._seeds.of(request.sampling),
            self.limits.max_len,
            self.limits.vocab_size,
            guide,
            self.recorder.open(request),
        )
        seq.recording.queued(self.num_waiting)
        if predicted is not None:
            seq.predicted, seq.predicted_at = predicted, now
        self._ordinal += 1
        self._sequences[request.request_id] = seq
        self._deadlines.add(seq, now)
        self._deadlines.prune(len(self._sequences))
        self._planner.wait(seq)

    def abort(self, request_id: str) -> EngineEvent | None:
        """Ends a request and gives its blocks back at once; None if there is none of that id (any more)."""
        seq = self._sequences.get(request_id)
        if seq is None:
            return None
        self.counters.aborted += 1
        self._finish(seq, "abort")
        return finish_event(seq, "abort")

    def drawing(self) -> list[Sequence]:
        """The sequences that all draw in the next step; none if it computes much else, too, so that guesses
        would not pay."""
        return self._planner.drawing()

    def next_batch(self, drafts: Mapping[Sequence, Draft] = NO_DRAFTS, now: float = 0.0) -> Batch | None:
        """The next step's work, or None if there is nothing to compute. drafts: what may follow sequences; as
        much of it is computed as there is room for when all else was planned."""
        self._now = now
        self._expire()
        self._plan = self._planner.next(drafts)
        for seq, why in self._planner.unplaceable.items():
            # Nothing runs and it still does not fit: blocks are held from outside (pinned, or in transfer).
            self._orphans.append(self._fail(seq, why))
        batch = build_batch(self._plan.values()) if self._plan else None
        self.recorder.start_step()
        return batch

    def measured(self, seconds: float) -> None:
        """The step made last took so long, all in all."""
        if self._planner.tokens:
            self.costs.observe(self._planner.tokens, self._planner.work, seconds)

    def commit(self, batch: Batch, result: StepResult) -> list[EngineEvent]:
        """Takes the results (see check_result) of the batch made last. At most one event per sequence."""
        events = self.take_orphans()
        drawn: list[int] = result.token.tolist()
        bad = any(result.status.tolist())  # a reduction of NumPy's costs ten times as much between two steps
        ended_at = self.recorder.clock()
        for item in self._plan.values():
            seq = item.sequence
            if seq.state != SequenceState.RUNNING or seq.table is None:
                continue  # aborted while the batch ran
            rows = item.targets + item.samples
            if bad and (status := result.status[item.first_row : item.first_row + rows]).any():
                ended = self._fail_row(seq, finite=not (status == 1).any())
                events += [] if ended is None else [ended]
                continue
            seq.computed += item.count
            self.cache.insert(seq.table, seq.tokens, seq.computed)
            event = self._draw(item, batch, result, drawn, ended_at)
            if event is None:
                continue
            if event.finish_reason == "error":
                events.append(event)
                continue
            if not seq.delivered:
                seq.delivered = True
                if seq.predicted is not None:
                    self._admission.began(seq.predicted, self._now - seq.predicted_at)
                self.counters.prompt_tokens += seq.prompt_len
                self.counters.cached_prompt_tokens += seq.cached_tokens
            self.counters.generation_tokens += len(event.token_ids)
            self.counters.forced_tokens += event.forced_tokens
            if event.finish_reason is not None:
                self.counters.finished += 1
                self._admission.finished(seq)
                self._finish(seq, event.finish_reason)
            events.append(event)
        self._plan = {}
        return events

    def _draw(
        self, item: Scheduled, batch: Batch, result: StepResult, drawn: list[int], ended_at: float
    ) -> EngineEvent | None:
        """What the step, over at `ended_at`, brought for one sequence: a token, and another for each guess
        that was right."""
        seq, draft = item.sequence, item.draft
        if draft is NO_DRAFT and seq.guide is None:
            event = token_event(seq, item, drawn, result)
            seq.recording.computed(ended_at, item.count, 0 if event is None else len(event.token_ids))
            return event
        known = len(seq.tokens)
        whole: EngineEvent | None = None
        for i, place in enumerate(draft.places):
            if i and (
                len(seq.tokens) != known + place
                or list(seq.tokens[known:]) != list(draft.tokens[:place])
                or result.status[item.first_row + item.targets + i]  # the next step has that row for itself
            ):
                break
            if item.samples and seq.guide is not None and seq.guide.validates and batch.masks is not None:
                seq.guide.look(batch.masks.rows[item.first_mask + i])
            event = token_event(seq, item, drawn, result, i)
            produced, forced = (0, 0) if event is None else (len(event.token_ids), event.forced_tokens)
            if i:
                seq.recording.drew_more(produced, forced)
            else:
                computed = item.count + len(draft.tokens)
                seq.recording.computed(ended_at, computed, produced, forced)
            if event is not None and seq.guide is not None:
                event = self._guided(seq, seq.guide, event)
            if event is not None:
                whole = event if whole is None else joined(whole, event)
            if seq.state != SequenceState.RUNNING or (whole is not None and whole.finish_reason is not None):
                break
        if draft.tokens:
            self._settle(item, known, whole or seq.held)
        return whole

    def _settle(self, item: Scheduled, known: int, event: EngineEvent | None) -> None:
        """Keeps the KV of what the draft had right; what is behind it is written over by the next step.

        known: tokens of the sequence before its draws.  event: which tells of them."""
        seq, draft = item.sequence, item.draft
        same = draft.agrees(seq.tokens[known:])
        guesses, right = draft.guesses(len(draft.tokens)), draft.guesses(same)
        self.counters.draft_tokens += guesses
        self.counters.accepted_draft_tokens += right
        seq.recording.speculated(guesses, right)
        if event is not None:
            event.accepted_draft_tokens += right
            event.rejected_draft_tokens += guesses - right
        if self._speculator is not None:
            self._speculator.settle(seq, draft, right)
        if seq.state == SequenceState.RUNNING and seq.table is not None:
            seq.computed = min(known + same, len(seq.tokens) - 1)
            self.cache.insert(seq.table, seq.tokens, seq.computed)

    def _fail_row(self, seq: Sequence, *, finite: bool) -> EngineEvent | None:
        """A sequence whose row drew no token. None if it goes on, from another choice."""
        if not finite:
            self.counters.nan_requests += 1
            return self._fail(seq, "the model's output for this request was not finite (NaN or infinity)")
        guide = seq.guide
        if (
            guide is not None
            and guide.error is None
            and guide.validates
            and self._take_back(seq, guide, None)
        ):
            return None
        why = "no token is left: the constraint, min_tokens and logit_bias together allow none"
        if guide is not None and guide.error is not None:
            why = f"the constraint failed: {guide.error}"
        return self._fail(seq, why)

    def _guided(self, seq: Sequence, guide: Guide, event: EngineEvent) -> EngineEvent | None:
        """What may be sent of `event`: nothing while validation may still refuse the answer."""
        if guide.error is not None:
            return self._fail(seq, f"the constraint failed: {guide.error}")
        if not guide.validates:
            return event
        answer = seq.tokens[seq.prompt_len :]
        finished = event.finish_reason == "stop"
        if finished and (event.stop_token is not None or answer[-1] in seq.request.eos_ids):
            answer = answer[:-1]
        violation = None if event.finish_reason == "length" else guide.check(answer, finished=finished)
        if violation is not None:
            event.finish_reason = event.stop_token = None
            hold(seq, event)
            if self._take_back(seq, guide, violation):
                return None
            return self._fail(
                seq,
                f"no valid answer was found in {guide.rejections} attempts: the value at "
                f"{pointer(violation.path)} {violation.message}",
            )
        return hold(seq, event)

    # Before: running. After: waiting with a shorter answer, its full blocks cached, the others free.
    def _take_back(self, seq: Sequence, guide: Guide, violation: Violation | None) -> bool:
        """Goes back to another choice; False if there is none."""
        position = guide.take_back(seq.tokens[seq.prompt_len :], violation)
        if position is None:
            return False
        self.counters.rejected_answers += 1
        seq.recording.taken_back(seq.output_len - position)
        seq.cut(position, guide.rejections)
        self._planner.set_aside(seq)
        return True

    def fail(self, message: str) -> list[EngineEvent]:
        """The batch made last could not be computed: ends its requests, and only those, with an error."""
        events = self.take_orphans()
        for seq in self._plan:
            if seq.state == SequenceState.RUNNING:
                events.append(self._fail(seq, message))
        self._plan = {}
        return events

    def take_orphans(self) -> list[EngineEvent]:
        """Events that belong to no batch (requests that could not be placed)."""
        events, self._orphans = self._orphans, []
        return events

    def _expire(self) -> None:
        for seq, message in self._deadlines.passed(self._now):
            self.counters.timed_out += 1
            if seq.predicted is not None and not seq.delivered:
                self._admission.began(seq.predicted, self._now - seq.predicted_at)
            self._finish(seq, "error", message)
            event = finish_event(seq, "error", message)
            event.timed_out = True
            self._orphans.append(event)

    def _fail(self, seq: Sequence, message: str) -> EngineEvent:
        # What it computed is suspect, so nobody else may find it.
        self._finish(seq, "error", message, discard=True)
        self.counters.failed += 1
        return finish_event(seq, "error", message)

    def _finish(
        self, seq: Sequence, reason: FinishReason, error: str | None = None, *, discard: bool = False
    ) -> None:
        self.recorder.finish(seq.request.request_id, reason, error)
        self._planner.leave(seq, discard)
        if self._speculator is not None:
            self._speculator.ended(seq)
        del self._sequences[seq.request.request_id]
