"""Matmul kernels: the documented order bit for bit, bounds against float64, the same bits in any block."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matmul_harness import (
    DENSE,
    ELEM,
    EPS,
    FP8,
    GROUP,
    INTS,
    ISAS,
    Doubles,
    Epilogue,
    Floats,
    Kind,
    Packed,
    aligned,
    available_isas,
    bf16_bits,
    columns_of,
    decoded_to_bf16,
    emulate_bf16,
    emulate_bf16_tiles,
    emulate_f32,
    emulate_fp8,
    emulate_int8,
    fma,
    from_bf16,
    matmul,
    matmul_isas,
    norm_rows,
    packed_ints,
    quantize,
    random_matrix,
)

from fourfold import _native

every_isa = pytest.mark.parametrize("isa", matmul_isas(), ids=[ISAS[i] for i in matmul_isas()])
BLOCKS = [(4, 256), (1, 1), (3, 5), (2, 4), (4, 3)]
ULP = 2.0**-24
TILE_UNITS = ("amx", "amx_emulated")


def shapes(kind: Kind) -> list[tuple[int, int, int]]:
    """(rows, columns, k): every remainder of the register tiles; k of one group, of odd counts, long."""
    found = [(1, 16, 32), (2, 1, 64), (4, 17, 96), (5, 33, 160), (10, 64, 576), (97, 70, 192)]
    found += [(34, 16, 32), (35, 17, 64)]
    if kind.group == 16:
        found += [(3, 16, 16), (6, 40, 48), (8, 129, 272)]
    if kind.elem != "ints":
        found += [(3, 20, 1000), (7, 35, 1), (9, 50, 77)]
    if kind in FP8:
        found = [(m, n, -(-k // 4) * 4) for m, n, k in found]
    return found


def rows_of(m: int, k: int, seed: int = 1) -> Floats:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((m, k)) * np.exp(rng.standard_normal((m, 1)))).astype(np.float32)


@functools.cache
def cases(kind: Kind) -> list[tuple[Packed, Floats]]:
    return [(random_matrix(kind, n, k, n + k), rows_of(m, k, m)) for m, n, k in shapes(kind)]


@functools.cache
def int8_expected(kind: Kind) -> list[Floats]:
    return [emulate_int8(x, m) for m, x in cases(kind)]


@functools.cache
def f32_expected(kind: Kind) -> list[Floats]:
    return [emulate_f32(x, m) for m, x in cases(kind)]


def test_the_emulated_fma_rounds_once() -> None:
    """Cases that two roundings get wrong, and random ones against exact integer arithmetic."""
    a, b = np.float32(1 + 2**-12), np.float32(1 + 2**-12)
    assert fma(a, b, np.float32(-1)) == np.float32(2**-11 + 2**-24)
    # 1 + 2^-24 + 2^-80 lies above the tie that float64 would round it to.
    assert fma(np.float32(2**-40), np.float32(2**-40), np.float32(1)) == 1
    third = fma(np.float32(1 + 2**-23), np.float32(2**-24), np.float32(1))
    assert third == np.float32(1 + 2**-23)
    rng = np.random.default_rng(0)
    x, y, z = (rng.integers(-(2**24), 2**24, 500) for _ in range(3))
    want = [float(np.float32(int(p) * int(q) + int(r))) for p, q, r in zip(x, y, z, strict=True)]
    got = fma(x.astype(np.float32), y.astype(np.float32), z.astype(np.float32))
    # Python's int -> float rounds once to float64: 2^48 fits, so float32() is the only rounding.
    np.testing.assert_array_equal(got, np.array(want, np.float32))


@every_isa
@pytest.mark.parametrize("kind", INTS, ids=str)
def test_int8_path_is_the_documented_order_bit_for_bit(kind: Kind, isa: int) -> None:
    for (m, x), want in zip(cases(kind), int8_expected(kind), strict=True):
        for tiles, rows in BLOCKS:
            np.testing.assert_array_equal(matmul(isa, x, m, "int8", tiles=tiles, rows=rows), want)


@every_isa
@pytest.mark.parametrize("kind", INTS, ids=str)
@pytest.mark.parametrize("largest", [0, 1], ids=["zeros", "largest"])
def test_sums_of_extreme_ints_do_not_saturate(kind: Kind, largest: int, isa: int) -> None:
    """Integers that are all 0 or 2**bits - 1 meet activations that are all 127, -127, or both in turn."""
    n, k = 16, 128
    q = np.full((n, k), largest * ((1 << kind.bits) - 1), np.uint8)
    scale = np.ones((n, k // kind.group), np.float32)
    m = packed_ints(kind, q, scale, 0 * scale if kind.offset else None)
    signs = np.array([1, -1, 1, -1, 1], np.float32)[:, None] * np.ones(k, np.float32)
    signs[2:, ::2] *= -1
    signs[4, ::4] *= -1
    want = 127 * (signs.astype(np.int64) @ (q.astype(np.int64).T - kind.zero))
    signs, want = np.tile(signs, (8, 1)), np.tile(want, (8, 1))
    for rows in (40, 1):  # by panels, and streamed
        np.testing.assert_array_equal(matmul(isa, 127 * signs, m, "int8", rows=rows), want)


@every_isa
@pytest.mark.parametrize("kind", [*INTS, *DENSE, *FP8], ids=str)
def test_f32_path_is_an_fma_over_ascending_k_bit_for_bit(kind: Kind, isa: int) -> None:
    for (m, x), want in zip(cases(kind), f32_expected(kind), strict=True):
        for tiles, rows in BLOCKS:
            np.testing.assert_array_equal(matmul(isa, x, m, "f32", tiles=tiles, rows=rows), want)


@every_isa
@pytest.mark.parametrize("kind", [INTS[0], INTS[3], INTS[5], INTS[12], INTS[-1]], ids=str)
def test_outliers_are_multiplied_in_fp32_and_left_out_of_the_groups(kind: Kind, isa: int) -> None:
    for m, x in cases(kind):
        if m.k < 64:
            continue
        channels = np.unique(np.array([0, 5, 37, m.k // 2, m.k - 1], np.int32))
        big = x.copy()
        big[:, channels] *= 300
        want = emulate_int8(big, m, channels)
        for tiles, rows in BLOCKS:
            got = matmul(isa, big, m, "int8", Epilogue(outliers=channels), tiles, rows)
            np.testing.assert_array_equal(got, want)
        # The large columns no longer cost the others their precision.
        exact = big.astype(np.float64) @ m.w.T.astype(np.float64)
        plain = matmul(isa, big, m, "int8")
        assert np.abs(want - exact).mean() < 0.3 * np.abs(plain - exact).mean()


@pytest.mark.parametrize("kind", INTS, ids=str)
def test_extracted_columns_are_the_decoded_ones_in_fp16(kind: Kind) -> None:
    m = random_matrix(kind, 37, 96)
    channels = np.array([0, 15, 16, 47, 95], np.int32)
    found = columns_of(m, channels).view(np.float16).reshape(3, 5, 16).transpose(0, 2, 1).reshape(48, 5)
    np.testing.assert_array_equal(found[:37], m.w[:, channels].astype(np.float16))
    np.testing.assert_array_equal(found[37:], 0)


def check_bf16(isa: int, x: Floats, m: Packed, emulate: Callable[[Floats, Packed], Floats]) -> None:
    """The same in any blocks, within k ulp of Σ|w x|, and bit for bit what is documented, except by the
    instructions that take denormals as zero. emulate: the order of those without a tile unit."""
    outs = [matmul(isa, x, m, "bf16", tiles=t, rows=r) for t, r in BLOCKS]
    for out in outs[1:]:
        np.testing.assert_array_equal(out, outs[0])
    rounded = from_bf16(bf16_bits(x)).astype(np.float64)
    exact, size = rounded @ m.w.T.astype(np.float64), np.abs(rounded) @ np.abs(m.w.T)
    assert (np.abs(outs[0] - exact) <= (m.k + 4) * ULP * size).all()
    if ISAS[isa] not in ("avx512", "amx"):
        want = emulate_bf16_tiles if ISAS[isa] == "amx_emulated" else emulate
        np.testing.assert_array_equal(outs[0], want(x, m))


@every_isa
def test_bf16_path(isa: int) -> None:
    kind = Kind("bf16")
    for m, x in cases(kind):
        check_bf16(isa, x, m, emulate_bf16)


@every_isa
@pytest.mark.parametrize("kind", FP8, ids=str)
def test_fp8_path(kind: Kind, isa: int) -> None:
    """As the bf16 path: codes are bf16 exactly, scales are applied to the sums of their groups in fp32. A
    tile unit's weights are rounded."""
    for m, x in cases(kind):
        if ISAS[isa] in TILE_UNITS:
            m = decoded_to_bf16(m)
        check_bf16(isa, x, m, emulate_fp8)


