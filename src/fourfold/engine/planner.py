"""What one step computes: who runs, who joins, who gives way, and how many tokens of each.

Pure Python, no I/O, no clock. The scheduler calls it and knows what comes of it.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping
from operator import attrgetter

from fourfold.engine.batch_builder import Scheduled
from fourfold.engine.cache import BlockTable, PrefixCache
from fourfold.engine.fairness import FairOrder
from fourfold.engine.in_flight import InFlight
from fourfold.engine.outcome import Counters
from fourfold.engine.pacing import Answers, Pace
from fourfold.engine.places import displaced_by, last
from fourfold.engine.policy import MAX_HELD, Limits
from fourfold.engine.sequence import Sequence, SequenceState
from fourfold.engine.speculate.draft import Draft
from fourfold.engine.step_cost import StepCosts, span_work
from fourfold.engine.waiting import WaitingQueue

MAX_ANSWER_GAP = 64
"""Tokens of an answer (forced, drafted) that are computed in one step like its next token. A larger gap is
what a preemption left, and waits its turn like a prompt."""

MAX_GAP = 8
"""Tokens per sequence that a step may compute and still be one of drawing. Constraints force some."""
NO_DRAFTS: Mapping[Sequence, Draft] = {}

LOOK_AGAIN = 16
"""Steps after which a waiting request is looked up in the prefix cache again."""

_rank = attrgetter("rank")


class Planner:
    """Invariants: a WAITING sequence holds no blocks and is in `waiting`; a RUNNING one holds a table and is
    in `running`, which is sorted by rank. The first by `places` of the running sequences can always take
    blocks from the others, and no sequence may grow beyond the pool, so it always advances: there is no
    deadlock and no livelock.
    """

    def __init__(self, limits: Limits, cache: PrefixCache, pace: Pace, counters: Counters) -> None:
        self.limits = limits
        self.cache = cache
        self.pace = pace
        self.costs = StepCosts()
        self.fair = FairOrder()
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []
        self.plan: dict[Sequence, Scheduled] = {}
        self.tokens, self.work = 0, 0.0
        """Of the plan: tokens, and context that they read."""
        self.unplaceable: dict[Sequence, str] = {}
        """Waiting ones that found no room though nothing runs, and why."""
        self._counters = counters
        self._steps = 0
        self._budget = 0
        self._preempted = False
        self._in_flight = InFlight(limits.block_size)

    def next(self, drafts: Mapping[Sequence, Draft] = NO_DRAFTS) -> dict[Sequence, Scheduled]:
        """Plans a step. Answers that run go first; prompts share what is left; drafts take what is left
        then."""
        self.plan, self.unplaceable, self._in_flight = {}, {}, InFlight(self.limits.block_size)
        self._budget = self.limits.max_num_batched_tokens
        self._preempted = False
        self._steps += 1
        prefills: list[Sequence] = []
        answers: list[Sequence] = []
        for seq in self.running:
            gap = len(seq.tokens) - seq.computed
            answering = gap == 1 or (seq.computed >= seq.prompt_len and gap <= MAX_ANSWER_GAP)
            (answers if answering else prefills).append(seq)
        for index, seq in enumerate(answers):
            if seq.state == SequenceState.RUNNING:
                # Each of those behind gets one token at least.
                most = max(1, self._budget - (len(answers) - index - 1))
                self._schedule(seq, min(len(seq.tokens) - seq.computed, most))
        if prefills or self.waiting:
            self._fill(prefills, len(answers))
        for seq, draft in drafts.items():
            self._add_draft(seq, draft)
        self.tokens, self.work = self._size()
        return self.plan

    def drawing(self) -> list[Sequence]:
        """The sequences that all draw in the next step; none if it computes much else, too, so that guesses
        would not pay."""
        if self.waiting and len(self.running) < self.limits.max_seqs:
            return []
        gaps = sum(len(seq.tokens) - seq.computed for seq in self.running)
        if gaps > MAX_GAP * len(self.running) or gaps >= self.limits.max_num_batched_tokens:
            return []
        return [seq for seq in self.running if seq.wants_tokens]

    def wait(self, seq: Sequence) -> None:
        """`seq` joins the queue."""
        self.fair.entered(seq, self.waiting)
        self.waiting.add(seq)

    # Before: running, with a table. After: waiting, its full blocks cached, the others free.
    def set_aside(self, seq: Sequence) -> None:
        self.cache.release(table_of(seq))
        self.running.remove(seq)
        seq.table, seq.computed, seq.state, seq.preempted = None, 0, SequenceState.WAITING, True
        seq.patience = 0  # it had its turn already: nobody overtakes it
        self.wait(seq)

    # Before: running, with a table, or waiting. After: finished; its full blocks cached or (discard)
    # forgotten.
    def leave(self, seq: Sequence, discard: bool = False) -> None:
        if seq.state == SequenceState.RUNNING:
            self.cache.release(table_of(seq), discard)
            self.running.remove(seq)
        else:
            self.waiting.remove(seq)
            self.fair.left(seq, self.waiting)
        seq.table, seq.state = None, SequenceState.FINISHED

    def _fill(self, prefills: list[Sequence], count: int) -> None:
        """Spends what is left of the budget on prompts, running and waiting ones, as far as answers keep
        pace."""
        skipped: set[Sequence] = set()
        closed: set[str] = set()
        held = 0
        context = max((seq.computed for seq in prefills), default=0)
        whole = self._budget
        crowd = min(self.limits.max_seqs, len(self.running) + len(self.waiting)) - 1
        answers = Answers(count, crowd, *self._size())
        self._budget = self.pace.next_chunk(self.costs, answers, context, whole)
        while self._budget > 0:
            queue = self.waiting if not self._preempted and held <= MAX_HELD else None
            seq = self.fair.choose(prefills, queue, skipped, closed, self._need, self._budget)
            if seq is None:
                return
            if not skipped and seq.known[1] > context:
                # Its prefix is known, so what it computes reads more context than was thought.
                self._budget = self.pace.next_chunk(self.costs, answers, seq.known[1], whole)
            skipped.add(seq)
            if seq.state == SequenceState.RUNNING:
                self._schedule_prefill(seq)
            elif self._hold(None, seq):
                seq.recording.held()
                held += 1
            elif not self._admit(seq, prefills, behind=bool(closed)):
                closed.add(seq.tenant)
            planned = self.plan.get(seq)
            if planned is not None:
                overtaken = [each for each in prefills if each.state == SequenceState.RUNNING]
                if self.waiting.waits(seq.tenant):
                    overtaken += self.waiting.heads(seq.tenant)
                self.fair.overtake(seq, overtaken, planned.count)

    def _size(self) -> tuple[int, float]:
        tokens, work = 0, 0.0
        for item in self.plan.values():
            count = item.count + len(item.draft.tokens)
            tokens += count
            work += span_work(item.sequence.computed, count)
        return tokens, work

    def _need(self, seq: Sequence) -> int:
        """Tokens that a waiting sequence would have to compute, as of a few steps ago."""
        looked, known = seq.known
        if looked < 0 or self._steps - looked >= LOOK_AGAIN:
            known = self.cache.known(seq.tokens, seq.request.cache_salt, seq.reuse_limit)
            seq.known = (self._steps, known)
        return len(seq.tokens) - known

    def _schedule_prefill(self, seq: Sequence) -> None:
        table = table_of(seq)
        at_end = len(table.blocks) == table.shared  # a draft may have brought blocks in advance
        if at_end and seq.computed == table.shared * self.limits.block_size < seq.reuse_limit:
            said = table.declined
            gained = self.cache.extend(table, seq.tokens, seq.reuse_limit)
            if table.declined > said:
                seq.recording.recomputed(table.declined - max(said, seq.computed + gained), "host")
            for tier, restored in table.restored.items():
                self._reuse(seq, restored, tier)
                gained -= restored
            self._reuse(seq, gained)
            if self._hold(table, seq):
                seq.recording.held()
                return
            self._reuse(seq, self.cache.extend_in_block(table, seq.tokens, seq.reuse_limit))
        unknown = self.cache.next_unknown(table, seq.tokens, table.salt)
        if (
            self._schedule(seq, len(seq.tokens) - seq.computed)
            and unknown is not None
            and seq.prompt_logprobs is None
        ):
            self._in_flight.add(unknown)

    def _reuse(self, seq: Sequence, gained: int, tier: str = "ram") -> None:
        seq.computed += gained
        if not seq.preempted:
            seq.cached_tokens += gained
        self.fair.found(seq)
        seq.recording.cache_hit(gained, tier)

    def _hold(self, table: BlockTable | None, seq: Sequence) -> bool:
        """True if another sequence computes what this one needs next in this step: cheaper to wait."""
        if not self._in_flight:
            return False
        unknown = self.cache.next_unknown(table, seq.tokens[: seq.reuse_limit], seq.request.cache_salt)
        return self._in_flight.worth_waiting(unknown, len(seq.tokens))

    def _schedule(self, seq: Sequence, wanted: int) -> bool:
        """Plans up to `wanted` tokens of a running sequence, preempting others that stand behind it for its
        blocks if it must. False if the sequence had to give way itself."""
        table = table_of(seq)
        size = self.limits.block_size
        while True:
            count = min(wanted, self._budget)
            held = len(table.blocks)
            missing = -(-(seq.computed + count) // size) - held
            if missing > 0:
                # A chunk takes what there is; only a sequence that could not advance at all displaces others.
                missing = min(missing, self.cache.ledger.available)
                count = min(count, (held + missing) * size - seq.computed)
            if count > 0 and (missing <= 0 or self.cache.allocate(table, missing)):
                self.plan[seq] = Scheduled(seq, count)
                self._budget -= count
                self.fair.charge(seq, count)
                return True
            victim = last(self.running)
            self._preempt(victim, "kv_blocks")
            if victim is seq:
                return False

    def _add_draft(self, seq: Sequence, draft: Draft) -> None:
        """Adds what there is room for to the sequence's share of the step; displaces nobody for it."""
        item = self.plan.get(seq)
        if item is None or seq.computed + item.count != len(seq.tokens):
            return
        table = table_of(seq)
        size, end = self.limits.block_size, len(seq.tokens)
        room = (len(table.blocks) + self.cache.ledger.available) * size - end
        draft = draft.cut(min(self._budget, room))
        missing = -(-(end + len(draft.tokens)) // size) - len(table.blocks)
        if missing <= 0 or self.cache.allocate(table, missing):
            item.draft = draft
            self._budget -= len(draft.tokens)

    def _admit(self, seq: Sequence, prefills: list[Sequence], *, behind: bool) -> bool:
        """Gives a waiting sequence a place and its first chunk. False if there is no room for it.

        prefills: the running ones; a newcomer joins them.  behind: others came to it first in this step and
            found no room, so this one may only take what it displaces.
        """
        if behind and not self._displace(seq, "behind"):
            return False
        while True:
            if len(self.running) >= self.limits.max_seqs:
                if not self._displace(seq, "max_num_seqs"):
                    return False
                continue
            if not self._keeps_pace(seq):
                if not self._displace(seq, "itl_target"):
                    return False
                continue
            table = self.cache.match(seq.tokens, seq.request.cache_salt, seq.reuse_limit)
            matched = len(table.blocks) * self.limits.block_size
            missing = self._lacking(seq, table)
            # One block of reserve per running sequence, or the newcomer would soon be thrown out again, and
            # what the prompts lack that are being computed.
            owed = len(self.running) + sum(
                self._lacking(each, table_of(each)) for each in prefills if each.table is not None
            )
            if missing + owed <= self.cache.ledger.available:
                break
            self.cache.release(table)
            if not self.running:
                self.unplaceable[seq] = (
                    f"{missing} KV blocks are needed, but only {self.cache.ledger.available} of "
                    f"{self.limits.num_blocks} can be freed"
                )
                return True
            if not self._displace(seq, "kv_blocks"):
                return False
        self.waiting.remove(seq)
        self.fair.left(seq, self.waiting)
        seq.table, seq.computed, seq.state = table, matched, SequenceState.RUNNING
        if not seq.preempted:
            seq.cached_tokens = matched
        self.fair.found(seq)
        seq.recording.admitted(len(seq.tokens), matched)
        insort(self.running, seq, key=_rank)
        prefills.append(seq)
        self._schedule_prefill(seq)
        return True

    def _lacking(self, seq: Sequence, table: BlockTable) -> int:
        """Blocks that a sequence needs for the tokens it has, beyond those of `table`."""
        return max(0, -(-len(seq.tokens) // self.limits.block_size) - len(table.blocks))

    def _keeps_pace(self, seq: Sequence) -> bool:
        """Whether one more answer leaves the others the pace they were promised."""
        if self.pace.itl_target is None or not self.running:
            return True
        work = sum(len(each.tokens) for each in self.running) + len(seq.tokens)
        return self.pace.allows(self.costs, len(self.running) + 1, work)

    def _displace(self, seq: Sequence, lacking: str) -> bool:
        """Preempts a running sequence that has to give its place to `seq`, if there is one.

        lacking: why it has no room otherwise (see timeline.REASONS).
        """
        victim = displaced_by(seq, self.running, self.fair.tenants.of)
        if victim is None:
            seq.recording.waits(lacking)
            return False
        better = victim.tenant == seq.tenant and victim.request.priority > seq.request.priority
        self._preempt(victim, "priority" if better else "fairness")
        return True

    def _preempt(self, seq: Sequence, reason: str) -> None:
        seq.recording.preempted(seq.computed, reason)
        planned = self.plan.pop(seq, None)
        if planned is not None:
            self._budget += planned.count
            self.fair.refund(seq)
        self.set_aside(seq)
        self._preempted = True
        self._counters.preemptions += 1


def table_of(seq: Sequence) -> BlockTable:
    """Raises RuntimeError if the sequence holds no blocks."""
    if seq.table is None:
        raise RuntimeError(f"sequence {seq.request.request_id} is running without blocks")
    return seq.table
