"""Phi-3, Phi-3.5-mini and Phi-4(-mini): as Llama, with q, k, v stacked in one tensor, gate and up in another,
perhaps partial rotation, and longrope in the long-context versions.

(Abdin et al. 2024, Phi-3 technical report.)
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
)
from fourfold.models.names import GGUF_FUSED, GGUF_NAMES, HF_NAMES, bind
from fourfold.models.rope import Rope
from fourfold.models.rope_config import rope_from_gguf, rope_from_hf
from fourfold.program.ops import Activation, Program, WeightSpec
from fourfold.weights.source import WeightSource

HF_FUSED: Final = {
    "model.layers.{i}.self_attn.qkv_proj": ("q", "k", "v"),
    "model.layers.{i}.mlp.gate_up_proj": ("gate", "up"),
}
GGUF_GATE_UP: Final = {"blk.{i}.ffn_up": ("gate", "up")}
"""Phi-3 files keep gate and up stacked under the name of up."""

ORIGINAL_POSITIONS: Final = 4096
"""transformers' default of original_max_position_embeddings for this family."""


class Phi3Config(msgspec.Struct, frozen=True):
    """window: sliding window of every layer in tokens, None for full attention."""

    geometry: Geometry
    rope: Rope
    act: Activation
    window: int | None

    @staticmethod
    def from_hf(config: Fields, max_model_len: int | None) -> Phi3Config:
        g = geometry_from_hf(config)
        # Early Phi-3 configs said "yarn" and meant the per-frequency factors that are now called longrope.
        rope = rope_from_hf(
            config,
            head_dim=g.head_dim,
            max_position=g.max_position,
            max_model_len=max_model_len,
            su_names=("su", "yarn"),
            original=ORIGINAL_POSITIONS,
        )
        window = config.integer("sliding_window") if config.present("sliding_window") else None
        return Phi3Config(g, rope, activation(config, "hidden_act", "silu"), window)

    @staticmethod
    def from_gguf(config: Fields, source: WeightSource, max_model_len: int | None) -> Phi3Config:
        g = geometry_from_gguf(config, source)
        rope = rope_from_gguf(
            config, source, head_dim=g.head_dim, max_position=g.max_position, max_model_len=max_model_len
        )
        window = config.integer("attention.sliding_window", 0, least=0) or None
        config.refuse_unread(GGUF_HARMLESS)
        return Phi3Config(g, rope, "silu", window)


def trace(config: Phi3Config) -> Program:
    g = config.geometry
    t = start("phi3", g, config.rope)
    h = t.embed("embed.weight")
    for i in range(g.layers):
        x = t.norm(h, f"layers.{i}.attn_norm.weight", g.norm_eps)
        q, k, v = qkv(t, x, f"layers.{i}", g)
        q, k = t.rope(q, g.heads, config.rope.spec), t.rope(k, g.kv_heads, config.rope.spec)
        x = t.attention(
            *(q, k, v),
            layer=i,
            heads=g.heads,
            kv_heads=g.kv_heads,
            scale=g.head_dim**-0.5,
            window=config.window,
        )
        h = t.add(h, t.linear(x, f"layers.{i}.o", g.hidden_size))
        x = t.norm(h, f"layers.{i}.mlp_norm.weight", g.norm_eps)
        h = t.add(h, gated_mlp(t, x, f"layers.{i}", g, config.act))
    head(t, h, g)
    return t.finish()


def bindings(
    config: Phi3Config, weights: Mapping[str, WeightSpec], source: WeightSource
) -> dict[str, Binding]:
    if source.kind == "hf":
        return bind(weights, HF_NAMES, source, HF_FUSED)
    stacked = {} if "blk.0.ffn_gate.weight" in source else GGUF_GATE_UP
    return bind(weights, GGUF_NAMES, source, {**GGUF_FUSED, **stacked})
