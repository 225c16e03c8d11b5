"""Norm and quantization of rows, seen through the identity matrix, as fp32 and as int8."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matmul_harness import (
    EPS,
    GROUP,
    ISAS,
    Epilogue,
    Floats,
    Kind,
    Packed,
    aligned,
    available_isas,
    emulate_int8,
    matmul,
    norm_rows,
    quantize,
)

from fourfold import _native

every_isa = pytest.mark.parametrize("isa", available_isas(), ids=[ISAS[i] for i in available_isas()])


def identity(k: int) -> Packed:
    w = np.eye(k, dtype=np.float32)
    data = aligned(_native.packed_bytes(k, k, 1))
    _native.pack_dense(w.view(np.uint8), k, 1, data)
    return Packed(Kind("f32"), k, k, data, w)


def int8_identity(k: int) -> Packed:
    """scale 1, zero 128: the product is the quantized row, times its scale."""
    kind = Kind("ints", 8, 32, 128)
    q = np.full((k, k), 128, np.uint8)
    np.fill_diagonal(q, 129)
    scale = np.ones((k, k // 32), np.float32)
    data = aligned(_native.packed_bytes(k, k, 0, 8, 32, 128))
    _native.pack_ints(q, scale, None, 8, 32, 128, False, data)
    return Packed(kind, k, k, data, np.eye(k, dtype=np.float32), q, scale)


def normed(isa: int, x: Floats, weight: Floats) -> Floats:
    return matmul(isa, x, identity(x.shape[1]), "f32", Epilogue(norm=weight))


def quantized(isa: int, x: Floats) -> Floats:
    return matmul(isa, x, int8_identity(x.shape[1]), "int8")


@every_isa
@pytest.mark.parametrize("k", [1, 5, 15, 16, 17, 63, 64, 100, 576])
def test_norm_is_the_formula_and_has_the_bits_of_the_stated_order(k: int, isa: int) -> None:
    rng = np.random.default_rng(k)
    x = (rng.standard_normal((9, k)) * np.exp(3 * rng.standard_normal((9, 1)))).astype(np.float32)
    weight = rng.standard_normal(k).astype(np.float32)
    found = normed(isa, x, weight)
    np.testing.assert_array_equal(found, norm_rows(x, weight))
    wide = x.astype(np.float64)
    want = wide / np.sqrt((wide**2).mean(1, keepdims=True) + EPS) * weight
    np.testing.assert_allclose(found, want, rtol=2e-6)


@every_isa
def test_norm_of_rows_at_the_edges(isa: int) -> None:
    """Zero, constant, tiny, and so large that the squares overflow (then 0, as in fp32 elsewhere)."""
    k = 48
    weight = np.linspace(-1, 1, k, dtype=np.float32)
    x = np.zeros((5, k), np.float32)
    x[1], x[2], x[3], x[4] = 3.0, 1e-20, 1e18, 1e30
    found = normed(isa, x, weight)
    np.testing.assert_array_equal(found[0], 0)
    np.testing.assert_allclose(found[1], weight, rtol=1e-5)
    np.testing.assert_allclose(found[2], 1e-20 / np.sqrt(EPS) * weight, rtol=1e-5)
    np.testing.assert_allclose(found[3], weight, rtol=1e-5)
    np.testing.assert_array_equal(np.abs(found[4]), 0)


@every_isa
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_norm_of_a_row_that_is_not_finite(poison: float, isa: int) -> None:
    rng = np.random.default_rng(1)
    x, weight = rng.standard_normal((7, 80)).astype(np.float32), np.ones(80, np.float32)
    clean = normed(isa, x, weight)
    x[3, 41] = poison
    found = normed(isa, x, weight)
    assert not np.isfinite(found[3]).any()
    others = np.arange(7) != 3
    np.testing.assert_array_equal(found[others], clean[others])


LARGEST = float(np.float32(1e38))
rows = st.lists(
    st.floats(-LARGEST, LARGEST, width=32).filter(lambda v: v == 0 or abs(v) > 1e-30),
    min_size=64,
    max_size=64,
)


@settings(max_examples=60, deadline=None)
@given(values=rows)
def test_quantization_keeps_every_number_within_half_a_step(values: list[float]) -> None:
    x = np.array([values], np.float32)
    scale = np.repeat(quantize(x)[1], GROUP, 1)[:, :64].astype(np.float64)
    first = None
    for isa in available_isas():
        found = quantized(isa, x)
        # 127 * 2^-23 of a step: x / scale is rounded once before it is rounded to an integer.
        assert (np.abs(found - x.astype(np.float64)) <= (0.5 + 127 * 2**-22) * scale).all()
        np.testing.assert_array_equal(found, emulate_int8(x, int8_identity(64)))
        first = found if first is None else first
        np.testing.assert_array_equal(found, first)


@every_isa
def test_quantization_of_rows_at_the_edges(isa: int) -> None:
    x = np.zeros((6, 2 * GROUP), np.float32)
    x[1] = -7.25
    x[2, GROUP:] = 1.0  # one group zero, one not
    x[3, 0], x[3, 1:] = 1e30, 1.0  # one number decides its group's scale and no other's
    x[4] = 3.3e38
    x[5] = -3.3e38
    found = quantized(isa, x)
    np.testing.assert_array_equal(found[0], 0)
    np.testing.assert_allclose(found[1], -7.25, rtol=1e-6)
    np.testing.assert_array_equal(found[2, :GROUP], 0)
    np.testing.assert_allclose(found[2, GROUP:], 1.0, rtol=1e-6)
    np.testing.assert_allclose(found[3, 0], 1e30, rtol=1e-6)
    np.testing.assert_array_equal(found[3, 1:GROUP], 0)
    np.testing.assert_allclose(found[3, GROUP:], 1.0, rtol=1e-6)
    np.testing.assert_allclose(found[4], 3.3e38, rtol=1e-6)
    np.testing.assert_allclose(found[5], -3.3e38, rtol=1e-6)


@every_isa
def test_quantization_of_numbers_too_small_for_a_scale(isa: int) -> None:
    """Below about 1e-36, 127 / max|x| is no fp32 number: such groups may count as zero but not as garbage."""
    for size in (1e-44, 1e-40, 3e-38, 1e-36):
        x = np.full((1, 64), size, np.float32)
        x[0, ::2] *= -1
        found = quantized(isa, x)
        assert np.isfinite(found).all()
        assert (np.abs(found) <= 2 * size).all()
        np.testing.assert_array_equal(found, quantized(available_isas()[0], x))


@every_isa
def test_quantization_is_symmetric(isa: int) -> None:
    x = np.random.default_rng(2).standard_normal((20, 96)).astype(np.float32)
    np.testing.assert_array_equal(quantized(isa, -x), -quantized(isa, x))
