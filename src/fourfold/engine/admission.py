"""Whether a request can be answered in time, from measured speed: who cannot is told at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from fourfold.engine.pacing import Answers
from fourfold.engine.planner import Planner
from fourfold.engine.sequence import Sequence
from fourfold.engine.step_cost import span_work
from fourfold.engine.waiting import WaitingQueue
from fourfold.errors import DeadlineError
from fourfold.types import EngineRequest

MEMORY = 1 / 16
"""Share of a new observation in running means."""

QUANTILE = 0.95
"""Share of first tokens that come within their prediction."""

CORRECTION_STEP = 0.1
"""How fast predictions are corrected."""

NOTABLE = 0.05
"""Seconds of a predicted wait below which it teaches nothing: noise of single steps."""

MOST_CORRECTION = 4.0
"""Factor by which predictions are corrected at most, up or down."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """Seconds from now until a request's first token, and until its end."""

    first_token: float
    end: float


class Admission:
    """Predicts, and learns from what came: how much of max_tokens answers use, and how wrong predictions
    are."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self._limits, self._costs, self._pace = planner.limits, planner.costs, planner.pace
        self.answer_share = 1.0
        """Part of max_tokens that answers had lately. 1 until one was seen: the careful side."""
        self.correction = 1.0
        """What predicted times to the first token are multiplied by, so that QUANTILE of them are kept."""

    def finished(self, seq: Sequence) -> None:
        """An answer ended by itself."""
        share = seq.output_len / max(1, seq.max_total - seq.prompt_len)
        self.answer_share += MEMORY * (share - self.answer_share)

    def began(self, predicted: float, waited: float) -> None:
        """A first token came `waited` seconds after it was predicted to take `predicted`."""
        if predicted >= NOTABLE:
            # Predictions have the correction in them already. At overload those accepted are just in time, so
            # a mean would make half of them late: the quantile is what counts.
            up = QUANTILE if waited > predicted else QUANTILE - 1
            self.correction *= 1 + CORRECTION_STEP * up
            self.correction = min(MOST_CORRECTION, max(1 / MOST_CORRECTION, self.correction))

    def check(
        self,
        request: EngineRequest,
        known: Callable[[], int],
        now: float,
    ) -> float | None:
        """Predicted seconds to the first token; None if nothing is known or nobody asks.

        known: gives the tokens of its prompt that are in the cache.
        Raises DeadlineError if it cannot be in time.
        """
        if request.timeout is None and request.ttft_timeout is None:
            return None
        spent = max(0.0, now - request.arrival) if request.arrival else 0.0
        for name, limit in (("timeout", request.timeout), ("ttft_timeout", request.ttft_timeout)):
            if limit is not None and spent >= limit:
                raise DeadlineError(
                    f"{name} is {limit:g} s, and {spent:.1f} s had passed before the engine could take the "
                    "request; try again later",
                    1.0,
                )
        if not self._costs.known:
            return None
        outlook = self.outlook(request, known())
        for name, limit, needed, what in (
            ("ttft_timeout", request.ttft_timeout, outlook.first_token, "the first token"),
            ("timeout", request.timeout, outlook.end, "the whole answer"),
        ):
            if limit is not None and spent + needed > limit:
                raise DeadlineError(
                    f"{name} is {limit:g} s, but {what} would take about {spent + needed:.1f} s at the "
                    f"present load ({len(self._planner.running)} requests run, "
                    f"{len(self._planner.waiting)} wait); try again later, or allow more time",
                    min(60.0, max(1.0, spent + needed - limit)),
                )
        return outlook.first_token

    def outlook(self, request: EngineRequest, known: int) -> Outlook:
        """For a request that would join the queue now. known: tokens of its prompt in the cache."""
        running, queue = self._planner.running, self._planner.waiting
        costs, pace, limits = self._costs, self._pace, self._limits
        own = max(1, len(request.prompt_ids) - known)
        answer = self._expected_answer(request)
        ahead, waiting_ahead = _ahead(request, queue, own)
        prefills = [seq for seq in running if seq.computed < seq.prompt_len]
        ahead += sum(len(seq.tokens) - seq.computed for seq in prefills)
        # Those ahead will answer by the time this one is computed: about half of them on average.
        answers = len(running) - len(prefills)
        slots = self._slots(request, running, answer)
        answers = max(answers, min(slots, len(running) + waiting_ahead) // 2)
        length = (
            sum(len(seq.tokens) for seq in running) / len(running) if running else len(request.prompt_ids)
        )
        work = answers * length
        crowd = min(slots, len(running) + waiting_ahead + 1) - 1
        most = limits.max_num_batched_tokens - answers
        chunk = pace.chunk(costs, Answers(answers, crowd, answers, work), own // 2, most)
        chunk = max(1, min(chunk, ahead + own))
        mixed = costs.seconds(answers + chunk, work + span_work(own // 2, chunk))
        left = sorted(
            self._tokens_left(seq) + max(0, seq.prompt_len - seq.computed) / chunk for seq in running
        )
        to_compute = math.ceil((ahead + own) / chunk) * mixed
        place = waiting_ahead + 1 - max(0, slots - len(running))
        if place > 0 and left:
            # A place is taken for a prompt and an answer.
            rounds, number = divmod(place - 1, len(left))
            tokens = left[number] + rounds * (answer + own / chunk)
            to_compute = max(to_compute, tokens * mixed + math.ceil(own / chunk) * mixed)
        first = to_compute * self.correction
        pace_then = mixed if ahead else costs.seconds(answers + 1, work + len(request.prompt_ids))
        return Outlook(first, first + max(0.0, answer - 1) * pace_then)

    def _expected_answer(self, request: EngineRequest) -> float:
        room = self._limits.max_len - len(request.prompt_ids)
        wanted = request.sampling.max_tokens
        return max(1.0, self.answer_share * (room if wanted is None else min(room, wanted)))

    def _tokens_left(self, seq: Sequence) -> float:
        expected = self.answer_share * (seq.max_total - seq.prompt_len) - seq.output_len
        return max(1.0, min(expected, seq.max_total - len(seq.tokens)))

    def _slots(self, request: EngineRequest, running: list[Sequence], answer: float) -> int:
        """Sequences that can run at a time: by the limit, by what the KV pool holds, and by the pace."""
        lengths = [len(seq.tokens) + self._tokens_left(seq) for seq in running]
        lengths.append(len(request.prompt_ids) + answer)
        pool = self._limits.num_blocks * self._limits.block_size
        slots = min(self._limits.max_seqs, int(pool * len(lengths) / sum(lengths)))
        length = sum(lengths) / len(lengths)
        while slots > 1 and not self._pace.allows(self._costs, slots, slots * length):
            slots -= 1
        return max(1, slots)


def _ahead(request: EngineRequest, queue: WaitingQueue, own: int) -> tuple[int, int]:
    """(tokens, requests) that are computed before a newcomer: of its tenant those that are not of worse
    priority, and of every other tenant as much as its own tenant gets meanwhile."""
    tenant, weight = request.tenant, request.weight
    line = [seq for seq in queue.line(tenant) if seq.request.priority <= request.priority]
    tokens = sum(len(seq.tokens) for seq in line)
    number = len(line)
    share = (tokens + own) / weight
    for other in queue.tenants():
        if other != tenant:
            theirs = list(queue.line(other))
            size = sum(len(seq.tokens) for seq in theirs)
            part = min(1.0, share * theirs[0].request.weight / size)
            tokens += int(part * size)
            number += math.ceil(part * len(theirs))
    return tokens, number
