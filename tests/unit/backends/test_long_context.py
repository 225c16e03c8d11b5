"""Contexts of 32k tokens: against transformers, in any cut, and without memory quadratic in the context."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models.tiny_models import VOCAB, Case, make_model
from msgspec.structs import replace

from backends.driver import BLOCK, LIMITS, Floats, Model, batch_of, pack
from fourfold.models.registry import load_model_definition
from fourfold.program.passes import optimize
from fourfold.weights.hf import open_hf

LENGTH = 32768
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": LENGTH,
    "rope_theta": 1e6,
}
LLAMA = Case("LlamaConfig", SMALL)
GEMMA = Case(  # a layer of 512 tokens, then a full one
    "Gemma3TextConfig", {**SMALL, "sliding_window": 512, "sliding_window_pattern": 2}
)
FLOAT32: dict[str, Any] = {"activation_dtype": "float32", "kv_dtype": "float32"}
LIMITS_32K = replace(LIMITS, max_batch_tokens=512, max_context=LENGTH, num_blocks=LENGTH // BLOCK)
TOKENS = np.random.default_rng(11).integers(3, VOCAB, LENGTH)


def load(case: Case, folder: Path, **options: Any) -> Model:
    make_model(case).save_pretrained(folder)
    source = open_hf(folder)
    definition = load_model_definition(source, None)
    exact = options["activation_dtype"] == "float32"
    return Model(optimize(definition.program), pack(definition, source, exact=exact), options)


def last_logits(model: Model, size: int, rows: int = 32) -> Floats:
    """Of the last `rows` of LENGTH tokens, `size` tokens a step."""
    backend = model.backend(LIMITS_32K, threads=2)
    table = [int(b) for b in np.random.default_rng(size).permutation(backend.num_blocks)]
    found = []
    for start in range(0, LENGTH, size):
        tokens = [int(t) for t in TOKENS[start : start + size]]
        end = start + len(tokens)
        wanted = range(min(len(tokens), max(0, LENGTH - rows - start)), len(tokens))
        result = backend.run(batch_of([(tokens, start, table[: -(-end // BLOCK)])], wanted, VOCAB))
        assert not result.status.any()
        assert result.logits is not None
        found.append(result.logits)
    return np.concatenate(found)


def resident_peak() -> int:
    """Bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_activations_take_the_memory_of_a_step_whatever_the_context(tmp_path: Path) -> None:
    model = load(LLAMA, tmp_path, **FLOAT32)
    at_32k = model.backend(LIMITS_32K)._runtime.arena_bytes
    assert at_32k == model.backend(replace(LIMITS_32K, max_context=64))._runtime.arena_bytes
    widths = sum(spec.shape[0] for spec in model.program.weights.values())
    assert at_32k < 512 * 4 * 4 * widths


@pytest.mark.slow
def test_32k_tokens_give_the_logits_of_transformers_in_little_memory(tmp_path: Path) -> None:
    model = load(LLAMA, tmp_path, **FLOAT32)
    before = resident_peak()
    found = last_logits(model, 512)
    # The cache is 32k tokens x 2 layers x K and V of 16 floats: 8 MiB. Scores of one head alone: 4 GiB.
    assert resident_peak() - before < 128 << 20
    oracle = make_model(LLAMA)
    oracle.set_attn_implementation("sdpa")
    with torch.no_grad():
        want = oracle(torch.from_numpy(TOKENS)[None], logits_to_keep=32).logits[0].numpy()
    # Both take angles of up to 32768 radians as float32, whose last bit is 2e-3 there.
    np.testing.assert_allclose(found, want, atol=1e-3 * want.std(), rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("kv", ["bfloat16", "int8", "fp8"])
def test_32k_tokens_with_windows_in_any_cut_give_the_same_bits(kv: str, tmp_path: Path) -> None:
    model = load(GEMMA, tmp_path, activation_dtype="int8", kv_dtype=kv)
    np.testing.assert_array_equal(last_logits(model, 512), last_logits(model, 97))
