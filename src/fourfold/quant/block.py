"""What every weight format is made of: fixed blocks of bytes that hold a fixed run of a row's elements."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]
F32 = NDArray[np.float32]

CHUNK_ELEMENTS = 1 << 16
"""Elements worked on at a time: the fp32 scratch of one chunk (256 KiB) stays in the L2 cache."""

Unpack = Callable[[U8, U8], tuple[F32, F32 | None]]
"""(blocks u8 [b, block_bytes], q u8 [b, block] to fill) -> scale f32 [b, block/group], offset or None."""


class Groups(msgspec.Struct, frozen=True):
    """A matrix as integers with one scale, and perhaps one offset, per group of `group` columns.

    w[i, j] = scale[i, j // group] * (q[i, j] - zero) + offset[i, j // group], each operation rounded to fp32,
    is bit for bit what `decode` gives.

    q: uint8 [n, k], below 2**bits.  scale: float32 [n, k/group].  offset: the same, or None for zero.
    bits: the smallest of 4, 5, 6, 8 that holds q.
    """

    q: U8
    scale: F32
    offset: F32 | None
    zero: int
    group: int
    bits: int


class IntegerCoding(msgspec.Struct, frozen=True):
    """How blocks become scale * (q - zero) + offset."""

    unpack: Unpack
    bits: int
    group: int
    zero: int


class BlockFormat(msgspec.Struct, frozen=True):
    """One weight format.

    block: elements of a row in one block.  block_bytes: bytes of one block.
    ggml_type: id in GGUF files, or None for formats GGUF does not have.
    integers: how blocks become scale * (q - zero) + offset, or
    floats: u8 [nbytes] -> f32 [elements]. Exactly one of the two is set.
    encoder: f32 [b, block] -> u8 [b, block_bytes]; None where the project does not write the format.
    """

    name: str
    ggml_type: int | None
    block: int
    block_bytes: int
    integers: IntegerCoding | None = None
    floats: Callable[[U8], F32] | None = None
    encoder: Callable[[F32], U8] | None = None

    def __post_init__(self) -> None:
        if (self.integers is None) == (self.floats is None):
            raise ValueError(f"format {self.name} must be either integers or floats")

    def nbytes(self, shape: Sequence[int]) -> int:
        """Bytes of a tensor of this shape. Raises ValueError when a row is not a whole number of blocks."""
        columns = shape[-1] if shape else 1
        if columns % self.block:
            raise ValueError(
                f"{self.name} holds rows in blocks of {self.block} elements; a row of {columns} does not fit"
            )
        return math.prod(shape) // self.block * self.block_bytes

    def decode(self, data: U8, shape: Sequence[int]) -> F32:
        """uint8 [nbytes(shape)] -> float32 of `shape`. Raises ValueError when the sizes do not match."""
        self._check(data, shape)
        if self.integers is None:
            assert self.floats is not None
            return self.floats(data).reshape(shape)
        coding = self.integers
        blocks = data.reshape(-1, self.block_bytes)
        out = np.empty((len(blocks), self.block // coding.group, coding.group), np.float32)
        step = max(1, CHUNK_ELEMENTS // self.block)
        scratch = np.empty((min(step, len(blocks)), self.block), np.uint8)
        with np.errstate(invalid="ignore", over="ignore"):
            for start in range(0, len(blocks), step):
                part = blocks[start : start + step]
                q = scratch[: len(part)]
                scale, offset = coding.unpack(part, q)
                w = out[start : start + step]
                np.subtract(q.reshape(w.shape), np.float32(coding.zero), out=w)
                np.multiply(w, scale[:, :, None], out=w)
                if offset is not None:
                    np.add(w, offset[:, :, None], out=w)
        return out.reshape(shape)

    def split(self, data: U8, shape: Sequence[int]) -> Groups:
        """The integers and scales of a matrix; leading dimensions are merged into rows.

        Raises ValueError when the sizes do not match or the format holds no integers.
        """
        self._check(data, shape)
        if self.integers is None:
            raise ValueError(f"{self.name} holds floats; it has no integers and scales to split into")
        coding = self.integers
        blocks = data.reshape(-1, self.block_bytes)
        per_block = self.block // coding.group
        q = np.empty((len(blocks), self.block), np.uint8)
        scales = np.empty((len(blocks), per_block), np.float32)
        offsets: F32 | None = None
        step = max(1, CHUNK_ELEMENTS // self.block)
        with np.errstate(invalid="ignore", over="ignore"):
            for start in range(0, len(blocks), step):
                stop = start + step
                scale, offset = coding.unpack(blocks[start:stop], q[start:stop])
                scales[start:stop] = scale
                if offset is not None:
                    if offsets is None:
                        offsets = np.empty_like(scales)
                    offsets[start:stop] = offset
        columns = shape[-1]
        rows = math.prod(shape[:-1])
        return Groups(
            q=q.reshape(rows, columns),
            scale=scales.reshape(rows, columns // coding.group),
            offset=None if offsets is None else offsets.reshape(rows, columns // coding.group),
            zero=coding.zero,
            group=coding.group,
            bits=coding.bits,
        )

    def encode(self, array: NDArray[np.floating]) -> U8:
        """Floats [..., k], finite -> uint8 [..., k / block * block_bytes].

        Raises ValueError when the format is not written by this project, k is not a whole number of blocks,
        or a value is not finite or too large for the format's fp16 scales.
        """
        if self.encoder is None:
            raise ValueError(f"{self.name} can be read but not written")
        values = np.asarray(array, np.float32)
        self.nbytes(values.shape)
        if not np.isfinite(values).all():
            raise ValueError(f"cannot encode to {self.name}: the array holds values that are not finite")
        blocks = values.reshape(-1, self.block)
        out = np.empty((len(blocks), self.block_bytes), np.uint8)
        step = max(1, CHUNK_ELEMENTS // self.block)
        for start in range(0, len(blocks), step):
            out[start : start + step] = self.encoder(blocks[start : start + step])
        if not values.shape:
            return out.reshape(-1)
        return out.reshape(*values.shape[:-1], values.shape[-1] // self.block * self.block_bytes)

    def _check(self, data: U8, shape: Sequence[int]) -> None:
        needed = self.nbytes(shape)
        if data.dtype != np.uint8 or data.ndim != 1 or data.size != needed:
            raise ValueError(
                f"{self.name} tensor of shape {tuple(shape)} needs uint8 [{needed}], "
                f"got {data.dtype} {list(data.shape)}"
            )


def half_column(blocks: U8, start: int) -> F32:
    """The fp16 at byte `start` of each block as float32 [b, 1]."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2").astype(np.float32)


def to_half(values: F32, name: str) -> U8:
    """float32 [b, 1] as little-endian fp16, uint8 [b, 2]. Raises ValueError when a value overflows."""
    with np.errstate(over="ignore"):
        half = values.astype("<f2")
    if not np.isfinite(half).all():
        worst = float(np.abs(values).max())
        raise ValueError(f"cannot encode to {name}: a block needs a scale of {worst:g}, fp16 ends at 65504")
    return half.view(np.uint8)
