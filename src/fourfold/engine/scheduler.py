"""What to compute next, and what came of it. Pure Python, no I/O, no clock: the same calls, the same result.

There is no prefill and no decode: a sequence has tokens computed and tokens known, and each step spends a
budget of tokens on the gaps. Gaps of one token go first, so a long prompt never makes a running answer wait.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping
from operator import attrgetter

from fourfold.engine.batch import Batch, StepResult
from fourfold.engine.batch_builder import Scheduled, build_batch
from fourfold.engine.cache import BlockTable, PrefixCache
from fourfold.engine.cache.table import BlockName
from fourfold.engine.outcome import Counters, finish_event, hold, joined, token_event
from fourfold.engine.policy import MAX_HELD, Limits, check_request, rank_of, retry_after
from fourfold.engine.recorder import Recorder
from fourfold.engine.sequence import Sequence, SequenceState
from fourfold.engine.speculate.draft import Draft
from fourfold.engine.speculate.speculator import Speculator
from fourfold.errors import InvalidRequestError, OverloadedError
from fourfold.grammar.guide import Guide
from fourfold.grammar.schema.validate import Violation
from fourfold.grammar.schema.walk import pointer
from fourfold.types import EngineEvent, EngineRequest, FinishReason

_rank = attrgetter("rank")
_MASK64 = 2**64 - 1
MAX_GAP = 8
"""Tokens per sequence that a step may compute and still be one of drawing. Constraints force some."""
NO_DRAFTS: Mapping[Sequence, Draft] = {}


class Scheduler:
    """Call next_batch, run it, call commit (or fail), and again. Between the two, add and abort are allowed.

    Invariants: a WAITING sequence holds no blocks; a RUNNING one holds a table; `_waiting` and `_running` are
    sorted by rank. The best-ranked running sequence can always take blocks from the others, and no sequence
    may grow beyond the pool, so it always advances: there is no deadlock and no livelock.
    """

    def __init__(
        self,
        limits: Limits,
        cache: PrefixCache,
        seed: int = 0,
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
        self.tokens_per_second = 0.0
        """Measured by the loop; only tells refused clients when to come back."""
        self._base_seed = seed
        self._ordinal = 0
        self._unseeded = 0
        self._sequences: dict[str, Sequence] = {}
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._plan: dict[Sequence, Scheduled] = {}
        self._budget = 0
        self._preempted = False
        self._orphans: list[EngineEvent] = []

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._sequences or self._orphans)

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Ids of all requests that have not ended."""
        return tuple(self._sequences)

    def tables(self) -> list[BlockTable]:
        """Every table there is (for the integrity check)."""
        return [seq.table for seq in self._running if seq.table is not None]

    def check(self, request: EngineRequest, pending: int = 0) -> None:
        """Raises InvalidRequestError (never servable) or OverloadedError (queue full).

        pending: requests that will be added and are not yet.
        """
        check_request(request, self.limits)
        if request.request_id in self._sequences:
            raise InvalidRequestError(f"request id {request.request_id!r} is already in use", "request_id")
        if len(self._waiting) + pending >= self.limits.max_waiting:
            queued = sum(min(seq.work_left, self.limits.max_model_len) for seq in self._waiting)
            raise OverloadedError(
                f"{len(self._waiting) + pending} requests are waiting, the limit is "
                f"{self.limits.max_waiting}; try again later",
                retry_after(queued, self.tokens_per_second),
            )

    def add(self, request: EngineRequest, guide: Guide | None = None) -> None:
        """Queues a request that passes `check`. guide: of its constraint."""
        self.check(request)
        seq = Sequence(
            request,
            rank_of(request, self._ordinal),
            self._seed_of(request),
            self.limits.max_len,
            self.limits.vocab_size,
            guide,
            self.recorder.open(request),
        )
        seq.recording.queued(self.num_waiting)
        self._ordinal += 1
        self._sequences[request.request_id] = seq
        insort(self._waiting, seq, key=_rank)

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
        if self._waiting and len(self._running) < self.limits.max_seqs:
            return []
        gaps = sum(len(seq.tokens) - seq.computed for seq in self._running)
        if gaps > MAX_GAP * len(self._running) or gaps >= self.limits.max_num_batched_tokens:
            return []
        return [seq for seq in self._running if seq.wants_tokens]

    def next_batch(self, drafts: Mapping[Sequence, Draft] = NO_DRAFTS) -> Batch | None:
        """The next step's work, or None if there is nothing to compute. drafts: what may follow sequences; as
        much of it is computed as there is room for when all else was planned."""
        self._plan = {}
        self._budget = self.limits.max_num_batched_tokens
        self._preempted = False
        in_flight: set[BlockName] = set()
        prefills = []
        for seq in self._running.copy():
            if len(seq.tokens) - seq.computed > 1:
                prefills.append(seq)
            elif seq.state == SequenceState.RUNNING:
                self._schedule(seq, 1)
        for seq in prefills:
            if self._budget == 0:
                break
            if seq.state == SequenceState.RUNNING:
                self._schedule_prefill(seq, in_flight)
        if self._budget > 0 and not self._preempted and self._waiting:
            self._admit(in_flight)
        for seq, draft in drafts.items():
            self._add_draft(seq, draft)
        batch = build_batch(self._plan.values()) if self._plan else None
        self.recorder.start_step()
        return batch

    def commit(self, batch: Batch, result: StepResult) -> list[EngineEvent]:
        """Takes the results (see check_result) of the batch made last. At most one event per sequence."""
        events = self.take_orphans()
        drawn: list[int] = result.token.tolist()
        bad = bool(result.status.any())
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
            event = self._draw(item, batch, result, drawn)
            if event is None:
                continue
            if event.finish_reason == "error":
                events.append(event)
                continue
            if not seq.delivered:
                seq.delivered = True
                self.counters.prompt_tokens += seq.prompt_len
                self.counters.cached_prompt_tokens += seq.cached_tokens
            self.counters.generation_tokens += len(event.token_ids)
            self.counters.forced_tokens += event.forced_tokens
            if event.finish_reason is not None:
                self.counters.finished += 1
                self._finish(seq, event.finish_reason)
            events.append(event)
        self._plan = {}
        return events

    def _draw(
        self, item: Scheduled, batch: Batch, result: StepResult, drawn: list[int]
    ) -> EngineEvent | None:
        """What the step brought for one sequence: a token, and another for each guess that was right."""
        seq, draft = item.sequence, item.draft
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
                seq.recording.computed(self.recorder.clock(), computed, produced, forced)
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
            and guide.rejections
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
        self._set_aside(seq)
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

    def _seed_of(self, request: EngineRequest) -> int:
        if request.sampling.seed is not None:
            return request.sampling.seed & _MASK64
        # SplitMix64 (Steele et al. 2014) of a counter of its own: requests with a seed do not advance it.
        self._unseeded += 1
        z = (self._base_seed + self._unseeded * 0x9E3779B97F4A7C15) & _MASK64
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
        return z ^ (z >> 31)

    def _schedule_prefill(self, seq: Sequence, in_flight: set[BlockName]) -> None:
        table = self._table(seq)
        at_end = len(table.blocks) == table.shared  # a draft may have brought blocks in advance
        if at_end and seq.computed == table.shared * self.limits.block_size < seq.reuse_limit:
            gained = self.cache.extend(table, seq.tokens, seq.reuse_limit)
            seq.computed += gained
            if not seq.preempted:
                seq.cached_tokens += gained
            seq.recording.cache_hit(gained)
            if self._hold(table, seq, in_flight):
                seq.recording.held()
                return
        name = self.cache.next_key(table, seq.tokens, table.salt)
        if (
            self._schedule(seq, len(seq.tokens) - seq.computed)
            and name is not None
            and seq.prompt_logprobs is None
        ):
            in_flight.add(name)

    def _hold(self, table: BlockTable | None, seq: Sequence, in_flight: set[BlockName]) -> bool:
        """True if another sequence computes this one's next block in this step: cheaper to wait."""
        if not in_flight or seq.reuse_limit < self.limits.block_size:
            return False
        name = self.cache.next_key(table, seq.tokens[: seq.reuse_limit], seq.request.cache_salt)
        return name is not None and name in in_flight

    def _schedule(self, seq: Sequence, wanted: int) -> bool:
        """Plans up to `wanted` tokens of a running sequence, preempting worse-ranked ones for its blocks if
        it must. False if the sequence had to give way itself."""
        table = self._table(seq)
        size = self.limits.block_size
        while True:
            count = min(wanted, self._budget)
            held = len(table.blocks)
            # A chunk takes what there is; only a sequence that could not advance at all displaces others.
            count = min(count, (held + self.cache.ledger.available) * size - seq.computed)
            if count > 0:
                missing = -(-(seq.computed + count) // size) - held
                if missing <= 0 or self.cache.allocate(table, missing):
                    self._plan[seq] = Scheduled(seq, count)
                    self._budget -= count
                    return True
            victim = self._running[-1]
            self._preempt(victim, "kv_blocks")
            if victim is seq:
                return False

    def _add_draft(self, seq: Sequence, draft: Draft) -> None:
        """Adds what there is room for to the sequence's share of the step; displaces nobody for it."""
        item = self._plan.get(seq)
        if item is None or seq.computed + item.count != len(seq.tokens):
            return
        table = self._table(seq)
        size, end = self.limits.block_size, len(seq.tokens)
        room = (len(table.blocks) + self.cache.ledger.available) * size - end
        draft = draft.cut(min(self._budget, room))
        missing = -(-(end + len(draft.tokens)) // size) - len(table.blocks)
        if missing <= 0 or self.cache.allocate(table, missing):
            item.draft = draft
            self._budget -= len(draft.tokens)

    def _admit(self, in_flight: set[BlockName]) -> None:
        index = 0
        while index < len(self._waiting) and index <= MAX_HELD and self._budget > 0:
            seq = self._waiting[index]
            if self._hold(None, seq, in_flight):
                seq.recording.held()
                index += 1
                continue
            if len(self._running) >= self.limits.max_seqs and not self._displace(seq):
                seq.recording.waits("max_num_seqs")
                return
            table = self.cache.match(seq.tokens, seq.request.cache_salt, seq.reuse_limit)
            matched = len(table.blocks) * self.limits.block_size
            missing = -(-len(seq.tokens) // self.limits.block_size) - len(table.blocks)
            # One block of reserve per running sequence, or the newcomer would soon be thrown out again.
            if missing + len(self._running) > self.cache.ledger.available:
                self.cache.release(table)
                if self._displace(seq):
                    continue
                if not self._running:
                    self._refuse(seq, missing)
                    continue
                seq.recording.waits("kv_blocks")
                return
            del self._waiting[index]
            seq.table, seq.computed, seq.state = table, matched, SequenceState.RUNNING
            if not seq.preempted:
                seq.cached_tokens = matched
            seq.recording.admitted(len(seq.tokens), matched)
            insort(self._running, seq, key=_rank)
            self._schedule_prefill(seq, in_flight)
            if self._preempted:
                return

    def _displace(self, seq: Sequence) -> bool:
        """Preempts the worst running sequence if its priority is strictly worse (arrival does not count)."""
        if not self._running or self._running[-1].request.priority <= seq.request.priority:
            return False
        self._preempt(self._running[-1], "priority")
        return True

    # Before: running, with a table. After: waiting, its full blocks cached, the others free.
    def _preempt(self, seq: Sequence, reason: str) -> None:
        seq.recording.preempted(seq.computed, reason)
        planned = self._plan.pop(seq, None)
        if planned is not None:
            self._budget += planned.count
        self._set_aside(seq)
        self._preempted = True
        self.counters.preemptions += 1

    def _set_aside(self, seq: Sequence) -> None:
        self.cache.release(self._table(seq))
        self._running.remove(seq)
        seq.table, seq.computed, seq.state, seq.preempted = None, 0, SequenceState.WAITING, True
        insort(self._waiting, seq, key=_rank)

    def _refuse(self, seq: Sequence, missing: int) -> None:
        """Nothing runs and it still does not fit: blocks are held from outside (pinned, or in transfer)."""
        available = self.cache.ledger.available
        message = (
            f"{missing} KV blocks are needed, but only {available} of {self.limits.num_blocks} can be freed"
        )
        self._orphans.append(self._fail(seq, message))

    def _fail(self, seq: Sequence, message: str) -> EngineEvent:
        # What it computed is suspect, so nobody else may find it.
        self._finish(seq, "error", message, discard=True)
        self.counters.failed += 1
        return finish_event(seq, "error", message)

    def _finish(
        self, seq: Sequence, reason: FinishReason, error: str | None = None, *, discard: bool = False
    ) -> None:
        self.recorder.finish(seq.request.request_id, reason, error)
        if seq.state == SequenceState.RUNNING:
            self.cache.release(self._table(seq), discard)
            self._running.remove(seq)
        else:
            self._waiting.remove(seq)
        seq.table, seq.state = None, SequenceState.FINISHED
        if self._speculator is not None:
            self._speculator.ended(seq)
        del self._sequences[seq.request.request_id]

    @staticmethod
    def _table(seq: Sequence) -> BlockTable:
        if seq.table is None:
            raise RuntimeError(f"sequence {seq.request.request_id} is running without blocks")
        return seq.table
