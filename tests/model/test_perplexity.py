"""Perplexity of 20,000 tokens against transformers in fp32."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from fourfold.bench.accuracy import Window, cut, opened, perplexity
from fourfold.config import EngineConfig
from fourfold.text.tokenizer import Tokenizer

from .reference import Transformers, log_softmax
from .text import WIKITEXT

TOKENS, CONTEXT = 20_000, 2_000
TOLERANCE = {"int8": 5e-3, "float32": 1e-5}
"""Relative, with a bfloat16 KV cache for int8 and a float32 one for float32."""


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
    expected = math.exp(torch.cat([_losses(reference, window) for window in windows]).mean())
    found = {}
    for activations, kv in (("int8", "bfloat16"), ("float32", "float32")):
        config = EngineConfig(model=str(path), activation_dtype=activations, kv_cache_dtype=kv)
        with opened(config, CONTEXT) as (scorer, _):
            found[activations] = perplexity(scorer, windows).perplexity
    print(f"{path.stem}: transformers {expected:.4f}, ours {found}")
    for activations, value in found.items():
        np.testing.assert_allclose(value, expected, rtol=TOLERANCE[activations])