@every_isa
@pytest.mark.parametrize("kind", INTS, ids=str)
def test_integer_weights_in_bf16(kind: Kind, isa: int) -> None:
    """As the bf16 path, on weights decoded to bf16: within half a percent, and without bias."""
    errors = []
    for exact_weights, x in cases(kind):
        m = decoded_to_bf16(exact_weights)
        np.testing.assert_array_equal(from_bf16(bf16_bits(m.w)), m.w)
        if m.offset is None:  # with one, what is left of a difference has the error of what was subtracted
            assert (np.abs(m.w - exact_weights.w) <= np.abs(exact_weights.w) / 128).all()
        errors.append((m.w - exact_weights.w) * np.sign(exact_weights.w))
        check_bf16(isa, x, m, emulate_bf16)
    error = np.concatenate([e.reshape(-1) for e in errors])
    size = np.concatenate([np.abs(m.w).reshape(-1) for m, _ in cases(kind)]).mean()
    assert abs(error.mean()) < 0.0005 * size
    assert error.std() < 0.005 * size


def test_the_tile_unit_and_its_emulation_agree() -> None:
    isas = [isa for isa in matmul_isas() if ISAS[isa] in TILE_UNITS]
    if len(isas) < 2:
        pytest.skip("this CPU has no tile unit")
    for kind in [Kind("bf16"), *FP8, *INTS]:
        for m, x in cases(kind):
            outs = [matmul(isa, x, m, "bf16", tiles=4, rows=96) for isa in isas]
            np.testing.assert_array_equal(outs[0], outs[1])


