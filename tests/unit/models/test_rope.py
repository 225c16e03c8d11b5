"""Frequencies against transformers' own functions; unknown variants are refused (bug row B77)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from fourfold.errors import LoadError
from fourfold.models.config_fields import Fields
from fourfold.models.rope import Rope
from fourfold.models.rope_config import rope_from_gguf, rope_from_hf
from models.fake_source import FakeSource

HEAD_DIM = 64


def read(config: dict[str, Any], max_model_len: int | None = None, **kwargs: Any) -> Rope:
    position = config.get("max_position_embeddings", 4096)
    fields = Fields(Path("config.json"), config)
    return rope_from_hf(
        fields, head_dim=HEAD_DIM, max_position=position, max_model_len=max_model_len, **kwargs
    )


def reference(config: dict[str, Any], seq_len: int | None = None) -> tuple[np.ndarray, float]:
    """transformers' answer for a Llama of the same head size."""
    sizes = {"hidden_size": 4 * HEAD_DIM, "num_attention_heads": 4, "max_position_embeddings": 4096}
    made = transformers.LlamaConfig(**{**sizes, **config})
    kind = made.rope_parameters["rope_type"]
    if kind == "default":
        theta, partial = (
            made.rope_parameters["rope_theta"],
            made.rope_parameters.get("partial_rotary_factor", 1.0),
        )
        dim = int(HEAD_DIM * partial)
        return theta ** -(np.arange(0, dim, 2) / dim), 1.0
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](made, "cpu", seq_len=seq_len)
    return frequencies.numpy(), scale


FACTORS = {"short_factor": [1 + i / 50 for i in range(32)], "long_factor": [2 + i for i in range(32)]}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "default": {"rope_theta": 500000.0},
    "null": {"rope_theta": 10000.0, "rope_scaling": None},
    "partial": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "linear, old key": {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "linear, new key": {"rope_theta": 10000.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "linear, both keys": {
        "rope_theta": 10000.0,
        "rope_scaling": {"rope_type": "linear", "type": "linear", "factor": 2.5},
    },
    "dynamic": {"rope_theta": 10000.0, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "llama3": {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    "llama3, transformers 5": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3}},
    "yarn": {
        "rope_theta": 1e6,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    },
    "yarn, every option": {
        "rope_theta": 1e6,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 16.0,
            "original_max_position_embeddings": 1024,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "truncate": False,
            "mscale": 0.7,
            "mscale_all_dim": 1.1,
        },
    },
    "yarn, attention factor": {
        "rope_theta": 10000.0,
        "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.25},
    },
    "longrope": {
        "rope_theta": 10000.0,
        "rope_scaling": {"rope_type": "longrope", "original_max_position_embeddings": 1024, **FACTORS},
    },
    "longrope, factor": {
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 512,
        "rope_scaling": {"rope_type": "longrope", "factor": 3.0, **FACTORS},
    },
}


@pytest.mark.parametrize("name", CONFIGS)
def test_frequencies_are_those_of_transformers(name: str) -> None:
    config = CONFIGS[name]
    made = read(config)
    # transformers chooses longrope's factors by the length at hand, we by the longest admitted: here 4096.
    frequencies, scale = reference(config, seq_len=4096)
    np.testing.assert_allclose(made.spec.inv_freq, frequencies, rtol=2e-6)
    assert made.spec.scale == pytest.approx(scale, rel=1e-6)
    assert made.spec.dim == 2 * len(frequencies)


@pytest.mark.parametrize("length", [100, 4096, 5000, 8192])
def test_dynamic_is_fixed_by_the_longest_admitted_sequence(length: int) -> None:
    made = read(CONFIGS["dynamic"], max_model_len=length)
    frequencies, _ = reference(CONFIGS["dynamic"], seq_len=length)
    np.testing.assert_allclose(made.spec.inv_freq, frequencies, rtol=2e-6)
    assert made.max_position == max(length, 4096)
    assert f"up to {max(length, 4096)} tokens" in made.note


