"""The sizes every decoder shares, read from config.json or GGUF keys."""

from __future__ import annotations

from typing import Final

import msgspec

from fourfold.models.config_fields import Fields
from fourfold.program.ops import Activation
from fourfold.weights.source import WeightSource

ACTIVATIONS: Final[dict[str, Activation]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}
"""Names of transformers' `hidden_act` → ours. The last three are the tanh approximation."""

HF_CHANGES_MEANING: Final[dict[str, tuple[object, ...]]] = {
    "logit_scale": (1, 1.0),
    "logits_scaling": (1, 1.0),
    "embedding_multiplier": (1, 1.0),
    "residual_multiplier": (1, 1.0),
    "attention_multiplier": (),
    "clip_qkv": (),
    "num_experts": (0, 1),
    "num_local_experts": (0, 1),
    "use_qk_norm": (False,),
    "qk_layernorm": (False,),
    "alibi": (False,),
    "parallel_attn": (False,),
    "no_rope_layers": ([],),
    "use_bidirectional_attention": (False,),
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
    "attn_output_gate": (False,),
    "lm_head_bias": (False,),
    "rope_interleaved": (False,),
}
"""config.json fields that would change what is computed, with the values that do not."""

GGUF_HARMLESS: Final = (
    "vocab_size",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "tensor_data_layout",
    "attention.layer_norm_epsilon",
)
"""GGUF keys of an architecture that change nothing here."""


class Geometry(msgspec.Struct, frozen=True):
    """Sizes in elements; max_position in tokens. tied: the embedding is the output head."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    max_position: int
    tied: bool


def geometry_from_hf(config: Fields, *, tied: bool = False, head_dim: int | None = None) -> Geometry:
    """tied, head_dim: the family's defaults; without one the head size is hidden_size / heads.

    Raises LoadError for sizes that do not fit and for fields that would change the meaning.
    """
    config.refuse(HF_CHANGES_MEANING)
    hidden = config.integer("hidden_size")
    heads = config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", heads)
    if head_dim is None and not config.present("head_dim") and hidden % heads:
        config.fail("hidden_size", f"of {hidden} is not a multiple of num_attention_heads ({heads})")
    head_dim = config.integer("head_dim", head_dim or hidden // heads)
    _check_heads(config, "num_key_value_heads", heads, kv_heads)
    _check_even(config, "head_dim", head_dim)
    return Geometry(
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=config.integer("intermediate_size"),
        layers=config.integer("num_hidden_layers", most=10_000),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=config.number("rms_norm_eps", above=0),
        max_position=config.integer("max_position_embeddings"),
        tied=config.boolean("tie_word_embeddings", tied),
    )


def geometry_from_gguf(config: Fields, source: WeightSource) -> Geometry:
    """The vocabulary is what the embedding tensor holds; a file without output.weight has tied embeddings."""
    hidden = config.integer("embedding_length")
    heads = config.uniform_integer("attention.head_count")
    kv_heads = config.uniform_integer("attention.head_count_kv", heads)
    if not config.present("attention.key_length") and hidden % heads:
        config.fail("embedding_length", f"of {hidden} is not a multiple of attention.head_count ({heads})")
    head_dim = config.integer("attention.key_length", hidden // heads)
    _check_heads(config, "attention.head_count_kv", heads, kv_heads)
    _check_even(config, "attention.key_length", head_dim)
    if config.integer("attention.value_length", head_dim) != head_dim:
        config.fail(
            "attention.value_length", f"differs from the key length ({head_dim}); this is not supported"
        )
    embedding = source.tensor("token_embd.weight").shape
    if len(embedding) != 2 or embedding[1] != hidden:
        config.fail("embedding_length", f"is {hidden}, but token_embd.weight is {embedding}")
    return Geometry(
        vocab_size=embedding[0],
        hidden_size=hidden,
        intermediate_size=config.uniform_integer("feed_forward_length"),
        layers=config.integer("block_count", most=10_000),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=config.number("attention.layer_norm_rms_epsilon", above=0),
        max_position=config.integer("context_length"),
        tied="output.weight" not in source,
    )


def activation(config: Fields, key: str, default: str) -> Activation:
    name = config.text(key, default)
    if name not in ACTIVATIONS:
        config.fail(key, f"is {name!r}, known are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def layer_windows(
    config: Fields, layers: int, window: int | None, default: list[bool]
) -> tuple[int | None, ...]:
    """Each layer's sliding window, by `layer_types` or else by `default` (True: sliding)."""
    types = config.raw("layer_types")
    if types is None:
        sliding = default
    else:
        known = ("full_attention", "sliding_attention")
        if not isinstance(types, list) or len(types) != layers or any(item not in known for item in types):
            config.fail("layer_types", f"must be a list of {layers} of {' and '.join(known)}, got {types!r}")
        sliding = [item == "sliding_attention" for item in types]
    if any(sliding) and window is None:
        config.fail("sliding_window", "is missing, but some layers are of type sliding_attention")
    return tuple(window if slides else None for slides in sliding)


def upper_layer_windows(config: Fields, layers: int) -> tuple[int | None, ...]:
    """Qwen's rule: where `use_sliding_window` is on, the layers from `max_window_layers` up slide."""
    first = config.integer("max_window_layers", 28, least=0)
    if not config.boolean("use_sliding_window", False):
        return layer_windows(config, layers, None, [False] * layers)
    window = config.integer("sliding_window", 4096)
    return layer_windows(config, layers, window, [i >= first for i in range(layers)])


def _check_heads(config: Fields, key: str, heads: int, kv_heads: int) -> None:
    if heads % kv_heads:
        config.fail(key, f"of {kv_heads} does not divide the {heads} query heads")


def _check_even(config: Fields, key: str, head_dim: int) -> None:
    if head_dim % 2:
        config.fail(key, f"gives heads of {head_dim} columns; rotary embeddings need an even number")
