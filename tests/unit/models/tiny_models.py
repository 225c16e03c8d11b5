"""Tiny random models of every family: made and run by transformers, written as Hugging Face or GGUF files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from fourfold.models.registry import Definition
from fourfold.quant.registry import get_format
from fourfold.weights.source import WeightSource

Array = NDArray[np.float32]

VOCAB = 131
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TOKENS = [int(t) for t in np.random.default_rng(7).integers(3, VOCAB, 40)]

SHORT = [1.0 + 0.05 * i for i in range(8)]
LONG = [1.5 + 0.5 * i for i in range(8)]
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def _longrope(partial: float, count: int) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": partial,
        "short_factor": SHORT[:count],
        "long_factor": LONG[:count],
    }


@dataclass(frozen=True)
class Case:
    """name of transformers' config class, and what differs from SIZES."""

    config: str
    fields: dict[str, Any]


CASES: dict[str, Case] = {
    "llama-tied": Case("LlamaConfig", {"tie_word_embeddings": True}),
    "llama-biases-llama3-rope": Case(
        "LlamaConfig", {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3}
    ),
    "llama-head-dim": Case("LlamaConfig", {"head_dim": 24, "num_key_value_heads": 1}),
    "mistral-window": Case("MistralConfig", {"sliding_window": 7}),
    "qwen2": Case("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen2-window": Case(
        "Qwen2Config", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
    ),
    "qwen3": Case("Qwen3Config", {"head_dim": 24, "tie_word_embeddings": True}),
    "qwen3-bias": Case("Qwen3Config", {"head_dim": 16, "attention_bias": True}),
    "gemma2": Case(
        "Gemma2Config",
        {
            "head_dim": 16,
            "sliding_window": 6,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": Case(
        "Gemma3TextConfig",
        {"head_dim": 32, "sliding_window": 5, "sliding_window_pattern": 3, "query_pre_attn_scalar": 40},
    ),
    "gemma3-linear-softcap": Case(
        "Gemma3TextConfig",
        {
            "head_dim": 16,
            "num_hidden_layers": 4,
            "sliding_window": 5,
            "sliding_window_pattern": 2,
            "final_logit_softcapping": 4.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "phi3-window": Case("Phi3Config", {"sliding_window": 11}),
    "phi3-longrope-short": Case(
        "Phi3Config", {"original_max_position_embeddings": 64, "rope_parameters": _longrope(1.0, 8)}
    ),
    "phi3-longrope-long": Case(
        "Phi3Config", {"original_max_position_embeddings": 32, "rope_parameters": _longrope(1.0, 8)}
    ),
    "phi3-longrope-partial": Case(
        "Phi3Config",
        {
            "original_max_position_embeddings": 32,
            "partial_rotary_factor": 0.75,
            "rope_parameters": _longrope(0.75, 6),
        },
    ),
}

ADMITTED: dict[str, int] = {"phi3-longrope-short": 64, "phi3-longrope-long": 40, "phi3-longrope-partial": 40}
"""max_model_len under which the fixed choice of factors is the one transformers makes for 40 tokens."""


def make_model(case: Case, seed: int = 0) -> transformers.PreTrainedModel:
    """fp32, eager attention, every parameter random (norms near their neutral value, biases too)."""
    torch.manual_seed(seed)
    config = getattr(transformers, case.config)(**{**SIZES, **case.fields})
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plus_one = config.model_type.startswith("gemma")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.normal_(0.0 if plus_one else 1.0, 0.2)
            else:
                parameter.normal_(0.0, 0.15)
    return model.eval()


def reference_logits(model: transformers.PreTrainedModel, tokens: list[int] = TOKENS) -> Array:
    with torch.no_grad():
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return np.asarray(logits.float().numpy(), np.float32)


def load_weights(definition: Definition, source: WeightSource) -> dict[str, Array]:
    """Every Program weight in fp32, as the bindings say."""
    weights = {}
    for name, binding in definition.bindings.items():
        raw = source.tensor(binding.source)
        full = get_format(raw.format).decode(raw.data, raw.shape)
        rows = len(full) if binding.rows is None else binding.rows
        part = full[binding.row_start : binding.row_start + rows]
        if binding.interleaved_heads is not None:
            pairs = part.reshape(binding.interleaved_heads, -1, 2, *part.shape[1:])
            part = pairs.swapaxes(1, 2).reshape(part.shape)
        weights[name] = np.asarray(part + np.float32(binding.add), np.float32)
    return weights


def _permute(array: Array, heads: int) -> Array:
    """What converters do to q and k of the llama architecture: halves → interleaved pairs."""
    halves = array.reshape(heads, 2, len(array) // heads // 2, *array.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))


GGUF_ARCH = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
}


def write_gguf(model: transformers.PreTrainedModel, path: Path) -> Path:
    """The model as the public converters write it.

    Names come from the gguf package's map; llama's q and k are permuted, Gemma's norms have their 1 added;
    llama3 and longrope factors are tensors.
    """
    config = model.config
    arch = GGUF_ARCH[config.model_type]
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    writer = gguf.GGUFWriter(path, arch)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    _write_rope(writer, config, head_dim)
    if getattr(config, "sliding_window", None) and arch in ("llama", "gemma2", "gemma3", "phi3"):
        writer.add_sliding_window(config.sliding_window)
    if arch == "gemma3":
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
        if config.final_logit_softcapping:
            writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)

    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    tied = config.tie_word_embeddings
    for hf_name, tensor in model.state_dict().items():
        if hf_name == "lm_head.weight" and tied:
            continue
        name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        assert name is not None, hf_name
        array = tensor.numpy().astype(np.float32)
        if arch == "llama" and (".attn_q." in name or ".attn_k." in name):
            heads = config.num_attention_heads if ".attn_q." in name else config.num_key_value_heads
            array = _permute(array, heads)
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            array = array + 1
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_rope(writer: gguf.GGUFWriter, config: Any, head_dim: int) -> None:
    parameters = config.rope_parameters
    parameters = parameters.get("full_attention", parameters)
    writer.add_rope_freq_base(parameters["rope_theta"])
    kind = parameters["rope_type"]
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(parameters["factor"])
    if kind == "llama3":
        base = parameters["rope_theta"] ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        scaled = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0].numpy()
        writer.add_tensor("rope_freqs.weight", (base / scaled).astype(np.float32))
    if kind == "longrope":
        original = config.original_max_position_embeddings
        factor = config.max_position_embeddings / original
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
        writer.add_rope_scaling_attn_factors(float(np.sqrt(1 + np.log(factor) / np.log(original))))
        writer.add_rope_dimension_count(2 * len(parameters["long_factor"]))
        for name in ("short", "long"):
            factors = np.asarray(parameters[f"{name}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{name}.weight", factors)
