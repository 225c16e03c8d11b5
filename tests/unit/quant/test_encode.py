"""Encoders: bit-identical to the gguf package where it has one; else a stated bound on the round trip."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf.quants import quantize
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.quant import get_format

# Below about 1e-25 the gguf package divides by denormals and casts infinities: see the test of tiny values.
ORDINARY = st.floats(-1e6, 1e6, width=32).filter(lambda x: x == 0 or abs(x) > 1e-25)


def weights(seed: int = 0, shape: tuple[int, int] = (64, 512)) -> np.ndarray:
    """Rows of very different size; one all zero, one constant, one with a single spike."""
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal(shape) * 10.0 ** rng.uniform(-4, 3, (shape[0], 1))).astype(np.float32)
    x[0], x[1], x[2] = 0, 0.25, 0
    x[2, 7] = -3
    return x


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_encode_is_bit_identical_to_gguf(name: str) -> None:
    x = weights()
    want = quantize(x, gguf.GGMLQuantizationType[name]).view(np.uint8).reshape(len(x), -1)
    assert np.array_equal(get_format(name).encode(x), want)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
@settings(max_examples=30, deadline=None)
@given(st.lists(ORDINARY, min_size=32, max_size=32))
def test_encode_of_any_block_is_that_of_gguf(name: str, block: list[float]) -> None:
    x = np.array([block], np.float32)
    with np.errstate(all="ignore"):
        want = quantize(x, gguf.GGMLQuantizationType[name])
    halves = 2 if name.endswith("_1") else 1
    if np.isfinite(want[:, : 2 * halves].copy().view(np.float16)).all():
        assert np.array_equal(get_format(name).encode(x), want)
    else:
        with pytest.raises(ValueError, match="fp16 ends at 65504"):
            get_format(name).encode(x)


def round_trip(name: str, x: np.ndarray) -> np.ndarray:
    spec = get_format(name)
    return spec.decode(spec.encode(x).reshape(-1), x.shape)


# With A the largest magnitude of a super-block of 256.
# Q4_K: a scale is at most 2A/15. Half a step of rounding A/15, one step the search may clip 2A/15, the 6-bit
# scale (15 codes off by half of 1/63 of 2A/15) 2A/126 and the 6-bit minimum A/126.
# Q6_K: a scale is at most A/32. Half a step A/64, one step A/32, the 8-bit scale (32 codes off by half of
# 1/128 of it) A/256.
@pytest.mark.parametrize("name, bound", [("Q4_K", 3 / 15 + 3 / 126), ("Q6_K", 3 / 64 + 1 / 256)])
def test_k_quants_keep_every_element_within_their_bound(name: str, bound: float) -> None:
    x = weights(3)
    x[3:] = np.random.default_rng(4).standard_normal(x[3:].shape).astype(np.float32)
    x[40:] *= np.float32(1e-3)
    error = np.abs(round_trip(name, x) - x)
    largest = np.abs(x).reshape(len(x), -1, 256).max(axis=2).repeat(256, axis=1)
    assert (error <= bound * largest).all()
    assert (error[0] == 0).all()


# Standard normal weights. Rounding alone gives range / levels / sqrt(12): with 32 normal numbers (range about
# 4.1) 0.079 for 4 bits; with 16 of them (largest about 1.77, both signs) 0.016 for 6 bits.
@pytest.mark.parametrize("name, bound", [("Q4_K", 0.0785), ("Q6_K", 0.0185), ("Q8_0", 0.0060)])
def test_round_trip_error_of_normal_weights(name: str, bound: float) -> None:
    x = np.random.default_rng(5).standard_normal((256, 512)).astype(np.float32)
    assert np.sqrt(np.mean((round_trip(name, x) - x) ** 2)) < bound


def test_k_quants_beat_their_plain_formats_of_the_same_bits() -> None:
    x = np.random.default_rng(6).standard_normal((128, 512)).astype(np.float32)

    def rms(name: str) -> float:
        return float(np.sqrt(np.mean((round_trip(name, x) - x) ** 2)))

    assert rms("Q4_K") < rms("Q4_1")
    assert rms("Q6_K") < rms("Q5_1") < rms("Q4_K")


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K"])
def test_k_quants_keep_what_they_can_hold(name: str) -> None:
    """Whole codes, both ends in each group: only the rounding of the fp16 scale (2^-11) is lost."""
    rng = np.random.default_rng(7)
    low, high = (0, 15) if name == "Q4_K" else (-32, 31)
    codes = rng.integers(low, high + 1, (8, 512)).astype(np.float32)
    codes[:, ::16] = low
    codes[:, 1::16] = high
    assert np.abs(round_trip(name, codes) - codes).max() <= 2**-11 * np.abs(codes).max()


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("size", [1e-45, 1.2e-38, 1e-36, 1e-20])
def test_tiny_values_become_zero(name: str, size: float) -> None:
    x = np.zeros((1, 256), np.float32)
    x[0, ::3] = size
    x[0, 1] = -size
    assert (np.abs(round_trip(name, x)) <= 2**-24).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["Q4_0", "Q8_0", "Q4_K", "F16"])
def test_values_that_are_not_finite_are_refused(name: str, bad: float) -> None:
    x = np.zeros((2, 256), np.float32)
    x[1, 3] = bad
    with pytest.raises(ValueError, match="not finite"):
        get_format(name).encode(x)


@pytest.mark.parametrize("name", ["Q4_0", "Q5_1", "Q8_0", "Q4_K", "Q6_K"])
def test_values_too_large_for_the_scales_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"cannot encode to {name}: .* fp16 ends at 65504"):
        get_format(name).encode(
            np.full((1, 256), 1e12, np.float32) * np.linspace(-1, 1, 256, dtype=np.float32)
        )


def test_formats_only_read_and_ragged_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="Q2_K can be read but not written"):
        get_format("Q2_K").encode(np.zeros((1, 256), np.float32))
    with pytest.raises(ValueError, match="a row of 40 does not fit"):
        get_format("Q8_0").encode(np.zeros((1, 40), np.float32))
