"""Rotary embedding variants: parameters → angular frequencies.

- default: theta^(-2i/dim) (Su et al. 2021, RoFormer).
- linear: positions divided by a factor (Chen et al. 2023, position interpolation).
- dynamic: theta grows with the length ("NTK-aware", bloc97 and emozilla 2023).
- llama3: long wavelengths divided by a factor, with a smooth band between (Llama 3.1).
- yarn: interpolation blended with extrapolation per frequency, and an attention factor (Peng et al. 2023).
- longrope, older name su: one factor per frequency, a short and a long set (Ding et al. 2024).

`dynamic` and `longrope` depend on how long the sequence is. Here they depend on the longest the engine admits
(`max_model_len`), decided once at load: the same prompt gives the same answer whatever else runs, and cached
keys never have to be rotated again. A note in the Program says what was decided.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Literal, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from fourfold.program.ops import RopeSpec

Kind: TypeAlias = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]

KINDS: Final[tuple[Kind, ...]] = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")

Frequencies: TypeAlias = NDArray[np.float64]


class Rope(msgspec.Struct, frozen=True):
    """A resolved rotary embedding. note: variant and what was decided, for Program.notes.
    max_position: longest context (tokens) it is good for."""

    spec: RopeSpec
    note: str
    max_position: int


def base_frequencies(theta: float, dim: int) -> Frequencies:
    """theta^(-2i/dim) for i < dim/2, radians per position."""
    return 1.0 / theta ** (np.arange(0, dim, 2, dtype=np.float64) / dim)


def default(theta: float, dim: int, max_position: int) -> Rope:
    return _rope(base_frequencies(theta, dim), 1.0, f"default, theta {theta:g}", max_position)


def linear(theta: float, dim: int, factor: float, max_position: int) -> Rope:
    frequencies = base_frequencies(theta, dim) / factor
    return _rope(frequencies, 1.0, f"linear, theta {theta:g}, factor {factor:g}", max_position)


def dynamic(theta: float, dim: int, factor: float, max_position: int, max_model_len: int | None) -> Rope:
    """theta * (factor * L / trained - (factor - 1))^(dim / (dim - 2)), L the longest sequence admitted."""
    length = max(max_model_len or max_position, max_position)
    scaled = theta * (factor * length / max_position - (factor - 1)) ** (dim / (dim - 2))
    note = f"dynamic NTK, theta {theta:g}, factor {factor:g}, fixed for sequences up to {length} tokens"
    return _rope(base_frequencies(scaled, dim), 1.0, note, length)


def llama3(
    theta: float, dim: int, factor: float, low: float, high: float, original: int, max_position: int
) -> Rope:
    """Wavelengths above original/low are stretched by factor, below original/high kept; a blend between."""
    frequencies = base_frequencies(theta, dim)
    turns = original * frequencies / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    scaled = (1 - smooth) * frequencies / factor + smooth * frequencies
    note = f"llama3, theta {theta:g}, factor {factor:g}, {original} original positions"
    return _rope(scaled, 1.0, note, max_position)


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """Peng et al. 2023, eq. 22: 0.1 · mscale · ln(factor) + 1."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def yarn(
    theta: float,
    dim: int,
    factor: float,
    original: int,
    max_position: int,
    *,
    attention_factor: float | None = None,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
) -> Rope:
    """Peng et al. 2023, section 3.2.

    Columns that turn more than beta_fast times within the original context keep their frequency, those below
    beta_slow are interpolated, with a linear ramp between.
    """

    def correction_dim(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = correction_dim(beta_fast), correction_dim(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / (high - low if high != low else 0.001), 0, 1)
    frequencies = base_frequencies(theta, dim)
    scale = yarn_attention_factor(factor) if attention_factor is None else attention_factor
    note = f"yarn, theta {theta:g}, factor {factor:g} over {original} positions, attention factor {scale:.6g}"
    return _rope(frequencies / factor * ramp + frequencies * (1 - ramp), scale, note, max_position)


def longrope_attention_factor(factor: float, original: int) -> float:
    """Ding et al. 2024: sqrt(1 + ln(factor) / ln(original))."""
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def longrope(
    theta: float,
    dim: int,
    short: Sequence[float],
    long: Sequence[float],
    original: int,
    attention_factor: float,
    max_position: int,
    max_model_len: int | None,
) -> Rope:
    length = max_model_len or max_position
    is_long = length > original
    note = (
        f"longrope, theta {theta:g}, {'long' if is_long else 'short'} factors: sequences of up to {length} "
        f"tokens are admitted and {original} is the original limit; attention factor {attention_factor:.6g}"
    )
    factors = np.asarray(long if is_long else short, np.float64)
    return _rope(base_frequencies(theta, dim) / factors, attention_factor, note, max_position)


def with_factors(rope: Rope, factors: Sequence[float], source: str) -> Rope:
    """Every frequency divided by its own factor, as a GGUF file's rope_freqs tensor gives them."""
    frequencies = np.asarray(rope.spec.inv_freq, np.float64) / np.asarray(factors, np.float64)
    return _rope(frequencies, rope.spec.scale, f"{rope.note}, divided by {source}", rope.max_position)


def _rope(frequencies: Frequencies, scale: float, note: str, max_position: int) -> Rope:
    spec = RopeSpec(2 * len(frequencies), tuple(float(f) for f in frequencies), scale)
    return Rope(spec, note, max_position)
