"""Every format decodes bit for bit as the gguf package does, and `split` says the same numbers."""

from __future__ import annotations

import math
import tracemalloc

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.errors import LoadError
from fourfold.quant import BlockFormat, Groups, get_format
from fourfold.quant.registry import FORMATS

GGML = [each for each in FORMATS.values() if each.ggml_type is not None]
INTEGERS = [each for each in FORMATS.values() if each.integers is not None]

# name: bits, group, zero, has an offset. From ggml's block structures; bits is what the packed kernels store.
EXPECTED_GROUPS = {
    "Q4_0": (4, 32, 8, False),
    "Q4_1": (4, 32, 0, True),
    "Q5_0": (5, 32, 16, False),
    "Q5_1": (5, 32, 0, True),
    "Q8_0": (8, 32, 128, False),
    "IQ4_NL": (8, 32, 128, False),
    "Q2_K": (4, 16, 0, True),
    "Q3_K": (4, 16, 4, False),
    "Q4_K": (4, 32, 0, True),
    "Q5_K": (5, 32, 0, True),
    "Q6_K": (6, 16, 32, False),
}


def random_blocks(spec: BlockFormat, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Bytes of every value, so scales are NaN and infinite now and then."""
    return np.random.default_rng(seed).integers(0, 256, spec.nbytes(shape), dtype=np.uint8)


def reference(spec: BlockFormat, data: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    rows = data.reshape(*shape[:-1], -1)
    with np.errstate(all="ignore"):
        return dequantize(rows, gguf.GGMLQuantizationType(spec.ggml_type)).reshape(shape)


def join(groups: Groups) -> np.ndarray:
    rows, columns = groups.q.shape
    q = groups.q.reshape(rows, -1, groups.group).astype(np.float32) - np.float32(groups.zero)
    with np.errstate(all="ignore"):
        w = groups.scale[:, :, None] * q
        if groups.offset is not None:
            w = w + groups.offset[:, :, None]
    return w.reshape(rows, columns)


def assert_same_bits(got: np.ndarray, want: np.ndarray) -> None:
    assert got.dtype == np.float32
    numbers = ~np.isnan(want)
    assert np.array_equal(np.isnan(got), ~numbers)
    assert np.array_equal(got.view(np.uint32)[numbers], want.view(np.uint32)[numbers])


@pytest.mark.parametrize("spec", GGML, ids=lambda spec: spec.name)
def test_sizes_are_those_of_ggml(spec: BlockFormat) -> None:
    block, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[spec.name]]
    assert (spec.block, spec.block_bytes) == (block, nbytes)
    assert gguf.GGMLQuantizationType[spec.name].value == spec.ggml_type


@pytest.mark.parametrize("spec", GGML, ids=lambda spec: spec.name)
@pytest.mark.parametrize("shape", [(256,), (3, 512), (2, 5, 256), (401, 1024)])
def test_decode_is_bit_identical_to_gguf(spec: BlockFormat, shape: tuple[int, ...]) -> None:
    data = random_blocks(spec, shape)
    assert_same_bits(spec.decode(data, shape), reference(spec, data, shape))


@pytest.mark.parametrize("spec", GGML, ids=lambda spec: spec.name)
@settings(max_examples=15, deadline=None)
@given(byte=st.integers(0, 255), seed=st.integers(0, 2**32 - 1), noise=st.integers(0, 64))
def test_decode_of_extreme_bytes(spec: BlockFormat, byte: int, seed: int, noise: int) -> None:
    shape = (4, 512)
    data = np.full(spec.nbytes(shape), byte, np.uint8)
    rng = np.random.default_rng(seed)
    data[rng.integers(0, data.size, noise)] = rng.integers(0, 256, noise)
    assert_same_bits(spec.decode(data, shape), reference(spec, data, shape))


@pytest.mark.parametrize("spec", INTEGERS, ids=lambda spec: spec.name)
@pytest.mark.parametrize("shape", [(256,), (5, 512), (2, 3, 256), (300, 768)])
def test_split_joins_to_exactly_what_decode_gives(spec: BlockFormat, shape: tuple[int, ...]) -> None:
    data = random_blocks(spec, shape, seed=1)
    groups = spec.split(data, shape)
    bits, group, zero, has_offset = EXPECTED_GROUPS[spec.name]
    rows, columns = math.prod(shape[:-1]), shape[-1]
    assert (groups.bits, groups.group, groups.zero) == (bits, group, zero)
    assert groups.q.shape == (rows, columns)
    assert groups.q.dtype == np.uint8
    assert groups.q.max() < 2**bits
    assert groups.scale.shape == (rows, columns // group)
    assert groups.scale.dtype == np.float32
    assert (groups.offset is not None) == has_offset
    if groups.offset is not None:
        assert groups.offset.shape == groups.scale.shape
    assert_same_bits(join(groups).reshape(shape), spec.decode(data, shape))


def test_bits_are_the_smallest_that_hold_the_codes() -> None:
    for name, (bits, *_) in EXPECTED_GROUPS.items():
        spec = get_format(name)
        q = spec.split(random_blocks(spec, (64, 1024)), (64, 1024)).q
        smaller = {4: 0, 5: 4, 6: 5, 8: 6}[bits]
        assert 2**smaller <= q.max() < 2**bits


@pytest.mark.parametrize("name, kind", [("F8_E4M3", torch.float8_e4m3fn), ("F8_E5M2", torch.float8_e5m2)])
def test_fp8_is_that_of_torch(name: str, kind: torch.dtype) -> None:
    codes = np.arange(256, dtype=np.uint8)
    want = torch.from_numpy(codes.copy()).view(kind).to(torch.float32).numpy()
    assert_same_bits(get_format(name).decode(codes, (256,)), want)


def test_fp8_limits() -> None:
    """The largest finite values of the two formats (Micikevicius et al. 2022, table 1)."""
    codes = np.arange(256, dtype=np.uint8)
    for name, largest in (("F8_E4M3", 448.0), ("F8_E5M2", 57344.0)):
        values = get_format(name).decode(codes, (256,))
        assert values[np.isfinite(values)].max() == largest


def test_unaligned_data_decodes() -> None:
    """safetensors promises no alignment."""
    raw = np.random.default_rng(2).integers(0, 256, 4 * 64 + 3, dtype=np.uint8)
    for name in ("F32", "F16", "BF16", "Q8_0"):
        spec = get_format(name)
        shape = (1, 64)
        data = raw[3 : 3 + spec.nbytes(shape)]
        assert_same_bits(spec.decode(data, shape), spec.decode(data.copy(), shape))


def test_empty_tensor() -> None:
    assert get_format("Q4_0").decode(np.empty(0, np.uint8), (0, 32)).shape == (0, 32)
    assert get_format("Q4_1").split(np.empty(0, np.uint8), (0, 32)).q.shape == (0, 32)
    assert get_format("F32").decode(np.zeros(4, np.uint8), ()).shape == ()


def test_wrong_sizes_are_refused() -> None:
    q4 = get_format("Q4_0")
    with pytest.raises(ValueError, match=r"blocks of 32 elements; a row of 33"):
        q4.decode(np.zeros(18, np.uint8), (1, 33))
    with pytest.raises(ValueError, match=r"needs uint8 \[18\], got uint8 \[17\]"):
        q4.decode(np.zeros(17, np.uint8), (1, 32))
    with pytest.raises(ValueError, match=r"got int8"):
        q4.decode(np.zeros(18, np.int8), (1, 32))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="holds floats"):
        get_format("F16").split(np.zeros(64, np.uint8), (1, 32))


def test_unknown_and_integer_formats_are_load_errors() -> None:
    with pytest.raises(LoadError, match=r"'IQ2_XXS' is not supported; supported are F32, .*Q6_K"):
        get_format("IQ2_XXS")
    with pytest.raises(LoadError, match="I32 holds plain integers"):
        get_format("I32")


def test_split_needs_little_memory_beside_its_result() -> None:
    spec = get_format("Q4_K")
    shape = (2048, 2048)
    data = random_blocks(spec, shape)
    tracemalloc.start()
    groups = spec.split(data, shape)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert groups.offset is not None
    result = groups.q.nbytes + groups.scale.nbytes + groups.offset.nbytes
    assert peak < result + 2_000_000
