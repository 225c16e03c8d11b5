"""From the scheduler's decisions to the arrays a backend reads. No loop over tokens: slices and joins."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from struct import pack_into
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fourfold.engine.batch import SAMPLE_DTYPE, Batch
from fourfold.engine.sequence import Sequence, target_records
from fourfold.grammar.guide import Guide

_EMPTY_IDS: NDArray[np.int32] = np.zeros(0, np.int32)
_EMPTY_VALUES: NDArray[np.float32] = np.zeros(0, np.float32)
_FIELDS: Any = SAMPLE_DTYPE.fields
_SIZE = SAMPLE_DTYPE.itemsize
_ROW, _COUNTER = (_FIELDS[name][1] for name in ("row", "counter"))
_HISTORY, _BIAS, _BAN = (_FIELDS[name][1] for name in ("history_start", "bias_start", "ban_start"))
_MASK = _FIELDS["mask"][1]


@dataclass(slots=True)
class Scheduled:
    """One sequence's share of a step.

    count: tokens computed in it.
    first_row: its first logit row in the step's results.
    targets: how many of its rows report prompt logprobs; they come first.
    samples: whether one more row draws a token.
    """

    sequence: Sequence
    count: int
    first_row: int = 0
    targets: int = 0
    samples: bool = False


def build_batch(plan: Iterable[Scheduled]) -> Batch:
    """Fills in first_row, targets and samples of each Scheduled, and lays out the arrays in that order."""
    tokens, blocks = array("i"), array("i")
    counts, contexts, starts = [], [], [0]
    records: list[bytes | bytearray] = []
    history, bias_ids, bias_values, ban_ids = array("i"), array("i"), array("f"), array("i")
    guided: list[Guide] = []
    rows = 0
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
        counts.append(count)
        contexts.append(start)
        blocks.extend(table.blocks)
        starts.append(len(blocks))
        item.first_row = rows
        row = len(tokens)
        owed = seq.prompt_logprobs
        if owed is not None and start < seq.prompt_len - 1:
            # Row p predicts token p + 1. What was reported before a preemption is not asked again.
            first = max(start, len(owed) - 1)
            last = min(end, seq.prompt_len - 1)
            if first < last:
                item.targets = last - first
                vocab = int(np.frombuffer(seq.record, SAMPLE_DTYPE)["allowed_vocab"][0])
                targets = seq.tokens[first + 1 : last + 1]
                records.append(target_records(seq.request.sampling, targets, row - end + first, vocab))
                rows += item.targets
        item.samples = end == len(seq.tokens) and seq.wants_tokens
        if item.samples:
            record = bytearray(seq.record)
            pack_into("<i", record, _ROW, row - 1)
            pack_into("<Q", record, _COUNTER, len(seq.tokens) - seq.prompt_len)
            if seq.patched:
                if seq.penalized:
                    at = len(history)
                    history.extend(seq.tokens)
                    pack_into("<3i", record, _HISTORY, at, at + seq.prompt_len, len(history))
                if seq.bias_ids:
                    at = len(bias_ids)
                    bias_ids.extend(seq.bias_ids)
                    bias_values.extend(seq.bias_values)
                    pack_into("<2i", record, _BIAS, at, len(bias_ids))
                if seq.ban_ids and seq.output_len < seq.min_tokens:
                    at = len(ban_ids)
                    ban_ids.extend(seq.ban_ids)
                    pack_into("<2i", record, _BAN, at, len(ban_ids))
            if seq.guide is not None:
                pack_into("<i", record, _MASK, len(guided))
                guided.append(seq.guide)
            records.append(record)
            rows += 1
    return Batch(
        tokens=np.frombuffer(tokens, np.int32),
        seq_tokens=np.array(counts, np.int32),
        seq_context=np.array(contexts, np.int32),
        block_start=np.array(starts, np.int32),
        blocks=np.frombuffer(blocks, np.int32),
        samples=np.frombuffer(bytearray().join(records), SAMPLE_DTYPE)
        if records
        else np.zeros(0, SAMPLE_DTYPE),
        history=np.frombuffer(history, np.int32) if history else _EMPTY_IDS,
        bias_ids=np.frombuffer(bias_ids, np.int32) if bias_ids else _EMPTY_IDS,
        bias_values=np.frombuffer(bias_values, np.float32) if bias_values else _EMPTY_VALUES,
        ban_ids=np.frombuffer(ban_ids, np.int32) if ban_ids else _EMPTY_IDS,
        masks=_masks(guided) if guided else None,
    )


def _masks(guided: list[Guide]) -> NDArray[np.uint32]:
    """uint32 [guides, words]: what each may continue with."""
    masks = np.empty((len(guided), guided[0].words), np.uint32)
    for guide, row in zip(guided, masks, strict=True):
        guide.fill_mask(row)
    return masks
