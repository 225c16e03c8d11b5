"""What config.json says about fp8 weights, and where each of them has its scales.

Known are `quant_method` "fp8" (transformers' fine-grained FP8 and DeepSeek's: a scale per block of 128 x 128;
or one per tensor) and compressed-tensors' "float-quantized" (a scale per tensor, row or block). Scales and
zero points of activations and of the KV cache are not needed: neither is fp8 here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from fourfold.errors import LoadError
from fourfold.models.binding import Binding, WeightScale
from fourfold.models.config_fields import Fields
from fourfold.weights.source import WeightSource

UNUSED_SCALES: Final = re.compile(r".*\.(input_scale|k_scale|v_scale)")
"""Tensors of fp8 checkpoints for the quantization of activations and KV."""

_SUFFIXES: Final = ("_scale_inv", "_scale")
"""What a weight's name is continued by in its scale's; both are multiplied with, in spite of the first."""
_FORMATS: Final = ("F8_E4M3", "F8_E5M2")
_HARMLESS: Final = (
    "activation_scheme",
    "fmt",
    "global_compression_ratio",
    "ignore",
    "ignored_layers",
    "kv_cache_scheme",
    "modules_to_not_convert",
    "quantization_status",
    "scale_fmt",
    "version",
)
_WEIGHTS: Final[dict[str, tuple[object, ...]]] = {
    "num_bits": (8,),
    "type": ("float",),
    "strategy": ("tensor", "channel", "block"),
    "symmetric": (None, True),
    "dynamic": (None, False),
}
_NEUTRAL: Final[dict[str, tuple[object, ...]]] = {"sparsity_config": ({},), "transform_config": ({},)}


class Fp8Scheme(msgspec.Struct, frozen=True):
    """block: rows and columns that share a scale, where the scales are as many as such blocks."""

    block: tuple[int, int] = (128, 128)


def fp8_scheme(config: Fields) -> Fp8Scheme | None:
    """None for weights that are not quantized. Raises LoadError naming what is not understood."""
    section = config.section("quantization_config")
    if section is None:
        return None
    method = section.text("quant_method")
    if method == "fp8":
        scheme = Fp8Scheme(_block(section, "weight_block_size"))
    elif method == "compressed-tensors" and section.text("format", "") == "float-quantized":
        scheme = _compressed(section)
    else:
        config.fail(
            "quantization_config",
            f"is {dict(config.raw('quantization_config'))!r:.300}; supported are quant_method 'fp8' and "
            "'compressed-tensors' with format 'float-quantized'",
        )
    section.refuse(_NEUTRAL)
    section.refuse_unread(_HARMLESS)
    return scheme


def with_scales(
    bindings: Mapping[str, Binding], source: WeightSource, scheme: Fp8Scheme
) -> dict[str, Binding]:
    """Raises LoadError when an fp8 weight has no scales, or not as many as its rows or blocks."""
    return {name: _with_scale(binding, source, scheme) for name, binding in bindings.items()}


def _with_scale(binding: Binding, source: WeightSource, scheme: Fp8Scheme) -> Binding:
    raw = source.tensor(binding.source)
    if raw.format not in _FORMATS or len(raw.shape) != 2:
        return binding
    tried = [binding.source + suffix for suffix in _SUFFIXES]
    found = next((name for name in tried if name in source), None)
    if found is None:
        raise LoadError(f"{source.path}: tensor {binding.source} is fp8, but {' or '.join(tried)} is missing")
    (n, k), shape = raw.shape, source.tensor(found).shape
    rows, columns = scheme.block
    if shape in ((), (1,), (1, 1)):
        rows, columns = n, k
    elif shape in ((n,), (n, 1)):
        rows, columns = 1, k
    elif shape != (-(-n // rows), -(-k // columns)):
        raise LoadError(
            f"{source.path}: tensor {found} of shape {shape} must have one scale, one for each of the {n} "
            f"rows of {binding.source}, or one for each of its blocks of {rows} x {columns}"
        )
    return replace(binding, scale=WeightScale(found, rows, columns))


def _compressed(section: Fields) -> Fp8Scheme:
    groups = section.section("config_groups")
    if groups is None:
        section.fail("config_groups", "is missing")
    blocks = {_compressed_group(groups, name) for name in groups.data}
    if len(blocks) != 1:
        section.fail("config_groups", f"have blocks of different sizes ({sorted(blocks)})")
    return Fp8Scheme(blocks.pop())


def _compressed_group(groups: Fields, prefixed: str) -> tuple[int, int]:
    group = groups.section(prefixed.removeprefix(groups.prefix))
    weights = group and group.section("weights")
    if not weights:
        groups.fail(prefixed.removeprefix(groups.prefix), "has no weights")
    block = _block(weights, "block_structure")
    for key, wanted in _WEIGHTS.items():
        value = weights.raw(key)
        if value not in wanted:
            known = ", ".join(repr(each) for each in wanted if each is not None)
            weights.fail(key, f"is {value!r}, supported is {known}")
    weights.refuse_unread((*_WEIGHTS, "observer", "observer_kwargs", "group_size", "actorder", "scale_dtype"))
    return block


def _block(config: Fields, key: str) -> tuple[int, int]:
    value: Any = config.raw(key)
    if value is None:
        return Fp8Scheme().block
    sizes = value if isinstance(value, list | tuple) else ()
    if len(sizes) != 2 or not all(isinstance(s, int) and 0 < s < 2**31 and s % 4 == 0 for s in sizes):
        config.fail(key, f"must be two multiples of 4, got {value!r}")
    return int(sizes[0]), int(sizes[1])
