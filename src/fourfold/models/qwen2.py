"""Qwen2 and Qwen2.5: as Llama, with biases on q, k and v, and perhaps sliding windows in the upper layers.

(Yang et al. 2024, Qwen2 technical report.)
"""

from __future__ import annotations

from collections.abc import Mapping

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
    upper_layer_windows,
)
from fourfold.models.names import GGUF_FUSED, GGUF_NAMES, HF_NAMES, bind
from fourfold.models.rope import Rope
from fourfold.models.rope_config import rope_from_gguf, rope_from_hf
from fourfold.program.ops import Activation, Program, WeightSpec
from fourfold.weights.source import WeightSource


class Qwen2Config(msgspec.Struct, frozen=True):
    """windows: each layer's sliding window in tokens, None for full attention."""

    geometry: Geometry
    rope: Rope
    act: Activation
    windows: tuple[int | None, ...]

    @staticmethod
    def from_hf(config: Fields, max_model_len: int | None) -> Qwen2Config:
        g = geometry_from_hf(config)
        rope = rope_from_hf(
            config, head_dim=g.head_dim, max_position=g.max_position, max_model_len=max_model_len
        )
        act = activation(config, "hidden_act", "silu")
        return Qwen2Config(g, rope, act, upper_layer_windows(config, g.layers))

    @staticmethod
    def from_gguf(config: Fields, source: WeightSource, max_model_len: int | None) -> Qwen2Config:
        g = geometry_from_gguf(config, source)
        rope = rope_from_gguf(
            config, source, head_dim=g.head_dim, max_position=g.max_position, max_model_len=max_model_len
        )
        config.refuse_unread(GGUF_HARMLESS)
        return Qwen2Config(g, rope, "silu", (None,) * g.layers)


def trace(config: Qwen2Config) -> Program:
    g = config.geometry
    t = start("qwen2", g, config.rope)
    h = t.embed("embed.weight")
    for i in range(g.layers):
        x = t.norm(h, f"layers.{i}.attn_norm.weight", g.norm_eps)
        q, k, v = qkv(t, x, f"layers.{i}", g, bias=True)
        q, k = t.rope(q, g.heads, config.rope.spec), t.rope(k, g.kv_heads, config.rope.spec)
        x = t.attention(
            *(q, k, v),
            layer=i,
            heads=g.heads,
            kv_heads=g.kv_heads,
            scale=g.head_dim**-0.5,
            window=config.windows[i],
        )
        h = t.add(h, t.linear(x, f"layers.{i}.o", g.hidden_size))
        x = t.norm(h, f"layers.{i}.mlp_norm.weight", g.norm_eps)
        h = t.add(h, gated_mlp(t, x, f"layers.{i}", g, config.act))
    head(t, h, g)
    return t.finish()


def bindings(
    config: Qwen2Config, weights: Mapping[str, WeightSpec], source: WeightSource
) -> dict[str, Binding]:
    if source.kind == "hf":
        return bind(weights, HF_NAMES, source)
    return bind(weights, GGUF_NAMES, source, GGUF_FUSED)
