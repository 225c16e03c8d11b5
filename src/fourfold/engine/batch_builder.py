"""From the scheduler's decisions to the arrays a backend reads. No loop over tokens: slices and joins."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from struct import pack_into
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from fourfold.engine.batch import SAMPLE_DTYPE, Batch
from fourfold.engine.masks import Guided, Masks
from fourfold.engine.sequence import Sequence, target_records
from fourfold.engine.speculate.draft import NO_DRAFT, Draft

_EMPTY_IDS: NDArray[np.int32] = np.zeros(0, np.int32)
_EMPTY_VALUES: NDArray[np.float32] = np.zeros(0, np.float32)
_FIELDS: Any = SAMPLE_DTYPE.fields
_SIZE = SAMPLE_DTYPE.itemsize
_DRAW = _FIELDS["counter"][1]
"""Of a token's index and, behind it, its row."""
_HISTORY, _BIAS, _BAN = (_FIELDS[name][1] for name in ("history_start", "bias_start", "ban_start"))
_MASK = _FIELDS["mask"][1]


class Scheduled(msgspec.Struct):
    """One sequence's share of a step.

    count: tokens computed in it, without the draft.
    draft: guesses at what follows, computed as well; only if all known tokens are.
    first_row: its first logit row in the step's results.
    targets: how many of its rows report prompt logprobs; they come first.
    samples: whether len(draft.places) more rows draw a token each.
    first_mask: row of Batch.masks of the first of them, or -1.
    """

    sequence: Sequence
    count: int
    draft: Draft = NO_DRAFT
    first_row: int = 0
    targets: int = 0
    samples: bool = False
    first_mask: int = -1


def build_batch(plan: Iterable[Scheduled]) -> Batch:
    """Fills in first_row, targets and samples of each Scheduled, and lays out the arrays in that order."""
    tokens, blocks = array("i"), array("i")
    counts, contexts, starts = array("i"), array("i"), array("i", (0,))
    records = bytearray()
    history, bias_ids, bias_values, ban_ids = array("i"), array("i"), array("f"), array("i")
    guided: list[Guided] = []
    rows = masks = 0
    for item in plan:
        seq = item.sequence
        start, count = seq.computed, item.count
        end = start + count
        table = seq.table
        if table is None:
            raise ValueError(f"sequence {seq.request.request_id} is scheduled without blocks")
        if count == 1:
            tokens.append(seq.tokens[start])
        else:
            tokens.extend(seq.tokens[start:end])
        row = len(tokens)
        draft, places = item.draft.tokens, item.draft.places
        if draft:
            tokens.extend(draft)
        counts.append(count + len(draft))
        contexts.append(start)
        blocks.extend(table.blocks)
        starts.append(len(blocks))
        item.first_row = rows
        owed = seq.prompt_logprobs
        if owed is not None and start < seq.prompt_len - 1:
            # Row p predicts token p + 1. What was reported before a preemption is not asked again.
            first = max(start, len(owed) - 1)
            last = min(end, seq.prompt_len - 1)
            if first < last:
                item.targets = last - first
                vocab = int(np.frombuffer(seq.record, SAMPLE_DTYPE)["allowed_vocab"][0])
                targets = seq.tokens[first + 1 : last + 1]
                records += target_records(seq.request.sampling, targets, row - end + first, vocab)
                rows += item.targets
        item.samples = end == len(seq.tokens) and seq.wants_tokens
        if item.samples:
            counter, prompt_start = end - seq.prompt_len, len(history)
            bias = (0, 0)
            if seq.penalized:
                history.extend(seq.tokens)
                history.extend(draft)
            if seq.bias_ids:
                at = len(bias_ids)
                bias_ids.extend(seq.bias_ids)
                bias_values.extend(seq.bias_values)
                bias = (at, len(bias_ids))
            if seq.guide is not None:
                item.first_mask = masks
                guided.append(Guided(seq.guide, draft, places))
            for place in places:
                record = len(records)
                records += seq.record
                pack_into("<Qi", records, record + _DRAW, counter + place, row - 1 + place)
                if seq.patched:
                    if seq.penalized:
                        ends = (prompt_start + seq.prompt_len, prompt_start + end + place)
                        pack_into("<3i", records, record + _HISTORY, prompt_start, *ends)
                    pack_into("<2i", records, record + _BIAS, *bias)
                    if seq.ban_ids and counter + place < seq.min_tokens:
                        at = len(ban_ids)
                        ban_ids.extend(seq.ban_ids)
                        pack_into("<2i", records, record + _BAN, at, len(ban_ids))
                if seq.guide is not None:
                    pack_into("<i", records, record + _MASK, masks)
                    masks += 1
            rows += len(places)
    return Batch(
        tokens=np.frombuffer(tokens, np.int32),
        seq_tokens=np.frombuffer(counts, np.int32),
        seq_context=np.frombuffer(contexts, np.int32),
        block_start=np.frombuffer(starts, np.int32),
        blocks=np.frombuffer(blocks, np.int32),
        samples=np.frombuffer(records, SAMPLE_DTYPE) if records else np.zeros(0, SAMPLE_DTYPE),
        history=np.frombuffer(history, np.int32) if history else _EMPTY_IDS,
        bias_ids=np.frombuffer(bias_ids, np.int32) if bias_ids else _EMPTY_IDS,
        bias_values=np.frombuffer(bias_values, np.float32) if bias_values else _EMPTY_VALUES,
        ban_ids=np.frombuffer(ban_ids, np.int32) if ban_ids else _EMPTY_IDS,
        masks=Masks(guided) if guided else None,
    )
