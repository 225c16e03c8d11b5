"""Design rule 1 at the backend: a row's logits are the same bits in any chunks, threads and company."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from fourfold.build.load import load_engine_backend
from fourfold.config import ActivationDtype, EngineConfig
from fourfold.engine.batch import SAMPLE_DTYPE, Backend, Batch
from fourfold.text.tokenizer import Tokenizer

from .text import text

LENGTHS: dict[ActivationDtype, int] = {"int8": 520, "bfloat16": 520, "float32": 75}
"""Tokens; no multiple of a tile, and but for float32 more than the largest chunk."""
WATCHED = 16
"""One row in so many is compared."""
CHUNKS = (16, 64, 512)
THREADS = 2
BLOCKS = 120


@dataclass
class Sequence:
    tokens: list[int]
    blocks: NDArray[np.int32]
    done: int = 0


@contextmanager
def _backend(path: Path, dtype: ActivationDtype, threads: int) -> Iterator[Backend]:
    config = EngineConfig(
        model=str(path),
        activation_dtype=dtype,
        threads=threads,
        max_num_batched_tokens=640,
        max_model_len=1024,
        num_kv_blocks=BLOCKS,
    )
    backend, _ = load_engine_backend(config, lambda what, done: None)
    try:
        yield backend
    finally:
        backend.close()


def _logits(backend: Backend, ids: list[int], chunk: int, others: list[list[int]]) -> NDArray[np.float32]:
    """Of every WATCHED-th token of `ids`, `chunk` tokens a step. In every step some more tokens of the others
    are computed before and behind; the blocks of all lie in a random order."""
    rng = np.random.default_rng(chunk)
    tables = np.array_split(rng.permutation(BLOCKS).astype(np.int32), len(others) + 1)
    watched, *company = [Sequence(t, b) for t, b in zip([ids, *others], tables, strict=True)]
    order = [*company[::2], watched, *company[1::2]]
    found = []
    while watched.done < len(ids):
        parts = []
        for each in order:
            count = chunk if each is watched else int(rng.integers(0, 30))
            if part := each.tokens[each.done : each.done + count]:
                parts.append((each, part))
        before = sum(len(part) for each, part in parts if order.index(each) < order.index(watched))
        places = range(watched.done, min(watched.done + chunk, len(ids)))
        rows = [before + at - watched.done for at in places if at % WATCHED == 0]
        result = backend.run(_batch(backend, parts, rows))
        assert result.logits is not None
        found.append(result.logits)
        for each, part in parts:
            each.done += len(part)
    return np.concatenate(found)


def _batch(backend: Backend, parts: list[tuple[Sequence, list[int]]], rows: list[int]) -> Batch:
    samples = np.zeros(len(rows), SAMPLE_DTYPE)
    samples["row"], samples["target"], samples["logprobs"], samples["mask"] = rows, -1, -1, -1
    samples["allowed_vocab"] = backend.vocab_size
    for off in ("top_p", "typical_p", "repetition_penalty"):
        samples[off] = 1
    used = [each.blocks[: -(-(each.done + len(part)) // backend.block_size)] for each, part in parts]
    none = np.zeros(0, np.int32)
    return Batch(
        tokens=np.array([token for _, part in parts for token in part], np.int32),
        seq_tokens=np.array([len(part) for _, part in parts], np.int32),
        seq_context=np.array([each.done for each, _ in parts], np.int32),
        block_start=np.cumsum([0, *map(len, used)]).astype(np.int32),
        blocks=np.concatenate(used),
        samples=samples,
        history=none,
        bias_ids=none,
        bias_values=np.zeros(0, np.float32),
        ban_ids=none,
        return_logits=True,
    )


@pytest.mark.parametrize("dtype", LENGTHS)
def test_chunks_threads_and_company(path: Path, tokenizer: Tokenizer, dtype: ActivationDtype) -> None:
    ids = tokenizer.encode(text())
    watched = ids[: LENGTHS[dtype]]
    others = [ids[start : start + 200] for start in (1, 30, 77)]
    with _backend(path, dtype, 1) as backend:
        expected = _logits(backend, watched, 512, [])
        assert expected.shape == (-(-len(watched) // WATCHED), backend.vocab_size)
        np.testing.assert_array_equal(_logits(backend, watched, 64, others), expected)
    with _backend(path, dtype, THREADS) as backend:
        for chunk in CHUNKS:
            np.testing.assert_array_equal(_logits(backend, watched, chunk, []), expected)
            np.testing.assert_array_equal(_logits(backend, watched, chunk, others), expected)
