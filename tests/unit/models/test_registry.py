"""What is missing, mistyped, foreign or unsupported is a LoadError that names file and key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.errors import LoadError
from fourfold.models.registry import GGUF_ARCHITECTURES, HF_MODEL_TYPES, load_model_definition
from models.fake_source import FakeSource
from models.tiny_models import SIZES

HF: dict[str, Any] = {**SIZES, "model_type": "llama", "num_hidden_layers": 1, "rope_theta": 10000.0}
GGUF: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.context_length": 128,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 88,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.eot_token_id": 5,
}


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


def hf_tensors(**extra: np.ndarray) -> dict[str, np.ndarray]:
    layer = "model.layers.0."
    return {
        "model.embed_tokens.weight": zeros(131, 64),
        "model.norm.weight": zeros(64),
        "lm_head.weight": zeros(131, 64),
        f"{layer}input_layernorm.weight": zeros(64),
        f"{layer}post_attention_layernorm.weight": zeros(64),
        f"{layer}self_attn.q_proj.weight": zeros(64, 64),
        f"{layer}self_attn.k_proj.weight": zeros(32, 64),
        f"{layer}self_attn.v_proj.weight": zeros(32, 64),
        f"{layer}self_attn.o_proj.weight": zeros(64, 64),
        f"{layer}mlp.gate_proj.weight": zeros(88, 64),
        f"{layer}mlp.up_proj.weight": zeros(88, 64),
        f"{layer}mlp.down_proj.weight": zeros(64, 88),
        **extra,
    }


def gguf_tensors(**extra: np.ndarray) -> dict[str, np.ndarray]:
    return {
        "token_embd.weight": zeros(131, 64),
        "output_norm.weight": zeros(64),
        "blk.0.attn_norm.weight": zeros(64),
        "blk.0.ffn_norm.weight": zeros(64),
        "blk.0.attn_q.weight": zeros(64, 64),
        "blk.0.attn_k.weight": zeros(32, 64),
        "blk.0.attn_v.weight": zeros(32, 64),
        "blk.0.attn_output.weight": zeros(64, 64),
        "blk.0.ffn_gate.weight": zeros(88, 64),
        "blk.0.ffn_up.weight": zeros(88, 64),
        "blk.0.ffn_down.weight": zeros(64, 88),
        **extra,
    }


def load_hf(tensors: dict[str, np.ndarray] | None = None, **changes: Any) -> Any:
    config = {key: value for key, value in {**HF, **changes}.items() if value != "ABSENT"}
    return load_model_definition(FakeSource("hf", config, tensors or hf_tensors()), None)


def load_gguf(tensors: dict[str, np.ndarray] | None = None, changes: dict[str, Any] | None = None) -> Any:
    keys = {key: value for key, value in {**GGUF, **(changes or {})}.items() if value != "ABSENT"}
    return load_model_definition(FakeSource("gguf", keys, tensors or gguf_tensors()), None)


def test_the_plain_ones_load() -> None:
    assert load_hf().program.family == "llama"
    definition = load_gguf()
    assert definition.eos_token_ids == (2, 5)
    assert definition.bos_token_id == 1
    assert definition.summary["parameters"] == f"{sum(t.size for t in gguf_tensors().values()):,}"


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model_type": "lama"}, r"model_type is 'lama', known are gemma2, .*; the nearest is llama"),
        ({"model_type": "ABSENT"}, "model_type is missing"),
        ({"model_type": 3}, "model_type must be a string, got 3"),
        ({"hidden_size": "ABSENT"}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size must be an integer, got '64'"),
        ({"hidden_size": True}, "hidden_size must be an integer, got True"),
        ({"hidden_size": 64.0}, "hidden_size must be an integer, got 64.0"),
        ({"hidden_size": 2**60}, "hidden_size must be between 1 and"),
        ({"hidden_size": 66}, r"hidden_size of 66 is not a multiple of num_attention_heads \(4\)"),
        ({"num_key_value_heads": 3}, "num_key_value_heads of 3 does not divide the 4 query heads"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be between 1"),
        ({"head_dim": 15}, "head_dim gives heads of 15 columns"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be above 0"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps must be a finite number"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps must be a finite number, got '1e-5'"),
        ({"hidden_act": "relu2"}, "hidden_act is 'relu2', known are silu"),
        ({"attention_bias": "yes"}, "attention_bias must be true or false, got 'yes'"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config is"),
        ({"logit_scale": 0.0625}, "logit_scale is 0.0625; this is not supported"),
        ({"embedding_multiplier": 12.0}, "embedding_multiplier is 12.0"),
        ({"num_local_experts": 8}, "num_local_experts is 8"),
        ({"layer_types": ["sliding_attention"]}, "sliding_window is missing"),
        ({"layer_types": ["chunked_attention"]}, "layer_types must be a list of 1 of full_attention"),
        ({"eos_token_id": "2"}, "eos_token_id must be a token id"),
        ({"eos_token_id": [2, -1]}, "eos_token_id must be a token id"),
    ],
)
def test_bad_config_json(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LoadError, match=message) as caught:
        load_hf(**changes)
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"general.architecture": "gemma4"},
            r"general\.architecture is 'gemma4', known are .*nearest is gemma3",
        ),
        ({"general.architecture": "ABSENT"}, "general.architecture is missing"),
        ({"llama.block_count": "ABSENT"}, r"llama\.block_count is missing"),
        ({"llama.block_count": "1"}, r"llama\.block_count must be an integer, got '1'"),
        ({"llama.block_count": 2**60}, "must be between 1 and 10000"),
        ({"llama.attention.head_count": 0}, "must be between 1"),
        ({"llama.attention.head_count_kv": [1, 2]}, "differs between layers"),
        ({"llama.attention.layer_norm_rms_epsilon": "ABSENT"}, "is missing"),
        ({"llama.attention.value_length": 32}, r"differs from the key length \(16\)"),
        ({"llama.embedding_length": 32}, r"is 32, but token_embd\.weight is \(131, 64\)"),
        ({"llama.expert_count": 8}, r"llama\.expert_count = 8 is not known"),
        ({"llama.logit_scale": 0.5}, r"llama\.logit_scale = 0\.5 is not known"),
        ({"llama.attention.clamp_kqv": 8.0}, "is not known"),
        ({"llama.rope.dimension_count": 8}, r"must be the head size \(16\)"),
        ({"tokenizer.ggml.eos_token_id": "2"}, r"tokenizer\.ggml\.eos_token_id must be a token id"),
    ],
)
def test_bad_gguf_keys(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LoadError, match=message) as caught:
        load_gguf(changes=changes)
    assert "model.gguf" in str(caught.value)


def test_neutral_values_of_unsupported_fields_are_accepted() -> None:
    load_hf(num_local_experts=0, logit_scale=1.0, clip_qkv=None, quantization_config=None)
    load_gguf(changes={"llama.expert_count": 0, "llama.rope.dimension_count": 16})
    load_gguf(changes={"llama.attention.head_count_kv": [2, 2, 2], "llama.vocab_size": 131})


def test_missing_misshapen_and_foreign_tensors() -> None:
    less = hf_tensors()
    del less["model.layers.0.mlp.up_proj.weight"]
    with pytest.raises(LoadError, match=r"up_proj\.weight is missing; the nearest it has is"):
        load_hf(less)
    bent = hf_tensors(**{"model.layers.0.mlp.up_proj.weight": zeros(87, 64)})
    with pytest.raises(LoadError, match=r"up_proj\.weight of shape \(87, 64\) does not give"):
        load_hf(bent)
    biased = hf_tensors(**{"model.layers.0.self_attn.q_proj.bias": zeros(64)})
    with pytest.raises(LoadError, match=r"does not have: model\.layers\.0\.self_attn\.q_proj\.bias"):
        load_hf(biased)
    with pytest.raises(LoadError, match=r"does not have: blk\.0\.attn_sinks\.weight"):
        load_gguf(gguf_tensors(**{"blk.0.attn_sinks.weight": zeros(4)}))


def test_derived_tensors_of_old_checkpoints_are_passed_over() -> None:
    load_hf(hf_tensors(**{"model.layers.0.self_attn.rotary_emb.inv_freq": zeros(8)}))


def test_untied_config_needs_its_head() -> None:
    without = hf_tensors()
    del without["lm_head.weight"]
    with pytest.raises(LoadError, match=r"tensor lm_head\.weight is missing"):
        load_hf(without)
    tied = load_hf(without, tie_word_embeddings=True).program
    assert tied.ops[-1].weight == "embed.weight"


def test_gguf_without_output_uses_the_embedding_as_head() -> None:
    """Bug row B71."""
    tied = load_gguf()
    assert tied.program.ops[-1].weight == "embed.weight"
    assert "head.weight" not in tied.program.weights
    untied = load_gguf(gguf_tensors(**{"output.weight": zeros(131, 64)}))
    assert untied.program.ops[-1].weight == "head.weight"
    assert untied.bindings["head.weight"].source == "output.weight"


def test_fused_gguf_qkv_becomes_row_ranges_with_interleaved_heads() -> None:
    tensors = gguf_tensors(**{"blk.0.attn_qkv.weight": zeros(128, 64)})
    for part in "qkv":
        del tensors[f"blk.0.attn_{part}.weight"]
    bound = load_gguf(tensors).bindings
    ranges = [
        (b.row_start, b.rows, b.interleaved_heads) for b in (bound[f"layers.0.{p}.weight"] for p in "qkv")
    ]
    assert ranges == [(0, 64, 4), (64, 32, 2), (96, 32, None)]


def test_mistral_slides_by_default_and_llama_never() -> None:
    assert load_hf(model_type="mistral").program.kv[0].window == 4096
    assert load_hf(model_type="mistral", sliding_window=None).program.kv[0].window is None
    assert load_hf(sliding_window=16).program.kv[0].window is None


def assert_loads_or_names(file: str, load: Callable[[], object]) -> None:
    message = file
    try:
        load()
    except LoadError as error:
        message = str(error)
    assert file in message


JUNK = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=4)
    | st.lists(st.integers(), max_size=3)
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted({*HF, "rope_scaling", "head_dim", "hidden_act", "layer_types"})), JUNK)
def test_any_value_anywhere_in_config_json_loads_or_is_a_load_error(key: str, value: Any) -> None:
    assert_loads_or_names("config.json", lambda: load_hf(**{key: value}))


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted({*GGUF, "llama.rope.scaling.type", "llama.rope.freq_base"})), JUNK)
def test_any_value_anywhere_in_gguf_keys_loads_or_is_a_load_error(key: str, value: Any) -> None:
    assert_loads_or_names("model.gguf", lambda: load_gguf(changes={key: value}))


def test_every_family_is_registered_for_both_kinds() -> None:
    assert set(GGUF_ARCHITECTURES) <= set(HF_MODEL_TYPES)
    assert {id(f) for f in GGUF_ARCHITECTURES.values()} == {id(f) for f in HF_MODEL_TYPES.values()}