@pytest.mark.parametrize("length, which", [(1024, "short"), (1025, "long"), (None, "long")])
def test_longrope_is_fixed_by_the_longest_admitted_sequence(length: int | None, which: str) -> None:
    made = read(CONFIGS["longrope"], max_model_len=length)
    frequencies, _ = reference(CONFIGS["longrope"], seq_len=length or 4096)
    np.testing.assert_allclose(made.spec.inv_freq, frequencies, rtol=2e-6)
    assert f"{which} factors" in made.note


def test_su_is_longrope() -> None:
    scaling = {**CONFIGS["longrope"]["rope_scaling"], "type": "su"}
    del scaling["rope_type"]
    assert read({**CONFIGS["longrope"], "rope_scaling": scaling}).spec == read(CONFIGS["longrope"]).spec


def test_yarn_extends_the_context_it_was_given_for() -> None:
    config = {**CONFIGS["yarn"], "max_position_embeddings": 1024}
    assert read(config).max_position == 4096


@pytest.mark.parametrize(
    "scaling, message",
    [
        (
            {"rope_type": "ntk-by-parts", "factor": 2},
            r"rope_scaling\.rope_type is 'ntk-by-parts', known are default",
        ),
        ({"type": "liner", "factor": 2}, "did you mean 'linear'"),
        ({"type": "mrope", "mrope_section": [1, 2, 3]}, "mrope_section is not a known rope parameter"),
        ({"type": "linear", "rope_type": "yarn", "factor": 2}, "they must agree"),
        ({"type": "linear"}, r"rope_scaling\.factor is missing"),
        ({"type": "linear", "factor": "4"}, r"rope_scaling\.factor must be a finite number, got '4'"),
        ({"type": "linear", "factor": 0.5}, "must be at least 1"),
        ({"type": "linear", "factor": float("nan")}, "must be a finite number"),
        ({"type": ["linear"], "factor": 2}, r"rope_scaling\.type is \['linear'\]"),
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor is missing"),
        ({"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}, "high_freq_factor must be above 1.0"),
        (
            {"rope_type": "longrope", **FACTORS, "short_factor": [1.0]},
            "short_factor must be a list of 32 numbers",
        ),
        ({"rope_type": "longrope", **FACTORS, "long_factor": [0.0] * 32}, "must hold positive numbers"),
        ({"rope_type": "longrope"}, "short_factor must be a list of 32 numbers, got None"),
        ("linear", "rope_scaling must be a mapping"),
        ({"rope_type": "default", "rope_theta": 0}, "rope_theta must be above 1"),
        (
            {"rope_type": "default", "partial_rotary_factor": 0.02},
            "partial_rotary_factor of 0.02 rotates 1 of 64",
        ),
    ],
)
def test_what_is_not_understood_is_refused(scaling: Any, message: str) -> None:
    with pytest.raises(LoadError, match=message) as caught:
        read({"rope_theta": 10000.0, "rope_scaling": scaling})
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize(
    "config, local, full",
    [
        ({"rope_theta": 1e6, "rope_local_base_freq": 20000.0}, 20000.0, 1e6),
        ({}, 10000.0, 1e6),
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "default", "rope_theta": 5e5},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
                }
            },
            3e4,
            5e5,
        ),
        ({"rope_theta": 1e6, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}, 10000.0, 1e6),
    ],
)
def test_gemma3_has_a_base_for_each_kind_of_layer(config: dict[str, Any], local: float, full: float) -> None:
    made = transformers.Gemma3TextConfig(**config).rope_parameters
    sliding = read(config, theta=10000.0, theta_key="rope_local_base_freq", layer_type="sliding_attention")
    whole = read(config, theta=1e6, layer_type="full_attention")
    factor = made["full_attention"].get("factor", 1.0)
    exponents = -(np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    np.testing.assert_allclose(sliding.spec.inv_freq, made["sliding_attention"]["rope_theta"] ** exponents)
    np.testing.assert_allclose(
        whole.spec.inv_freq, made["full_attention"]["rope_theta"] ** exponents / factor
    )
    assert (made["sliding_attention"]["rope_theta"], made["full_attention"]["rope_theta"]) == (local, full)


def gguf(
    keys: dict[str, Any], tensors: dict[str, Any] | None = None, max_model_len: int | None = None
) -> Rope:
    source = FakeSource("gguf", {f"llama.{key}": value for key, value in keys.items()}, tensors)
    fields = Fields(source.path, source.metadata, "llama.")
    return rope_from_gguf(fields, source, head_dim=HEAD_DIM, max_position=4096, max_model_len=max_model_len)


GGUF_EQUIVALENTS = [
    ({"rope.freq_base": 500000.0}, "default"),
    ({"rope.freq_base": 10000.0, "rope.dimension_count": 32}, "partial"),
    ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, "linear, new key"),
    ({"rope.scale_linear": 4.0}, "linear, old key"),
    (
        {
            "rope.freq_base": 1e6,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 1024,
        },
        "yarn",
    ),
]


