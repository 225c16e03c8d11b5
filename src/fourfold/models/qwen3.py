"""Qwen3 (dense): as Llama, with an RMSNorm on each head of q and k, and a head size of its own.

(Yang et al. 2025, Qwen3 technical report.)
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


class Qwen3Config(msgspec.Struct, frozen=True):
    """windows: each layer's sliding window in tokens, None for full attention."""

    geometry: Geometry
    rope: Rope
    act: Activation
    windows: tuple[int | None, ...]
    qkv_bias: bool
    o_bias: bool

    @staticmethod
    def from_hf(config: Fields, max_model_len: int | None) -> Qwen3Config:
        g = geometry_from_hf(config, head_dim=128)
        rope = rope_from_hf(
            config, head_dim=g.head_dim, max_position=g.max_position, max_model_len=max_model_len
        )
        act = activation(config, "hidden_act", "silu")
        bias = config.boolean("attention_bias", False)
        return Qwen3Config(g, rope, act, upper_layer_windows(config, g.layers), bias, bias)

    @staticmethod
    def from_gguf(config: Fields, source: WeightSource, max_model_len: int | None) -> Qwen3Config:
        g = geometry_from_gguf(config, source)
        rope = rope_from_gguf(
            config, source, head_dim=g.head_dim, max_position=g.max_position, max_model_len=max_model_len
        )
        config.refuse_unread(GGUF_HARMLESS)
        return Qwen3Config(
            geometry=g,
            rope=rope,
            act="silu",
            windows=(None,) * g.layers,
            qkv_bias="blk.0.attn_q.bias" in source or "blk.0.attn_qkv.bias" in source,
            o_bias="blk.0.attn_output.bias" in source,
        )


def trace(config: Qwen3Config) -> Program:
    g = config.geometry
    t = start("qwen3", g, config.rope)
    h = t.embed("embed.weight")
    for i in range(g.layers):
        x = t.norm(h, f"layers.{i}.attn_norm.weight", g.norm_eps)
        q, k, v = qkv(t, x, f"layers.{i}", g, bias=config.qkv_bias)
        q = t.norm(q, f"layers.{i}.q_norm.weight", g.norm_eps, heads=g.heads)
        k = t.norm(k, f"layers.{i}.k_norm.weight", g.norm_eps, heads=g.kv_heads)
        q, k = t.rope(q, g.heads, config.rope.spec), t.rope(k, g.kv_heads, config.rope.spec)
        x = t.attention(
            *(q, k, v),
            layer=i,
            heads=g.heads,
            kv_heads=g.kv_heads,
            scale=g.head_dim**-0.5,
            window=config.windows[i],
        )
        h = t.add(h, t.linear(x, f"layers.{i}.o", g.hidden_size, bias=config.o_bias))
        x = t.norm(h, f"layers.{i}.mlp_norm.weight", g.norm_eps)
        h = t.add(h, gated_mlp(t, x, f"layers.{i}", g, config.act))
    head(t, h, g)
    return t.finish()


def bindings(
    config: Qwen3Config, weights: Mapping[str, WeightSpec], source: WeightSource
) -> dict[str, Binding]:
    if source.kind == "hf":
        return bind(weights, HF_NAMES, source)
    return bind(weights, GGUF_NAMES, source, GGUF_FUSED)
