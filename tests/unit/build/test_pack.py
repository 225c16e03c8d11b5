"""From checkpoint blocks to packed matrices: the numbers survive, order is restored, damage is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from build.sources import Memory, random_tensor
from fourfold import _native
from fourfold.build.pack import matrix_key, pack_matrix, pack_vector
from fourfold.build.packed import ELEM, PackedMatrix
from fourfold.errors import LoadError
from fourfold.models.binding import Binding
from fourfold.quant.registry import FORMATS, get_format
from fourfold.weights.source import RawTensor

INTEGERS = [name for name, each in FORMATS.items() if each.integers is not None]


def decoded(m: PackedMatrix) -> NDArray[np.float32]:
    """Every row, by the embedding kernel."""
    out = np.empty((m.n, m.k), np.float32)
    ids = np.arange(m.n, dtype=np.int32)
    _native.test_embed(0, m.data, m.n, m.k, m.elem, m.bits, m.group, m.zero, m.has_offset, m.wide, ids, out)
    return out


def values(raw: RawTensor) -> NDArray[np.float32]:
    return get_format(raw.format).decode(raw.data, raw.shape)


@pytest.mark.parametrize("name", FORMATS)
def test_exact_packing_keeps_every_number(name: str) -> None:
    raw = random_tensor("w", name, (21, 512), seed=1)
    packed = pack_matrix(Memory({"w": raw}), Binding("w"), exact=True)
    assert packed.data.ctypes.data % 64 == 0
    np.testing.assert_array_equal(decoded(packed), values(raw))


@pytest.mark.parametrize("name", INTEGERS)
def test_fast_packing_rounds_scales_by_at_most_one_thousandth_of_the_group(name: str) -> None:
    raw = random_tensor("w", name, (21, 512), seed=2)
    packed = pack_matrix(Memory({"w": raw}), Binding("w"), exact=False)
    want = values(raw)
    error = np.abs(decoded(packed) - want).reshape(21, -1, packed.group)
    if packed.wide or name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL"):
        assert (error == 0).all()
    else:
        # scale * (q - zero) and offset each move by 2^-10 of themselves, or of 1/1000 of the largest.
        span = np.abs(want).max() * 1e-3
        size = np.maximum(np.abs(want).reshape(error.shape).max(-1, keepdims=True), span)
        assert (error <= 3 * 2.0**-10 * size).all()


def test_scales_that_fp16_cannot_hold_stay_fp32() -> None:
    """Of Q6_K, whose scales are an fp16 times an int8: exact at the lower end, too large at the upper."""
    for scale, wide in ((6e-8, False), (60000.0, True)):
        raw = random_tensor("w", "Q6_K", (16, 256))
        blocks = raw.data.reshape(-1, 210).copy()
        blocks[:, 208:] = np.array([scale], np.float16).view(np.uint8)
        changed = RawTensor("w", raw.shape, raw.format, blocks.reshape(-1))
        packed = pack_matrix(Memory({"w": changed}), Binding("w"), exact=False)
        assert packed.wide is wide
        np.testing.assert_array_equal(decoded(packed), values(changed))


@pytest.mark.parametrize("name", ["Q4_1", "F16", "BF16", "F32", "Q6_K"])
def test_interleaved_heads_are_reordered_to_halves(name: str) -> None:
    """Row 2i of a head goes to i, row 2i + 1 to i + head_dim / 2 (the inverse of the public converters)."""
    raw = random_tensor("q", name, (48, 256))
    found = decoded(pack_matrix(Memory({"q": raw}), Binding("q", interleaved_heads=3), exact=True))
    want = values(raw).reshape(3, 8, 2, 256).swapaxes(1, 2).reshape(48, 256)
    np.testing.assert_array_equal(found, want)
    bias = random_tensor("b", "F32", (48, 1))
    vector = RawTensor("b", (48,), "F32", bias.data)
    found_bias = pack_vector(Memory({"b": vector}), Binding("b", interleaved_heads=3))
    np.testing.assert_array_equal(found_bias, values(vector).reshape(3, 8, 2).swapaxes(1, 2).reshape(48))


def test_rows_of_a_fused_tensor() -> None:
    raw = random_tensor("qkv", "Q4_0", (96, 64))
    source = Memory({"qkv": raw})
    for start, rows in ((0, 32), (32, 48), (80, 16)):
        packed = pack_matrix(source, Binding("qkv", row_start=start, rows=rows), exact=False)
        assert (packed.n, packed.k) == (rows, 64)
        np.testing.assert_array_equal(decoded(packed), values(raw)[start : start + rows])
    tail = pack_matrix(source, Binding("qkv", row_start=90), exact=False)
    np.testing.assert_array_equal(decoded(tail), values(raw)[90:])
    for start, missing in ((90, 20), (96, 1), (-1, 2), (0, 0)):
        with pytest.raises(LoadError, match=r"memory\.gguf: tensor qkv has 96 rows, but rows"):
            pack_matrix(source, Binding("qkv", row_start=start, rows=missing), exact=False)


def test_vectors_get_their_constant() -> None:
    raw = RawTensor("norm", (3,), "F16", np.array([0.5, -1, 2], np.float16).view(np.uint8))
    source = Memory({"norm": raw})
    np.testing.assert_array_equal(pack_vector(source, Binding("norm")), np.float32([0.5, -1, 2]))
    np.testing.assert_array_equal(pack_vector(source, Binding("norm", add=1.0)), np.float32([1.5, 0, 3]))


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name, at", [("Q4_0", 0), ("Q4_1", 2), ("Q8_0", 0), ("Q4_K", 0), ("Q6_K", 208)])
def test_scales_that_are_not_finite_are_damage(name: str, at: int, poison: float) -> None:
    raw = random_tensor("blk.3.ffn_up.weight", name, (4, 512))
    blocks = raw.data.copy().reshape(-1, FORMATS[name].block_bytes)
    blocks[5, at : at + 2] = np.array([poison], np.float16).view(np.uint8)
    damaged = RawTensor(raw.name, raw.shape, name, blocks.reshape(-1))
    with pytest.raises(
        LoadError, match=r"memory\.gguf: tensor blk\.3\.ffn_up\.weight has scales .* not finite"
    ):
        pack_matrix(Memory({raw.name: damaged}), Binding(raw.name), exact=False)


@pytest.mark.parametrize("shape", [(64,), (2, 4, 64)])
def test_a_matrix_has_two_dimensions(shape: tuple[int, ...]) -> None:
    size = int(np.prod(shape))
    raw = RawTensor("w", shape, "F32", np.zeros(4 * size, np.uint8))
    with pytest.raises(LoadError, match=r"tensor w has shape \[.*\], a matrix is needed"):
        pack_matrix(Memory({"w": raw}), Binding("w"), exact=False)


def test_unknown_and_missing_tensors_are_named() -> None:
    raw = RawTensor("w", (1, 32), "I32", np.zeros(128, np.uint8))
    with pytest.raises(LoadError, match="I32"):
        pack_matrix(Memory({"w": raw}), Binding("w"), exact=False)
    with pytest.raises(LoadError, match=r"memory\.gguf: tensor v is missing"):
        pack_matrix(Memory({"w": raw}), Binding("v"), exact=False)


def test_keys_tell_contents_apart() -> None:
    bindings: list[dict[str, Any]] = [
        {},
        {"row_start": 1},
        {"rows": 4},
        {"row_start": 4, "rows": 4},
        {"interleaved_heads": 2},
        {"interleaved_heads": 4},
        {"rows": 4, "interleaved_heads": 2},
    ]
    assert len({matrix_key(Binding("a", **fields)) for fields in bindings}) == len(bindings)
    assert matrix_key(Binding("a")) == matrix_key(Binding("a", add=0.0))


def test_element_numbers_are_those_of_the_native_layout(tmp_path: Path) -> None:
    assert ELEM == {"ints": 0, "F32": 1, "F16": 2, "BF16": 3, "F8_E4M3": 4, "F8_E5M2": 5}
    assert [_native.packed_bytes(16, 16, e) for e in (1, 2, 3)] == [1024, 512, 512]
