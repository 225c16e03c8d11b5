"""From a Program's weight names to a checkpoint's tensors.

A Program weight is `stem.suffix` with the layer number in the stem: layers.3.q.bias. A name table maps stems,
with {i} for the layer, to the checkpoint's. A family's table stands in its own file, built on these two.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from msgspec.structs import replace

from fourfold.errors import LoadError
from fourfold.models.binding import Binding
from fourfold.program.ops import WeightSpec
from fourfold.weights.source import WeightSource

Names = Mapping[str, str]

HF_NAMES: Final[Names] = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "layers.{i}.attn_norm": "model.layers.{i}.input_layernorm",
    "layers.{i}.q": "model.layers.{i}.self_attn.q_proj",
    "layers.{i}.k": "model.layers.{i}.self_attn.k_proj",
    "layers.{i}.v": "model.layers.{i}.self_attn.v_proj",
    "layers.{i}.q_norm": "model.layers.{i}.self_attn.q_norm",
    "layers.{i}.k_norm": "model.layers.{i}.self_attn.k_norm",
    "layers.{i}.o": "model.layers.{i}.self_attn.o_proj",
    "layers.{i}.mlp_norm": "model.layers.{i}.post_attention_layernorm",
    "layers.{i}.gate": "model.layers.{i}.mlp.gate_proj",
    "layers.{i}.up": "model.layers.{i}.mlp.up_proj",
    "layers.{i}.down": "model.layers.{i}.mlp.down_proj",
}

GGUF_NAMES: Final[Names] = {
    "embed": "token_embd",
    "norm": "output_norm",
    "head": "output",
    "layers.{i}.attn_norm": "blk.{i}.attn_norm",
    "layers.{i}.q": "blk.{i}.attn_q",
    "layers.{i}.k": "blk.{i}.attn_k",
    "layers.{i}.v": "blk.{i}.attn_v",
    "layers.{i}.q_norm": "blk.{i}.attn_q_norm",
    "layers.{i}.k_norm": "blk.{i}.attn_k_norm",
    "layers.{i}.o": "blk.{i}.attn_output",
    "layers.{i}.post_attn_norm": "blk.{i}.post_attention_norm",
    "layers.{i}.mlp_norm": "blk.{i}.ffn_norm",
    "layers.{i}.gate": "blk.{i}.ffn_gate",
    "layers.{i}.up": "blk.{i}.ffn_up",
    "layers.{i}.down": "blk.{i}.ffn_down",
    "layers.{i}.post_mlp_norm": "blk.{i}.post_ffw_norm",
}

GGUF_FUSED: Final[Mapping[str, tuple[str, ...]]] = {"blk.{i}.attn_qkv": ("q", "k", "v")}
"""Stacked tensors a GGUF file may have instead of separate ones, and their parts in order of rows."""


def bind(
    weights: Mapping[str, WeightSpec],
    names: Names,
    source: WeightSource,
    fused: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
) -> dict[str, Binding]:
    """The source of every Program weight; a fused tensor gives its parts as row ranges.

    fused: checkpoint stem with {i} → the layer's stems it stacks, used where the file has it.
    Raises LoadError naming file and tensor when one is missing.
    """
    return {name: _bind_one(name, weights, names, source, fused) for name in weights}


def with_prefix(names: Names, old: str, new: str) -> Names:
    """The table for a checkpoint that keeps `old.*` under `new.*`."""
    return {
        k: f"{new}.{v.removeprefix(old + '.')}" if v.startswith(f"{old}.") else v for k, v in names.items()
    }


def with_norms_plus_one(bindings: dict[str, Binding]) -> dict[str, Binding]:
    """Norm weights of a family that multiplies by 1 + weight."""
    return {k: replace(b, add=1.0) if k.endswith("norm.weight") else b for k, b in bindings.items()}


def _bind_one(
    name: str,
    weights: Mapping[str, WeightSpec],
    names: Names,
    source: WeightSource,
    fused: Mapping[str, tuple[str, ...]],
) -> Binding:
    stem, suffix = name.rsplit(".", 1)
    match = re.fullmatch(r"layers\.(\d+)\.(\w+)", stem)
    layer, part = (match[1], match[2]) if match else ("", stem)
    for stacked, parts in fused.items():
        tensor = f"{stacked.format(i=layer)}.{suffix}"
        if match and part in parts and tensor in source:
            sizes = [weights[f"layers.{layer}.{other}.{suffix}"].shape[0] for other in parts]
            at = parts.index(part)
            return Binding(tensor, sum(sizes[:at]), sizes[at])
    pattern = f"layers.{{i}}.{part}" if match else stem
    tensor = f"{names[pattern].format(i=layer)}.{suffix}"
    if tensor not in source:
        near = difflib.get_close_matches(tensor, list(source.names()), 1)
        hint = f"; the nearest it has is {near[0]}" if near else ""
        raise LoadError(f"{source.path}: tensor {tensor} is missing{hint}")
    return Binding(tensor)