@pytest.mark.parametrize("keys, name", GGUF_EQUIVALENTS)
def test_gguf_keys_mean_the_same(keys: dict[str, Any], name: str) -> None:
    made = gguf(keys)
    frequencies, scale = reference(CONFIGS[name])
    np.testing.assert_allclose(made.spec.inv_freq, frequencies, rtol=2e-6)
    assert made.spec.scale == pytest.approx(scale)


def test_scaling_type_none_switches_the_factor_off() -> None:
    made = gguf({"rope.scaling.type": "none", "rope.scaling.factor": 4.0})
    assert made.spec == gguf({}).spec


def test_factor_tensors_of_gguf_files() -> None:
    llama3, _ = reference(CONFIGS["llama3"])
    base = 500000.0 ** -(np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    made = gguf({"rope.freq_base": 500000.0}, {"rope_freqs.weight": base / llama3})
    np.testing.assert_allclose(made.spec.inv_freq, llama3, rtol=2e-6)

    tensors = {f"rope_factors_{k}.weight": np.asarray(FACTORS[f"{k}_factor"]) for k in ("short", "long")}
    keys = {"rope.scaling.original_context_length": 1024, "rope.scaling.attn_factor": 1.19}
    for length in (512, 4096):
        expected, _ = reference(CONFIGS["longrope"], seq_len=length)
        made = gguf(keys, tensors, max_model_len=length)
        np.testing.assert_allclose(made.spec.inv_freq, expected, rtol=2e-6)
        assert made.spec.scale == 1.19


@pytest.mark.parametrize(
    "keys, tensors, message",
    [
        ({"rope.scaling.type": "ntk"}, {}, r"llama\.rope\.scaling\.type is 'ntk', known are none, linear"),
        ({"rope.scaling.type": "longrope"}, {}, r"rope_factors_short\.weight is missing"),
        ({"rope.scaling.factor": -1.0}, {}, "must be at least 0"),
        ({"rope.dimension_count": 65}, {}, "must be between 2 and 64"),
        ({"rope.dimension_count": 33}, {}, "must be even"),
        ({"rope.freq_base": "10000"}, {}, "must be a finite number"),
        ({}, {"rope_freqs.weight": np.ones(31)}, "must be 32 F32 numbers"),
        ({}, {"rope_freqs.weight": np.zeros(32)}, "positive finite"),
        ({"rope.scaling.attn_factor": 1.2}, {}, "without longrope factors"),
        ({"rope.scaling.type": "yarn", "rope.scaling.yarn_ext_factor": 0.5}, {}, "only 1 is supported"),
        ({"rope.scaling.type": "yarn"}, {"rope_freqs.weight": np.ones(32)}, "beside a rope_freqs tensor"),
    ],
)
def test_bad_gguf_keys_are_refused(keys: dict[str, Any], tensors: dict[str, Any], message: str) -> None:
    with pytest.raises(LoadError, match=message):
        gguf(keys, tensors)
