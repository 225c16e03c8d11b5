"""Llama 2 and 3, SmolLM and SmolLM2, Mistral: pre-norm decoder with grouped-query attention and SwiGLU.

(Touvron et al. 2023; Jiang et al. 2023 for Mistral's sliding window.)
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

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
from fourfold.models.names import GGUF_FUSED, GGUF_NAMES, HF_NAMES, bind
from fourfold.models.rope import Rope
from fourfold.models.rope_config import rope_from_gguf, rope_from_hf
from fourfold.program.ops import Activation, Program, Value, WeightSpec
from fourfold.program.trace import Tracer
from fourfold.weights.source import WeightSource


class LlamaConfig(msgspec.Struct, frozen=True):
    """windows: each layer's sliding window in tokens, None for full attention."""

    geometry: Geometry
    rope: Rope
    act: Activation
    windows: tuple[int | None, ...]
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool

    @staticmethod
    def from_hf(config: Fields, max_model_len: int | None) -> LlamaConfig:
        g = geometry_from_hf(config)
        mistral = config.text("model_type") == "mistral"
        # A Llama config may carry a sliding_window that its own code never reads; Mistral's default is 4096.
        window = None
        if mistral and ("sliding_window" not in config.data or config.present("sliding_window")):
            window = config.integer("sliding_window", 4096)
        bias = config.boolean("attention_bias", False)
        return LlamaConfig(
            geometry=g,
            rope=rope_from_hf(
                config, head_dim=g.head_dim, max_position=g.max_position, max_model_len=max_model_len
            ),
            act=activation(config, "hidden_act", "silu"),
            windows=layer_windows(config, g.layers, window, [window is not None] * g.layers),
            qkv_bias=bias,
            o_bias=bias,
            mlp_bias=config.boolean("mlp_bias", False),
        )

    @staticmethod
    def from_gguf(config: Fields, source: WeightSource, max_model_len: int | None) -> LlamaConfig:
        g = geometry_from_gguf(config, source)
        if config.integer("rope.dimension_count", g.head_dim) != g.head_dim:
            config.fail("rope.dimension_count", f"must be the head size ({g.head_dim}) in this architecture")
        rope = rope_from_gguf(
            config, source, head_dim=g.head_dim, max_position=g.max_position, max_model_len=max_model_len
        )
        window = config.integer("attention.sliding_window", 0, least=0) or None
        config.refuse_unread(GGUF_HARMLESS)
        return LlamaConfig(
            geometry=g,
            rope=rope,
            act="silu",
            windows=(window,) * g.layers,
            qkv_bias="blk.0.attn_q.bias" in source or "blk.0.attn_qkv.bias" in source,
            o_bias="blk.0.attn_output.bias" in source,
            mlp_bias="blk.0.ffn_gate.bias" in source,
        )


def trace(config: LlamaConfig) -> Program:
    g = config.geometry
    t = start("llama", g, config.rope)
    h = t.embed("embed.weight")
    for i in range(g.layers):
        h = t.add(h, _attention(t, t.norm(h, f"layers.{i}.attn_norm.weight", g.norm_eps), i, config))
        x = t.norm(h, f"layers.{i}.mlp_norm.weight", g.norm_eps)
        h = t.add(h, gated_mlp(t, x, f"layers.{i}", g, config.act, bias=config.mlp_bias))
    head(t, h, g)
    return t.finish()


def _attention(t: Tracer, x: Value, i: int, config: LlamaConfig) -> Value:
    g = config.geometry
    q, k, v = qkv(t, x, f"layers.{i}", g, bias=config.qkv_bias)
    q, k = t.rope(q, g.heads, config.rope.spec), t.rope(k, g.kv_heads, config.rope.spec)
    x = t.attention(
        *(q, k, v),
        layer=i,
        heads=g.heads,
        kv_heads=g.kv_heads,
        scale=g.head_dim**-0.5,
        window=config.windows[i],
    )
    return t.linear(x, f"layers.{i}.o", g.hidden_size, bias=config.o_bias)


def bindings(
    config: LlamaConfig, weights: Mapping[str, WeightSpec], source: WeightSource
) -> dict[str, Binding]:
    """GGUF files of this architecture hold the rows of q and k with each head's rotary pairs interleaved."""
    if source.kind == "hf":
        return bind(weights, HF_NAMES, source)
    bound = bind(weights, GGUF_NAMES, source, GGUF_FUSED)
    heads = {"q": config.geometry.heads, "k": config.geometry.kv_heads}
    for name, binding in bound.items():
        part = name.split(".")[-2]
        if part in heads:
            bound[name] = replace(binding, interleaved_heads=heads[part])
    return bound
