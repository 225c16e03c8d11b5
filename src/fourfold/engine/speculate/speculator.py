"""Which sequences get which guesses: asks the proposers, weighs the price, fits guesses to constraints."""

from __future__ import annotations

from collections.abc import Sequence as Items
from itertools import takewhile

from fourfold.engine.sequence import Sequence
from fourfold.engine.speculate.draft import Draft
from fourfold.engine.speculate.governor import Governor, Own
from fourfold.engine.speculate.proposer import Guess, Proposer

PROBE = 2
"""Guesses per sequence when guessing seems not to pay and is tried again."""


class Speculator:
    """Not for use by two threads."""

    def __init__(
        self,
        proposers: Items[Proposer],
        governor: Governor,
        max_sequences: int | None = None,
        *,
        everywhere: bool = True,
    ) -> None:
        """proposers: a later one is asked for the sequences that the ones before knew nothing for.
        max_sequences: no guesses in steps of more.
        everywhere: otherwise only sequences with a prediction or a constraint are worth asking for."""
        self.governor = governor
        self._proposers = proposers
        self._max_sequences = max_sequences
        self._everywhere = everywhere
        self._own: dict[Sequence, Own] = {}

    def propose(self, sequences: Items[Sequence]) -> dict[Sequence, Draft]:
        """Drafts for sequences that are about to draw; nothing for those it has no worthwhile guess for."""
        governor = self.governor
        if not self._everywhere:
            sequences = [seq for seq in sequences if seq.guide is not None or seq.prediction is not None]
        if not sequences or (self._max_sequences is not None and len(sequences) > self._max_sequences):
            return {}
        if not governor.turn():
            return {}
        probing = not governor.pays
        known = sum(len(seq.tokens) - seq.computed for seq in sequences)
        price = governor.price(len(sequences), (known + len(sequences)) / 2)
        drafts: dict[Sequence, Draft] = {}
        seen = worth = False
        for proposer in self._proposers:
            wanted = {}
            for seq in sequences:
                # One token is drawn in any case.
                most = min(governor.most, seq.max_total - len(seq.tokens) - 1)
                if most <= 0 or seq in drafts:
                    continue
                if proposer.kind is not None:
                    length = governor.length(proposer.kind, self._of(seq), price)
                    seen, worth = True, worth or length > 0
                    most = min(most, PROBE if probing else length)
                if most > 0:
                    wanted[seq] = most
            for seq, guess in (proposer.propose(wanted) if wanted else {}).items():
                length = governor.length(guess.kind, self._of(seq), price)
                seen, worth = True, worth or length > 0
                draft = _draft(seq, guess, min(wanted[seq], PROBE if probing else length))
                if draft is not None:
                    drafts[seq] = draft
        if seen:
            governor.pays = worth
        return drafts

    def settle(self, seq: Sequence, draft: Draft, right: int) -> None:
        """The first `right` of the draft's guesses were right."""
        self.governor.came_true(draft.kind, self._of(seq), right, draft.guesses(len(draft.tokens)))

    def ended(self, seq: Sequence) -> None:
        self._own.pop(seq, None)
        for proposer in self._proposers:
            proposer.ended(seq)

    def _of(self, seq: Sequence) -> Own:
        return self._own.setdefault(seq, Own())


def _draft(seq: Sequence, guess: Guess, most: int) -> Draft | None:
    """At most `most` guesses, as what the sequence may say next; what ends the answer is never guessed."""
    if most <= 0:
        return None
    ends = seq.stop_ids
    tokens = list(takewhile(lambda token: token not in ends, guess.tokens))
    guide = seq.guide
    if guide is None:
        tokens = tokens[:most]
        return Draft(tokens, range(len(tokens) + 1), guess.kind) if tokens else None
    tokens = list(takewhile(lambda token: token not in seq.request.eos_ids, tokens))
    room = seq.max_total - len(seq.tokens) - 1
    every = seq.request.sampling.logprobs is not None
    tokens, places = guide.draft(tokens, most, room, every=every)
    return Draft(tokens, places, guess.kind) if tokens else None
