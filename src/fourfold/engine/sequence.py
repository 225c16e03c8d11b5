"""One request inside the scheduler: its tokens, how many are computed, and how its next token is chosen."""

from __future__ import annotations

from array import array
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

from fourfold.engine.batch import SAMPLE_DTYPE
from fourfold.engine.cache.table import BlockTable
from fourfold.engine.policy import Rank
from fourfold.engine.recorder import Recording
from fourfold.types import EngineEvent, EngineRequest, SamplingParams, TokenLogprob

if TYPE_CHECKING:
    from fourfold.grammar.guide import Guide


class SequenceState(IntEnum):
    WAITING = 0
    """Holds no blocks."""
    RUNNING = 1
    """Has a table and is advanced by every step."""
    FINISHED = 2


class Sequence:
    """tokens: prompt, then output. computed: how many of them have KV. The gap between is the work to do.

    After a preemption computed is 0 again and the output stays in `tokens`: computing those anew is the same
    work as a prompt's, so there is no special case for resumption.
    """

    __slots__ = (
        "ban_ids",
        "bias_ids",
        "bias_values",
        "cached_tokens",
        "charged",
        "computed",
        "delivered",
        "guide",
        "held",
        "known",
        "last_charge",
        "max_total",
        "min_tokens",
        "patched",
        "patience",
        "penalized",
        "predicted",
        "predicted_at",
        "prediction",
        "preempted",
        "prompt_len",
        "prompt_logprobs",
        "rank",
        "record",
        "recording",
        "request",
        "state",
        "stop_ids",
        "table",
        "tenant",
        "tokens",
        "user",
        "wants_tokens",
    )  # fmt: skip

    def __init__(
        self,
        request: EngineRequest,
        rank: Rank,
        seed: int,
        max_len: int,
        vocab_size: int,
        guide: Guide | None,
        recording: Recording,
    ) -> None:
        """guide: of request.constraint.  recording: its timeline."""
        sampling = request.sampling
        self.guide = guide
        self.recording = recording
        self.held: EngineEvent | None = None
        """What was not sent yet, because validation may still take it back."""
        self.request = request
        self.rank = rank
        self.state = SequenceState.WAITING
        self.tokens: array[int] = array("i", request.prompt_ids)
        self.prompt_len = len(self.tokens)
        self.computed = 0
        self.table: BlockTable | None = None
        self.tenant, self.user = request.tenant, request.user
        self.charged = 0
        """Tokens that its tenant was charged for, or got from the cache."""
        self.last_charge = (0.0, 0)
        """(service, charged before) of the step that was planned last."""
        self.patience = self.prompt_len
        """Tokens by which others of its user may still overtake it."""
        self.known = (-1, 0)
        """(when it was looked up, tokens of it that are in the cache) while it waits."""
        self.predicted: float | None = None
        """Seconds that the first token was expected to take, as of predicted_at."""
        self.predicted_at = 0.0
        self.cached_tokens = 0
        self.preempted = False
        self.delivered = False
        """True once an event was made: the first one carries cached_tokens and prompt_logprobs."""
        self.wants_tokens = sampling.max_tokens != 0
        room = max_len - self.prompt_len
        self.max_total = self.prompt_len + (
            room if sampling.max_tokens is None else min(room, sampling.max_tokens)
        )
        stops = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stops.update(request.eos_ids)
        self.stop_ids = frozenset(stops)
        self.min_tokens = sampling.min_tokens
        self.ban_ids: array[int] = array(
            "i", sorted(t for t in stops if t < vocab_size) if sampling.min_tokens else ()
        )
        self.bias_ids: array[int] = array("i", sampling.logit_bias)
        self.bias_values: array[float] = array("f", sampling.logit_bias.values())
        self.penalized = (
            sampling.repetition_penalty != 1
            or sampling.presence_penalty != 0
            or sampling.frequency_penalty != 0
        )
        self.prompt_logprobs: list[TokenLogprob | None] | None = (
            None if sampling.prompt_logprobs is None else [None]
        )
        self.prediction: array[int] | None = (
            array("i", request.prediction_ids) if request.prediction_ids else None
        )
        self.patched = bool(self.penalized or self.bias_ids or self.ban_ids)
        """True if the record points into arrays of the batch, which move from step to step."""
        self.record = _record(sampling, seed, min(request.allowed_vocab or vocab_size, vocab_size))

    def cut(self, answer_tokens: int, seed_change: int) -> None:
        """Takes the answer back to its first `answer_tokens` tokens; other draws follow from there."""
        del self.tokens[self.prompt_len + answer_tokens :]
        record = np.frombuffer(self.record, SAMPLE_DTYPE).copy()
        record["seed"] ^= np.uint64(seed_change)
        self.record = record.tobytes()
        if self.held is not None:
            held = self.held
            held.token_ids = held.token_ids[:answer_tokens]
            held.forced_tokens = min(held.forced_tokens, answer_tokens)
            held.logprobs = None if held.logprobs is None else held.logprobs[:answer_tokens]

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def reuse_limit(self) -> int:
        """Most tokens that may come from the prefix cache: one must be computed to have logits, and a prompt
        position whose logprob is still owed must be computed too."""
        limit = len(self.tokens) - 1
        owed = self.prompt_logprobs
        if owed is not None and len(owed) < self.prompt_len:
            return min(limit, len(owed) - 1)
        return limit

    @property
    def work_left(self) -> int:
        """Tokens still to compute, at most."""
        return self.max_total - self.computed


def _record(sampling: SamplingParams, seed: int, allowed_vocab: int) -> bytes:
    """The SAMPLE_DTYPE record; what changes from step to step is filled in by the batch builder."""
    record = np.zeros(1, SAMPLE_DTYPE)
    record["seed"] = seed
    record["target"] = -1
    record["temperature"] = 0 if sampling.greedy else sampling.temperature
    record["top_k"] = max(0, sampling.top_k)
    for name in (
        "top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    ):  # fmt: skip
        record[name] = getattr(sampling, name)
    record["logprobs"] = -1 if sampling.logprobs is None else sampling.logprobs
    record["allowed_vocab"] = allowed_vocab
    record["mask"] = -1
    return record.tobytes()


def target_records(
    sampling: SamplingParams, targets: array[int], first_row: int, allowed_vocab: int
) -> bytes:
    """Records that ask for the logprobs of known tokens: targets[i] after row first_row + i."""
    records = np.zeros(len(targets), SAMPLE_DTYPE)
    records["row"] = np.arange(first_row, first_row + len(targets))
    records["target"] = targets
    records["top_p"] = records["typical_p"] = records["repetition_penalty"] = 1
    records["logprobs"] = sampling.prompt_logprobs
    records["allowed_vocab"] = allowed_vocab
    records["mask"] = -1
    return records.tobytes()