@pytest.mark.parametrize("kind", INTS, ids=str)
def test_int8_error_is_at_most_half_a_step_of_each_activation(kind: Kind) -> None:
    """|y - w x| <= Σ |w| scale / 2, and what fp32 sums of as many terms may add."""
    isa = available_isas()[-1]
    for m, x in cases(kind):
        exact = x.astype(np.float64) @ m.w.T.astype(np.float64)
        steps = np.repeat(quantize(x)[1], GROUP, 1)[:, : m.k].astype(np.float64)
        # 127 * 2^-23: x / scale itself is rounded before it is rounded to an integer.
        bound = (0.5 + 127 * 2**-23) * steps @ np.abs(m.w.T)
        terms = 2 * m.k // kind.group + 8
        parts = (
            np.abs(m.w) if m.offset is None else np.abs(m.w) + 2 * np.abs(np.repeat(m.offset, kind.group, 1))
        )
        bound += terms * ULP * (np.abs(x) + steps) @ parts.T
        assert (np.abs(matmul(isa, x, m, "int8") - exact) <= bound).all()


@every_isa
@pytest.mark.parametrize("kind", [*INTS[:4], INTS[-1], *DENSE, *FP8], ids=str)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_a_row_has_the_same_bits_alone_and_in_any_block_of_any_batch(
    kind: Kind, isa: int, data: st.DataObject
) -> None:
    m = random_matrix(kind, data.draw(st.integers(1, 90)), 96)
    count = data.draw(st.integers(1, 97))
    x = rows_of(count, 96)
    computes = (
        ["f32"]
        + (["int8"] if kind.elem == "ints" else [])
        + (["bf16"] if kind.elem not in ("f32", "f16") else [])
    )
    for compute in computes:
        tiles, rows = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 256))
        together = matmul(isa, x, m, compute, tiles=tiles, rows=rows)
        for row in {0, count // 2, count - 1}:
            alone = matmul(isa, x[row : row + 1], m, compute)
            np.testing.assert_array_equal(together[row : row + 1], alone)


def activation(g: Doubles, act: str) -> Doubles:
    if act == "silu":
        return np.asarray(g / (1 + np.exp(-g)))
    if act == "gelu_tanh":
        return np.asarray(0.5 * g * (1 + np.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))))
    return np.asarray(0.5 * g * (1 + np.vectorize(math.erf)(g / math.sqrt(2))))


