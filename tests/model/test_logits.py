"""The engine's distributions against transformers in fp32, for each way of computing them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fourfold.bench.accuracy import Rows, Window, kl_divergence, log_normalizer, opened
from fourfold.config import ActivationDtype, EngineConfig, KVDtype
from fourfold.text.tokenizer import Tokenizer

from .reference import Transformers, log_softmax
from .text import text

pytestmark = pytest.mark.timeout(1200)
QUICK, LONG = 256, 512


@dataclass(frozen=True)
class Way:
    """kl: mean KL(reference || engine) in nats must be below.  agreement: share of equal likeliest tokens."""

    activations: ActivationDtype
    kv: KVDtype
    kl: float
    agreement: float
    quick_agreement: float


WAYS = [
    # One token of the 255 in the quick run is 0.4 %, and near ties fall either way with the order of sums:
    # three standard deviations of that number below what the long run asks.
    Way("int8", "bfloat16", 2e-3, 0.98, 0.955),
    Way("bfloat16", "bfloat16", 5e-4, 0.985, 0.962),
    Way("float32", "bfloat16", 1e-4, 0.995, 0.99),
    # What is left is the order of sums.
    Way("float32", "float32", 1e-8, 0.999, 0.999),
]


def _ids(tokenizer: Tokenizer, count: int) -> list[int]:
    ids = tokenizer.encode(text())
    assert len(ids) >= count
    return ids[:count]


def _engine_logits(path: Path, way: Way, ids: list[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Of all tokens but the last, [tokens - 1, vocab]."""
    config = EngineConfig(model=str(path), activation_dtype=way.activations, kv_cache_dtype=way.kv)
    with opened(config, len(ids)) as (scorer, _):
        window = Window(np.array(ids, np.int32), 1)
        return np.concatenate([rows.logits for rows in scorer.rows(0, window, scorer.step_size)])


def _check(path: Path, reference: Transformers, ids: list[int], way: Way, agreement: float) -> None:
    ours = _engine_logits(path, way, ids)
    theirs = reference.logits(ids)[:-1]
    p, q = theirs.numpy(), ours[:, : theirs.shape[1]]
    kl, same = [], []
    for begin in range(0, len(p), 64):
        part = slice(begin, begin + 64)
        log_p, log_q = log_softmax(torch.from_numpy(p[part])), log_softmax(torch.from_numpy(q[part]))
        kl.append(torch.nn.functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1))
        same.append(log_p.argmax(-1) == log_q.argmax(-1))
    divergence, equal = torch.cat(kl), torch.cat(same)
    figures = (
        f"{path.stem} {way.activations}, {way.kv} KV: mean KL {divergence.mean():.3e} nats, largest "
        f"{divergence.max():.3e}, same top token {equal.double().mean():.4f}, "
        f"largest difference {np.abs(p - q).max():.2e}"
    )
    print(figures)
    assert divergence.mean() < way.kl, figures
    assert equal.double().mean() > agreement, figures
    # `fourfold bench accuracy` measures the same.
    measured = kl_divergence(Rows(p, log_normalizer(p)), Rows(q, log_normalizer(q)))
    np.testing.assert_allclose(measured, divergence.numpy(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{way.activations}-{way.kv}")
def test_short_text(path: Path, tokenizer: Tokenizer, reference: Transformers, way: Way) -> None:
    _check(path, reference, _ids(tokenizer, QUICK), way, way.quick_agreement)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{way.activations}-{way.kv}")
def test_long_text(path: Path, tokenizer: Tokenizer, reference: Transformers, way: Way) -> None:
    _check(path, reference, _ids(tokenizer, LONG), way, way.agreement)
