"""Which rotary variant a checkpoint asks for, read from config.json or from a GGUF file."""

from __future__ import annotations

import difflib
from typing import Final, Literal, TypeAlias, get_args

import numpy as np

from fourfold.errors import LoadError
from fourfold.models import rope
from fourfold.models.config_fields import Fields
from fourfold.models.rope import KINDS, Kind, Rope
from fourfold.weights.source import WeightSource

LayerType: TypeAlias = Literal["full_attention", "sliding_attention"]

HF_KEYS: Final = frozenset(
    [
        "rope_type",
        "type",
        "rope_theta",
        "partial_rotary_factor",
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "short_factor",
        "long_factor",
        "low_freq_factor",
        "high_freq_factor",
        "mscale",
        "mscale_all_dim",
        "truncate",
        "finetuned",
    ]
)


def rope_from_hf(
    config: Fields,
    *,
    head_dim: int,
    max_position: int,
    max_model_len: int | None,
    theta: float = 10_000.0,
    theta_key: str = "rope_theta",
    layer_type: LayerType | None = None,
    su_names: tuple[str, ...] = ("su",),
    original: int | None = None,
) -> Rope:
    """From `rope_parameters` (transformers 5; perhaps one per layer type) or `rope_scaling` and `rope_theta`.

    theta: the family's default.  theta_key: where it stands in the older flat form.
    layer_type: whose parameters to take when there is one mapping per type; a single mapping counts for
    full attention only.  su_names: names that mean longrope in this family.
    original: the family's default of original_max_position_embeddings.
    Raises LoadError naming the key for an unknown variant, an unknown key inside the mapping, or a bad value.
    """
    parameters = config.section("rope_parameters") or config.section("rope_scaling")
    if parameters is not None and layer_type is not None:
        if any(parameters.present(known) for known in get_args(LayerType)):
            parameters = parameters.section(layer_type)
        elif layer_type != "full_attention":
            parameters = None
    if parameters is None:
        parameters = Fields(config.path, {}, "rope_parameters.")
    for key in parameters.data:
        name = key.removeprefix(parameters.prefix)
        if name not in HF_KEYS:
            parameters.fail(name, "is not a known rope parameter, so it cannot be ignored")

    kind = _hf_kind(parameters, su_names)
    theta = parameters.number("rope_theta", config.number(theta_key, theta, above=1), above=1)
    partial = parameters.number(
        "partial_rotary_factor", config.number("partial_rotary_factor", 1.0, above=0), above=0
    )
    dim = int(head_dim * partial)
    if dim < 2 or dim % 2 or dim > head_dim:
        parameters.fail(
            "partial_rotary_factor", f"of {partial} rotates {dim} of {head_dim} columns; must be even"
        )
    if original is None:
        original = parameters.integer("original_max_position_embeddings", max_position)
    original = config.integer("original_max_position_embeddings", original)

    match kind:
        case "default":
            return rope.default(theta, dim, max_position)
        case "linear":
            return rope.linear(theta, dim, parameters.number("factor", least=1), max_position)
        case "dynamic":
            if dim == 2:
                parameters.fail("rope_type", "'dynamic' needs more than 2 rotated columns")
            factor = parameters.number("factor", least=1)
            return rope.dynamic(theta, dim, factor, max_position, max_model_len)
        case "llama3":
            return _llama3(parameters, theta, dim, original, max_position)
        case "yarn":
            return _yarn(parameters, theta, dim, original, max_position)
        case "longrope":
            factor = parameters.number("factor", max_position / original, above=0)
            scale = parameters.optional_number("attention_factor", above=0)
            return rope.longrope(
                theta,
                dim,
                parameters.numbers("short_factor", dim // 2),
                parameters.numbers("long_factor", dim // 2),
                original,
                rope.longrope_attention_factor(factor, original) if scale is None else scale,
                max_position,
                max_model_len,
            )


def _hf_kind(parameters: Fields, su_names: tuple[str, ...]) -> Kind:
    def known(key: str) -> Kind | None:
        name = parameters.raw(key)
        if name is None:
            return None
        if name in su_names:
            return "longrope"
        for kind in KINDS:
            if name == kind:
                return kind
        near = difflib.get_close_matches(str(name), KINDS, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        parameters.fail(key, f"is {name!r}, known are {', '.join(KINDS)} and su{hint}")

    new, old = known("rope_type"), known("type")
    if new is not None and old is not None and new != old:
        parameters.fail("rope_type", f"is {new!r} but type is {old!r}; they must agree")
    return new or old or "default"


def _llama3(parameters: Fields, theta: float, dim: int, original: int, max_position: int) -> Rope:
    low = parameters.number("low_freq_factor", above=0)
    high = parameters.number("high_freq_factor", above=low)
    factor = parameters.number("factor", least=1)
    return rope.llama3(theta, dim, factor, low, high, original, max_position)


def _yarn(parameters: Fields, theta: float, dim: int, original: int, max_position: int) -> Rope:
    factor = parameters.number("factor", max_position / original, least=1)
    scale = parameters.optional_number("attention_factor", above=0)
    mscale, mscale_all = parameters.optional_number("mscale"), parameters.optional_number("mscale_all_dim")
    if scale is None and mscale and mscale_all:
        scale = rope.yarn_attention_factor(factor, mscale) / rope.yarn_attention_factor(factor, mscale_all)
    if parameters.present("original_max_position_embeddings"):
        max_position = max(max_position, int(original * factor))
    return rope.yarn(
        theta,
        dim,
        factor,
        original,
        max_position,
        attention_factor=scale,
        beta_fast=parameters.number("beta_fast", 32.0, above=0),
        beta_slow=parameters.number("beta_slow", 1.0, above=0),
        truncate=parameters.boolean("truncate", True),
    )


def rope_from_gguf(
    config: Fields, source: WeightSource, *, head_dim: int, max_position: int, max_model_len: int | None
) -> Rope:
    """From the `rope.*` keys and, where the file has them, the tensors rope_freqs (Llama 3) or
    rope_factors_short and _long (Phi-3). Raises LoadError naming the key for anything unknown."""
    dim = config.integer("rope.dimension_count", head_dim, least=2, most=head_dim)
    if dim % 2:
        config.fail("rope.dimension_count", f"must be even, got {dim}")
    theta = config.number("rope.freq_base", 10_000.0, above=1)
    factor = (
        config.number("rope.scaling.factor", config.number("rope.scale_linear", 1.0, least=0), least=0) or 1.0
    )
    original = config.integer("rope.scaling.original_context_length", max_position)
    scale = config.number("rope.scaling.attn_factor", 1.0, above=0)
    kind = config.text("rope.scaling.type", "linear")
    if kind not in ("none", "linear", "yarn", "longrope"):
        config.fail("rope.scaling.type", f"is {kind!r}, known are none, linear, yarn and longrope")

    if "rope_factors_long.weight" in source or kind == "longrope":
        short, long = (
            _factors(source, f"rope_factors_{name}.weight", dim // 2) for name in ("short", "long")
        )
        return rope.longrope(theta, dim, short, long, original, scale, max_position, max_model_len)
    if scale != 1.0:
        config.fail("rope.scaling.attn_factor", f"is {scale} without longrope factors; this is not supported")
    has_factors = "rope_freqs.weight" in source
    if kind == "yarn":
        if has_factors:
            config.fail("rope.scaling.type", "is 'yarn' beside a rope_freqs tensor; this is not supported")
        return _gguf_yarn(config, theta, dim, factor, original, max_position)
    if kind == "none" or factor == 1.0:
        made = rope.default(theta, dim, max_position)
    else:
        made = rope.linear(theta, dim, factor, max_position)
    if has_factors:
        made = rope.with_factors(
            made, _factors(source, "rope_freqs.weight", dim // 2), "the rope_freqs tensor"
        )
    return made


def _gguf_yarn(
    config: Fields, theta: float, dim: int, factor: float, original: int, max_position: int
) -> Rope:
    # The converter writes these only when config.json had them; negative means "not set" in such files.
    extrapolation = config.number("rope.scaling.yarn_ext_factor", 1.0)
    if extrapolation not in (1.0, -1.0):
        config.fail("rope.scaling.yarn_ext_factor", f"is {extrapolation}; only 1 is supported")
    log_multiplier = config.number("rope.scaling.yarn_log_multiplier", 0.0)
    given = config.number("rope.scaling.yarn_attn_factor", -1.0)
    scale = given if given > 0 else rope.yarn_attention_factor(factor)
    if log_multiplier:
        scale = rope.yarn_attention_factor(factor) / rope.yarn_attention_factor(factor, log_multiplier)
    if config.present("rope.scaling.original_context_length"):
        max_position = max(max_position, int(original * factor))
    return rope.yarn(
        theta,
        dim,
        factor,
        original,
        max_position,
        attention_factor=scale,
        beta_fast=config.number("rope.scaling.yarn_beta_fast", 32.0, above=0),
        beta_slow=config.number("rope.scaling.yarn_beta_slow", 1.0, above=0),
    )


def _factors(source: WeightSource, name: str, length: int) -> tuple[float, ...]:
    tensor = source.tensor(name)
    if tensor.format != "F32" or tensor.shape != (length,):
        raise LoadError(
            f"{source.path}: {name} must be {length} F32 numbers, got {tensor.format} of shape {tensor.shape}"
        )
    values = np.frombuffer(tensor.data.tobytes(), "<f4")
    if not (np.isfinite(values).all() and (values > 0).all()):
        raise LoadError(f"{source.path}: {name} must hold positive finite numbers")
    return tuple(float(value) for value in values)