@every_isa
@pytest.mark.parametrize("compute", ["int8", "f32"])
def test_bias_residual_and_norm(compute: str, isa: int) -> None:
    """Each added with one rounding, after the product of the normed rows."""
    m = random_matrix(Kind("ints", 4, 32, 8), 75, 160)
    x, rng = rows_of(9, 160), np.random.default_rng(3)
    weight, bias = (rng.standard_normal(size).astype(np.float32) for size in (160, 75))
    residual = rng.standard_normal((9, 75)).astype(np.float32)
    emulate = emulate_int8 if compute == "int8" else emulate_f32
    plain, normed = emulate(x, m), emulate(norm_rows(x, weight), m)
    for tiles, rows in BLOCKS:
        for epilogue, want in (
            (Epilogue(bias=bias), plain + bias),
            (Epilogue(residual=residual), residual + plain),
            (Epilogue(norm=weight), normed),
            (Epilogue(norm=weight, bias=bias, residual=residual), residual + (normed + bias)),
        ):
            np.testing.assert_array_equal(matmul(isa, x, m, compute, epilogue, tiles, rows), want)
    reference = x / np.sqrt((x.astype(np.float64) ** 2).mean(1, keepdims=True) + EPS) * weight
    np.testing.assert_allclose(norm_rows(x, weight), reference, rtol=1e-6)


@every_isa
@pytest.mark.parametrize("act", ["silu", "gelu_tanh", "gelu"])
@pytest.mark.parametrize("compute", ["int8", "f32"])
def test_gate(compute: str, act: str, isa: int) -> None:
    """act(gate) * y within 2e-6 of |gate|, from far below zero to far above."""
    m = random_matrix(Kind("ints", 4, 16, 0, True), 41, 48)
    x, rng = rows_of(7, 48), np.random.default_rng(4)
    gate = (rng.standard_normal((7, 41)) * 5).astype(np.float32)
    gate[0, :8] = [0, -0.0, 1e-30, -100, 100, -1e30, 1e30, -20]
    y = (emulate_int8 if compute == "int8" else emulate_f32)(x, m).astype(np.float64)
    outs = [matmul(isa, x, m, compute, Epilogue(gate=gate, act=act), t, r) for t, r in BLOCKS]
    for out in outs[1:]:
        np.testing.assert_array_equal(out, outs[0])
    with np.errstate(over="ignore"):
        want = activation(gate.astype(np.float64), act) * y
    assert (np.abs(outs[0] - want) <= 2e-6 * np.abs(gate * y) + 1e-30).all()
    for other in available_isas():
        np.testing.assert_array_equal(
            outs[0], matmul(other, x, m, compute, Epilogue(gate=gate, act=act)), err_msg=ISAS[other]
        )


@every_isa
@pytest.mark.parametrize("kind", [*INTS, *DENSE, *FP8], ids=str)
def test_embedding_rows_are_the_decoded_rows_bit_for_bit(kind: Kind, isa: int) -> None:
    m = random_matrix(kind, 50, 144 if kind.group == 16 else 160)
    ids = np.array([0, 49, 17, 17, 48, 15, 16], np.int32)
    out = np.full((len(ids), m.k), np.nan, np.float32)
    _native.test_embed(isa, m.data, m.n, m.k, *m.description, ids, out)
    np.testing.assert_array_equal(out, m.w[ids])


@every_isa
@pytest.mark.parametrize("compute", ["int8", "f32"])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_stays_so_and_stays_alone(poison: float, compute: str, isa: int) -> None:
    for kind in (Kind("ints", 4, 32, 8), Kind("ints", 4, 32, 0, True), Kind("ints", 6, 16, 32)):
        m, x = random_matrix(kind, 37, 192), rows_of(6, 192)
        clean = matmul(isa, x, m, compute)
        for column in (0, 100, 191):
            bad = x.copy()
            bad[2, column] = poison
            for tiles, rows in BLOCKS:
                out = matmul(isa, bad, m, compute, tiles=tiles, rows=rows)
                others = np.arange(6) != 2
                np.testing.assert_array_equal(out[others], clean[others])
                # A weight of zero on an infinity is NaN; no product may come out finite.
                assert not np.isfinite(out[2]).any(), f"{kind}, column {column}"


@every_isa
def test_bf16_rows_that_are_not_finite_stay_so(isa: int) -> None:
    m, x = random_matrix(Kind("bf16"), 37, 190), rows_of(6, 190)
    clean = matmul(isa, x, m, "bf16")
    for poison in (np.nan, np.inf):
        bad = x.copy()
        bad[4, 7] = poison
        out = matmul(isa, bad, m, "bf16")
        np.testing.assert_array_equal(out[:4], clean[:4])
        np.testing.assert_array_equal(out[5], clean[5])
        assert not np.isfinite(out[4]).any()


