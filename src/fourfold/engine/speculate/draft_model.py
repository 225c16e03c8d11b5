"""Guesses of a smaller model, drawn as the large one draws: with the same seed and counter for each token.

Speculative decoding (Leviathan et al. 2023; Chen et al. 2023) with shared randomness: both models turn the
same uniform number into a token, so the closer their distributions are the more often they agree, and a guess
is kept only where they do. The answer is therefore the large model's own, to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np

from fourfold.engine.batch import SAMPLE_DTYPE, Backend
from fourfold.engine.batch_builder import Scheduled, build_batch
from fourfold.engine.cache import PlainCache
from fourfold.engine.sequence import Sequence
from fourfold.engine.speculate.proposer import Guess
from fourfold.errors import ConfigError


@dataclass(slots=True)
class _Shadow:
    """A sequence as the small model knows it."""

    sequence: Sequence
    guesses: list[int] = field(default_factory=list)


class DraftModel:
    """Implements Proposer. Knows nothing of constraints: what they forbid is cut from its guesses."""

    kind: str | None = "draft_model"

    def __init__(self, backend: Backend, vocab_size: int, max_len: int) -> None:
        """vocab_size: of the large model.  max_len: longest sequence of the small one, in tokens.

        Raises ConfigError if the vocabularies differ in size."""
        if backend.vocab_size != vocab_size:
            raise ConfigError(
                f"the draft model has {backend.vocab_size} tokens and the model {vocab_size}; speculation "
                "needs a draft model of the same vocabulary"
            )
        self._backend = backend
        self._max_len = min(max_len, backend.num_blocks * backend.block_size)
        self._cache = PlainCache(backend.num_blocks, backend.block_size)
        self._shadows: dict[Sequence, _Shadow] = {}

    def propose(self, wanted: Mapping[Sequence, int]) -> dict[Sequence, Guess]:
        """At most one batch catches up with prompts, so that no step waits long; who is still behind then
        gets guesses in a later step."""
        behind = {seq: self._follow(seq) for seq in wanted if len(seq.tokens) + wanted[seq] < self._max_len}
        active = self._run(behind)
        while active := {seq: one for seq, one in active.items() if len(one.guesses) < wanted[seq]}:
            active = self._run(active)
        return {seq: Guess(one.guesses, "draft_model") for seq, one in behind.items() if one.guesses}

    def ended(self, seq: Sequence) -> None:
        shadow = self._shadows.pop(seq, None)
        if shadow is not None and shadow.sequence.table is not None:
            self._cache.release(shadow.sequence.table)

    def _run(self, shadows: Mapping[Sequence, _Shadow]) -> dict[Sequence, _Shadow]:
        """Computes one batch of what they lack; returns those that drew a token and may draw another."""
        plan: dict[Sequence, Scheduled] = {}
        budget = self._backend.max_batch_tokens
        for seq, shadow in shadows.items():
            inner = shadow.sequence
            count = min(len(inner.tokens) - inner.computed, budget)
            if count <= 0:
                continue
            if not self._allocate(inner, inner.computed + count):
                self.ended(seq)
                continue
            plan[seq] = Scheduled(inner, count)
            budget -= count
        if not plan:
            return {}
        result = self._backend.run(build_batch(plan.values()))
        drew = {}
        for seq, item in plan.items():
            inner = item.sequence
            inner.computed += item.count
            if not item.samples or result.status[item.first_row]:
                continue
            token = int(result.token[item.first_row])
            inner.tokens.append(token)
            shadows[seq].guesses.append(token)
            if token not in inner.stop_ids:
                drew[seq] = shadows[seq]
        return drew

    def _follow(self, seq: Sequence) -> _Shadow:
        """The sequence's shadow with its tokens; what was guessed wrong is forgotten."""
        shadow = self._shadows.get(seq)
        if shadow is None:
            shadow = self._shadows[seq] = _Shadow(_inner(seq))
        inner = shadow.sequence
        if inner.tokens != seq.tokens:
            old, new = np.frombuffer(inner.tokens, np.int32), np.frombuffer(seq.tokens, np.int32)
            both = min(len(old), len(new))
            wrong = np.flatnonzero(old[:both] != new[:both])
            same = int(wrong[0]) if len(wrong) else both
            inner.computed = min(inner.computed, same)
            inner.tokens = seq.tokens[:]
        # One must be computed to draw from.
        inner.computed = min(inner.computed, len(inner.tokens) - 1)
        inner.record = _silent(seq.record)
        shadow.guesses = []
        return shadow

    def _allocate(self, inner: Sequence, tokens: int) -> bool:
        if inner.table is None:
            inner.table = self._cache.match(inner.tokens, "", 0)
        missing = -(-tokens // self._backend.block_size) - len(inner.table.blocks)
        return missing <= 0 or self._cache.allocate(inner.table, missing)


def _inner(seq: Sequence) -> Sequence:
    sampling = msgspec.structs.replace(seq.request.sampling, prompt_logprobs=None, logprobs=None)
    request = msgspec.structs.replace(seq.request, sampling=sampling, constraint=None, prediction_ids=[])
    vocab = int(np.frombuffer(seq.record, SAMPLE_DTYPE)["allowed_vocab"][0])
    return Sequence(request, seq.rank, 0, seq.max_total, vocab, None, seq.recording)


def _silent(record: bytes) -> bytes:
    """The same draws, without reports."""
    copy = np.frombuffer(record, SAMPLE_DTYPE).copy()
    copy["logprobs"] = copy["mask"] = -1
    return copy.tobytes()
