"""Gemma 2: norms before and after each block, GeGLU, soft caps, every other layer with a sliding window.

(Gemma Team 2024.) Gemma's norms multiply by 1 + weight. Hugging Face files store the weight, GGUF files store
the sum; both become a Program with plain norms, the 1 being added when a Hugging Face file is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from fourfold.models.binding import Binding
from fourfold.models.blocks import gated_mlp, head, qkv, start
from fourfold.models.config_fields import Fields
from fourfold.models.geometry import (
    GGUF_HARMLESS,
    Geometry,
    activation,
    geometry_from_gguf,
    geometry_from_hf,
    layer_windows,
)
from fourfold.models.names import GGUF_FUSED, GGUF_NAMES, HF_NAMES, bind, with_norms_plus_one
from fourfold.models.rope import Rope
from fourfold.models.rope_config import rope_from_gguf, rope_from_hf
from fourfold.program.ops import Activation, Program, WeightSpec
from fourfold.weights.source import WeightSource

HF: Final = {
    **HF_NAMES,
    "layers.{i}.post_attn_norm": "model.layers.{i}.post_attention_layernorm",
    "layers.{i}.mlp_norm": "model.layers.{i}.pre_feedforward_layernorm",
    "layers.{i}.post_mlp_norm": "model.layers.{i}.post_feedforward_layernorm",
}

LAYERS_OF_27B: Final = 46
"""The one size whose attention scale is (hidden_size / heads)^-0.5; GGUF files do not state it."""


class Gemma2Config(msgspec.Struct, frozen=True):
    """scale: on q·k.  windows: each layer's sliding window in tokens, None for full attention."""

    geometry: Geometry
    rope: Rope
    act: Activation
    windows: tuple[int | None, ...]
    scale: float
    attention_softcap: float | None
    logits_softcap: float | None
    bias: bool

    @staticmethod
    def from_hf(config: Fields, max_model_len: int | None) -> Gemma2Config:
        g = geometry_from_hf(config, tied=True, head_dim=256)
        window = config.integer("sliding_window", 4096)
        return Gemma2Config(
            geometry=g,
            rope=rope_from_hf(
                config, head_dim=g.head_dim, max_position=g.max_position, max_model_len=max_model_len
            ),
            act=activation(config, "hidden_activation", "gelu_pytorch_tanh"),
            windows=layer_windows(config, g.layers, window, [i % 2 == 0 for i in range(g.layers)]),
            scale=config.number("query_pre_attn_scalar", 256, above=0) ** -0.5,
            attention_softcap=config.optional_number("attn_logit_softcapping", absent=50.0, above=0),
            logits_softcap=config.optional_number("final_logit_softcapping", absent=30.0, above=0),
            bias=config.boolean("attention_bias", False),
        )

    @staticmethod
    def from_gguf(config: Fields, source: WeightSource, max_model_len: int | None) -> Gemma2Config:
        g = geometry_from_gguf(config, source)
        rope = rope_from_gguf(
            config, source, head_dim=g.head_dim, max_position=g.max_position, max_model_len=max_model_len
        )
        window = config.integer("attention.sliding_window", 4096)
        per_head = g.hidden_size / g.heads if g.layers == LAYERS_OF_27B else g.head_dim
        made = Gemma2Config(
            geometry=g,
            rope=rope,
            act="gelu_tanh",
            windows=tuple(window if i % 2 == 0 else None for i in range(g.layers)),
            scale=per_head**-0.5,
            attention_softcap=config.optional_number("attn_logit_softcapping", absent=50.0, above=0),
            logits_softcap=config.optional_number("final_logit_softcapping", absent=30.0, above=0),
            bias=False,
        )
        config.refuse_unread(GGUF_HARMLESS)
        return made


def trace(config: Gemma2Config) -> Program:
    g = config.geometry
    t = start("gemma2", g, config.rope)
    h = t.embed("embed.weight", scale=g.hidden_size**0.5)
    for i in range(g.layers):
        x = t.norm(h, f"layers.{i}.attn_norm.weight", g.norm_eps)
        q, k, v = qkv(t, x, f"layers.{i}", g, bias=config.bias)
        q, k = t.rope(q, g.heads, config.rope.spec), t.rope(k, g.kv_heads, config.rope.spec)
        x = t.attention(
            *(q, k, v),
            layer=i,
            heads=g.heads,
            kv_heads=g.kv_heads,
            scale=config.scale,
            window=config.windows[i],
            softcap=config.attention_softcap,
        )
        x = t.linear(x, f"layers.{i}.o", g.hidden_size, bias=config.bias)
        h = t.add(h, t.norm(x, f"layers.{i}.post_attn_norm.weight", g.norm_eps))
        x = t.norm(h, f"layers.{i}.mlp_norm.weight", g.norm_eps)
        x = gated_mlp(t, x, f"layers.{i}", g, config.act)
        h = t.add(h, t.norm(x, f"layers.{i}.post_mlp_norm.weight", g.norm_eps))
    head(t, h, g, softcap=config.logits_softcap)
    return t.finish()


def bindings(
    config: Gemma2Config, weights: Mapping[str, WeightSpec], source: WeightSource
) -> dict[str, Binding]:
    if source.kind == "hf":
        return with_norms_plus_one(bind(weights, HF, source))
    return bind(weights, GGUF_NAMES, source, GGUF_FUSED)