@every_isa
@pytest.mark.parametrize("size", [1e-44, 1e-38, 1e-30, 1e-10, 1e10, 1e30])
def test_rows_of_any_size_keep_their_relative_error(size: float, isa: int) -> None:
    """Down to numbers so small that 127 over them is no fp32 number: those may count as zero."""
    m = random_matrix(Kind("ints", 4, 32, 8), 37, 192)
    base = rows_of(5, 192)
    x = (base / np.abs(base).max() * size).astype(np.float32)
    out = matmul(isa, x, m, "int8")
    exact = x.astype(np.float64) @ m.w.T.astype(np.float64)
    largest = np.abs(x).max(1, keepdims=True).astype(np.float64)
    bound = 0.51 * largest / 127 * np.abs(m.w).sum(1) + 1e-30
    assert (np.abs(out - exact) <= bound).all()


@every_isa
def test_zero_and_constant_rows(isa: int) -> None:
    m = random_matrix(Kind("ints", 4, 32, 0, True), 20, 64)
    x = np.zeros((3, 64), np.float32)
    x[1] = 2.5
    out = matmul(isa, x, m, "int8")
    np.testing.assert_array_equal(out[[0, 2]], 0)
    np.testing.assert_allclose(out[1], 2.5 * m.w.sum(1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "n, k, elem, bits, group, zero, offset, fault",
    [
        (0, 32, 0, 4, 32, 8, False, "at least one row"),
        (4, 0, 1, 0, 0, 0, False, "at least one row"),
        (4, 32, 0, 3, 32, 4, False, "bits must be 4, 5, 6 or 8"),
        (4, 32, 0, 4, 8, 8, False, "group must be 16 or 32"),
        (4, 32, 0, 6, 32, 32, False, "no kernel takes these bits, group and offsets"),
        (4, 32, 0, 8, 32, 0, True, "no kernel takes these bits, group and offsets"),
        (4, 48, 0, 4, 32, 8, False, "multiple of the group"),
        (4, 32, 0, 4, 32, 256, False, "zero must be between"),
        (4, 32, 0, 4, 32, 8, True, "not both"),
        (4, 32, 6, 0, 0, 0, False, "elem must be"),
        (4, 30, 4, 0, 32, 0, False, "k of an fp8 matrix must be a multiple of 4"),
        (4, 32, 4, 0, 0, 0, False, "group of an fp8 matrix must be a multiple of 4"),
        (4, 32, 5, 0, 6, 0, False, "group of an fp8 matrix must be a multiple of 4"),
        (4, 32, -1, 0, 0, 0, False, "elem must be"),
    ],
)
def test_impossible_matrices_are_refused(
    n: int, k: int, elem: int, bits: int, group: int, zero: int, offset: bool, fault: str
) -> None:
    with pytest.raises(ValueError, match=fault):
        _native.packed_bytes(n, k, elem, bits, group, zero, offset)


def test_packing_checks_sizes() -> None:
    q, scale = np.zeros((4, 64), np.uint8), np.ones((4, 2), np.float32)
    size = _native.packed_bytes(4, 64, 0, 4, 32, 8)
    with pytest.raises(ValueError, match="scale is"):
        _native.pack_ints(q, scale[:, :1].copy(), None, 4, 32, 8, False, aligned(size))
    with pytest.raises(ValueError, match="offset is"):
        _native.pack_ints(q, scale, scale[:2].copy(), 4, 32, 0, False, aligned(2 * size))
    with pytest.raises(ValueError, match="number of bytes"):
        _native.pack_ints(q, scale, None, 4, 32, 8, False, aligned(size - 1))
    with pytest.raises(ValueError, match="number of bytes"):
        _native.pack_dense(np.zeros((4, 63), np.uint8), 16, ELEM["f32"], aligned(1024))
    with pytest.raises(TypeError):
        _native.pack_ints(q.astype(np.int8), scale, None, 4, 32, 8, False, aligned(size))


def test_packed_bytes_counts_whole_tiles() -> None:
    """16 columns to a tile; a group is bits/8 bytes a weight and one or two scales, fp16 or fp32."""
    assert _native.packed_bytes(17, 64, 0, 4, 32, 8) == 2 * 2 * (16 * 32 // 2 + 32)
    assert _native.packed_bytes(16, 64, 0, 5, 32, 0, True) == 2 * (32 * 16 * 5 // 8 + 64)
    assert _native.packed_bytes(16, 64, 0, 6, 16, 32, False, True) == 4 * (16 * 16 * 6 // 8 + 64)
    assert _native.packed_bytes(1, 3, ELEM["bf16"]) == 16 * 4 * 2
    assert _native.packed_bytes(1, 3, ELEM["f32"]) == 16 * 3 * 4
