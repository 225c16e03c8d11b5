"""Gemma 3 (text): norms before and after each block and on the heads of q and k, GeGLU, five layers with a
sliding window and their own rotary base for each one with full attention.

(Gemma Team 2025.) Norm weights are treated as in Gemma 2: plain norms in the Program, the 1 of `1 + weight`
added when a Hugging Face file is loaded. The vision tower of the larger sizes is left out: text only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from fourfold.models import rope
from fourfold.models.binding import Binding
from fourfold.models.blocks import gated_mlp, head, qkv, start
from fourfold.models.config_fields import Fields
from fourfold.models.gemma2 import HF as GEMMA2_HF
from fourfold.models.geometry import (
    GGUF_HARMLESS,
    Geometry,
    activation,
    geometry_from_gguf,
    geometry_from_hf,
    layer_windows,
)
from fourfold.models.names import GGUF_FUSED, GGUF_NAMES, bind, with_norms_plus_one, with_prefix
from fourfold.models.rope import Rope
from fourfold.models.rope_config import rope_from_gguf, rope_from_hf
from fourfold.program.ops import Activation, Program, WeightSpec
from fourfold.weights.source import WeightSource

DEFAULTS: Final[dict[str, Any]] = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
}
"""transformers' defaults: the text_config of published multimodal checkpoints leaves most keys out."""

HF_PREFIXES: Final = ("model", "language_model.model", "model.language_model")
"""Where the text model may stand: alone, or inside the multimodal one (older and newer naming)."""

PATTERN: Final = 6
LOCAL_THETA: Final = 10_000.0
"""Every sixth layer is global, and local layers rotate with this base; GGUF files need not say so."""

LAYERS_OF_27B: Final = 62
"""The one size whose attention scale is (hidden_size / heads)^-0.5; GGUF files do not state it."""


class Gemma3Config(msgspec.Struct, frozen=True):
    """rope: of the layers with full attention; local_rope: of those with a window.  scale: on q·k."""

    geometry: Geometry
    rope: Rope
    local_rope: Rope
    act: Activation
    windows: tuple[int | None, ...]
    scale: float
    logits_softcap: float | None
    bias: bool

    @staticmethod
    def from_hf(config: Fields, max_model_len: int | None) -> Gemma3Config:
        text = (config.section("text_config") or config).filled(DEFAULTS)
        g = geometry_from_hf(text, tied=config.boolean("tie_word_embeddings", True))
        text.refuse({"attn_logit_softcapping": ()})
        pattern = text.integer("sliding_window_pattern", PATTERN)
        window = text.integer("sliding_window")
        sliding = [(i + 1) % pattern != 0 for i in range(g.layers)]
        return Gemma3Config(
            geometry=g,
            rope=rope_from_hf(
                text,
                head_dim=g.head_dim,
                max_position=g.max_position,
                max_model_len=max_model_len,
                theta=1_000_000.0,
                layer_type="full_attention",
            ),
            local_rope=rope_from_hf(
                text,
                head_dim=g.head_dim,
                max_position=g.max_position,
                max_model_len=max_model_len,
                theta=LOCAL_THETA,
                theta_key="rope_local_base_freq",
                layer_type="sliding_attention",
            ),
            act=activation(text, "hidden_activation", "gelu_pytorch_tanh"),
            windows=layer_windows(text, g.layers, window, sliding),
            scale=text.number("query_pre_attn_scalar", 256, above=0) ** -0.5,
            logits_softcap=text.optional_number("final_logit_softcapping", above=0),
            bias=text.boolean("attention_bias", False),
        )

    @staticmethod
    def from_gguf(config: Fields, source: WeightSource, max_model_len: int | None) -> Gemma3Config:
        g = geometry_from_gguf(config, source)
        made = rope_from_gguf(
            config, source, head_dim=g.head_dim, max_position=g.max_position, max_model_len=max_model_len
        )
        # A scaling factor in the file is for the global layers; local ones never look far.
        local = rope.default(
            config.number("rope.freq_base_swa", LOCAL_THETA, above=1), g.head_dim, g.max_position
        )
        window = config.integer("attention.sliding_window", 0, least=0) or None
        sliding = _gguf_pattern(config, g.layers)
        softcap = config.optional_number("final_logit_softcapping")
        per_head = g.hidden_size / g.heads if g.layers == LAYERS_OF_27B else g.head_dim
        config.refuse_unread(GGUF_HARMLESS)
        return Gemma3Config(
            geometry=g,
            rope=made,
            local_rope=local,
            act="gelu_tanh",
            windows=tuple(window if slides else None for slides in sliding),
            scale=per_head**-0.5,
            logits_softcap=softcap or None,
            bias=False,
        )


def _gguf_pattern(config: Fields, layers: int) -> list[bool]:
    """Which layers slide: every n-th does not (an integer), or one flag per layer."""
    key = "attention.sliding_window_pattern"
    value = config.raw(key)
    if value is None or isinstance(value, int):
        pattern = config.integer(key, PATTERN)
        return [(i + 1) % pattern != 0 for i in range(layers)]
    flags = [bool(flag) for flag in value]
    if len(flags) != layers:
        config.fail(key, f"must be one integer or {layers} flags, got {len(flags)}")
    return flags


def trace(config: Gemma3Config) -> Program:
    g = config.geometry
    t = start("gemma3", g, config.rope)
    t.note("rope of sliding layers", config.local_rope.note)
    h = t.embed("embed.weight", scale=g.hidden_size**0.5)
    for i, window in enumerate(config.windows):
        spec = (config.rope if window is None else config.local_rope).spec
        x = t.norm(h, f"layers.{i}.attn_norm.weight", g.norm_eps)
        q, k, v = qkv(t, x, f"layers.{i}", g, bias=config.bias)
        q = t.norm(q, f"layers.{i}.q_norm.weight", g.norm_eps, heads=g.heads)
        k = t.norm(k, f"layers.{i}.k_norm.weight", g.norm_eps, heads=g.kv_heads)
        x = t.attention(
            *(t.rope(q, g.heads, spec), t.rope(k, g.kv_heads, spec), v),
            layer=i,
            heads=g.heads,
            kv_heads=g.kv_heads,
            scale=config.scale,
            window=window,
        )
        x = t.linear(x, f"layers.{i}.o", g.hidden_size, bias=config.bias)
        h = t.add(h, t.norm(x, f"layers.{i}.post_attn_norm.weight", g.norm_eps))
        x = t.norm(h, f"layers.{i}.mlp_norm.weight", g.norm_eps)
        x = gated_mlp(t, x, f"layers.{i}", g, config.act)
        h = t.add(h, t.norm(x, f"layers.{i}.post_mlp_norm.weight", g.norm_eps))
    head(t, h, g, softcap=config.logits_softcap)
    return t.finish()


def bindings(
    config: Gemma3Config, weights: Mapping[str, WeightSpec], source: WeightSource
) -> dict[str, Binding]:
    if source.kind == "gguf":
        return bind(weights, GGUF_NAMES, source, GGUF_FUSED)
    prefix = next((p for p in HF_PREFIXES if f"{p}.embed_tokens.weight" in source), HF_PREFIXES[0])
    return with_norms_plus_one(bind(weights, with_prefix(GEMMA2_HF, "model", prefix), source))
