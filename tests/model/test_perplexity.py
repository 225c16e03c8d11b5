"""Perplexity of 20,000 tokens against transformers in fp32."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from fourfold.bench.accuracy import Window, cut, opened, perplexity
from fourfold.config import ActivationDtype, EngineConfig, KVDtype
from fourfold.text.tokenizer import Tokenizer

from .reference import Transformers, log_softmax
from .text import WIKITEXT

TOKENS, CONTEXT = 20_000, 2_000
INT8_TOLERANCE, EXACT_TOLERANCE = 5e-3, 1e-5
EXACT_WINDOWS = 2
"""Windows that are computed in float32 too, which is slow and shows its worth in few."""


def _losses(reference: Transformers, window: Window) -> torch.Tensor:
    logits = reference.logits(window.tokens.tolist())[window.first - 1 : -1]
    targets = torch.from_numpy(window.tokens[window.first :]).long()
    chosen = [
        log_softmax(part).gather(1, ids[:, None]).flatten()
        for part, ids in zip(logits.split(64), targets.split(64), strict=True)
    ]
    return -torch.cat(chosen)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_wikitext(path: Path, tokenizer: Tokenizer, reference: Transformers) -> None:
    if not WIKITEXT.is_file():
        pytest.skip(f"{WIKITEXT} is not on this machine")
    text = WIKITEXT.read_text("utf-8")[: 8 * TOKENS]
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)[:TOKENS]
    assert len(ids) == TOKENS
    prefix = tokenizer.spec.prefix_ids
    windows = cut(ids, prefix, CONTEXT, CONTEXT - len(prefix))
    losses = [_losses(reference, window) for window in windows]

    def check(activations: ActivationDtype, kv: KVDtype, count: int, tolerance: float) -> None:
        config = EngineConfig(model=str(path), activation_dtype=activations, kv_cache_dtype=kv)
        with opened(config, CONTEXT) as (scorer, _):
            found = perplexity(scorer, windows[:count])
        expected = math.exp(torch.cat(losses[:count]).mean())
        figures = (
            f"{path.stem} {activations}, {kv} KV, {len(found.losses)} tokens: perplexity "
            f"{found.perplexity:.4f}, transformers {expected:.4f} ({found.perplexity / expected - 1:+.3%})"
        )
        print(figures)
        assert found.perplexity == pytest.approx(expected, rel=tolerance), figures

    check("int8", "bfloat16", len(windows), INT8_TOLERANCE)
    check("float32", "float32", EXACT_WINDOWS, EXACT_TOLERANCE)
