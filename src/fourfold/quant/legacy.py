"""ggml's formats of 32 elements with fp16 scales: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL.

Layout of a block (all little-endian): fp16 d; fp16 m (the _1 formats); 4 bytes with the fifth bit of
element i in bit i (the Q5 formats); 16 bytes of nibbles, the low ones elements 0-15, the high ones 16-31
(Q8_0: 32 int8).
"""

from __future__ import annotations

import numpy as np

from fourfold.quant.block import F32, U8, BlockFormat, IntegerCoding, half_column, to_half

BLOCK = 32

IQ4_NL_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The sixteen levels of IQ4_NL, spaced by the density of a normal distribution (ggml)."""

_IQ4_NL_CODES = (np.array(IQ4_NL_VALUES) + 128).astype(np.uint8)


def _nibbles(packed: U8, q: U8) -> None:
    np.bitwise_and(packed, 15, out=q[:, :16])
    np.right_shift(packed, 4, out=q[:, 16:])


def _fifth_bits(packed: U8, q: U8) -> None:
    high = np.unpackbits(np.ascontiguousarray(packed), axis=1, bitorder="little")
    np.left_shift(high, 4, out=high)
    np.bitwise_or(q, high, out=q)


def _unpack_q4_0(blocks: U8, q: U8) -> tuple[F32, None]:
    _nibbles(blocks[:, 2:], q)
    return half_column(blocks, 0), None


def _unpack_q4_1(blocks: U8, q: U8) -> tuple[F32, F32]:
    _nibbles(blocks[:, 4:], q)
    return half_column(blocks, 0), half_column(blocks, 2)


def _unpack_q5_0(blocks: U8, q: U8) -> tuple[F32, None]:
    _nibbles(blocks[:, 6:], q)
    _fifth_bits(blocks[:, 2:6], q)
    return half_column(blocks, 0), None


def _unpack_q5_1(blocks: U8, q: U8) -> tuple[F32, F32]:
    _nibbles(blocks[:, 8:], q)
    _fifth_bits(blocks[:, 4:8], q)
    return half_column(blocks, 0), half_column(blocks, 2)


def _unpack_q8_0(blocks: U8, q: U8) -> tuple[F32, None]:
    # int8 + 128 as uint8 is the same byte with its top bit flipped.
    np.bitwise_xor(blocks[:, 2:], 0x80, out=q)
    return half_column(blocks, 0), None


def _unpack_iq4_nl(blocks: U8, q: U8) -> tuple[F32, None]:
    _nibbles(blocks[:, 2:], q)
    q[...] = _IQ4_NL_CODES[q]
    return half_column(blocks, 0), None


def _inverse(d: F32) -> F32:
    """1 / d, and 0 where that could overflow; such scales are zero in fp16 anyway."""
    normal = np.abs(d) >= np.finfo(np.float32).smallest_normal
    return np.divide(np.float32(1), d, out=np.zeros_like(d), where=normal)


def _quantize_symmetric(blocks: F32, levels: int) -> tuple[F32, U8]:
    """d [b, 1] and codes [b, 32] of x = d * (code - levels/2): the largest magnitude gets code 0."""
    half = levels // 2
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1, keepdims=True), axis=1)
    d = largest / np.float32(-half)
    q = np.trunc(blocks * _inverse(d) + np.float32(half + 0.5))
    return d, np.clip(q, 0, levels - 1).astype(np.uint8)


def _quantize_affine(blocks: F32, levels: int) -> tuple[F32, F32, U8]:
    """d, m [b, 1] and codes [b, 32] of x = d * code + m over the range of the block."""
    low = blocks.min(axis=1, keepdims=True)
    d = (blocks.max(axis=1, keepdims=True) - low) / np.float32(levels - 1)
    q = np.trunc((blocks - low) * _inverse(d) + np.float32(0.5))
    return d, low, np.clip(q, 0, levels - 1).astype(np.uint8)


def _pack_nibbles(q: U8) -> U8:
    return (q[:, :16] & np.uint8(15)) | (q[:, 16:] << np.uint8(4))


def _pack_fifth_bits(q: U8) -> U8:
    return np.packbits(q >> np.uint8(4), axis=1, bitorder="little")


def _encode_q4_0(blocks: F32) -> U8:
    d, q = _quantize_symmetric(blocks, 16)
    return np.concatenate([to_half(d, "Q4_0"), _pack_nibbles(q)], axis=1)


def _encode_q4_1(blocks: F32) -> U8:
    d, m, q = _quantize_affine(blocks, 16)
    return np.concatenate([to_half(d, "Q4_1"), to_half(m, "Q4_1"), _pack_nibbles(q)], axis=1)


def _encode_q5_0(blocks: F32) -> U8:
    d, q = _quantize_symmetric(blocks, 32)
    return np.concatenate([to_half(d, "Q5_0"), _pack_fifth_bits(q), _pack_nibbles(q)], axis=1)


def _encode_q5_1(blocks: F32) -> U8:
    d, m, q = _quantize_affine(blocks, 32)
    halves = [to_half(d, "Q5_1"), to_half(m, "Q5_1")]
    return np.concatenate([*halves, _pack_fifth_bits(q), _pack_nibbles(q)], axis=1)


def _encode_q8_0(blocks: F32) -> U8:
    """Codes are rounded half away from zero, as C's roundf does."""
    d = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    x = blocks * _inverse(d)
    size = np.abs(x)
    whole = np.floor(size)
    q = np.copysign(whole + np.floor(2 * (size - whole)), x).astype(np.int8)
    return np.concatenate([to_half(d, "Q8_0"), q.view(np.uint8)], axis=1)


Q4_0 = BlockFormat("Q4_0", 2, BLOCK, 18, IntegerCoding(_unpack_q4_0, 4, 32, 8), encoder=_encode_q4_0)
Q4_1 = BlockFormat("Q4_1", 3, BLOCK, 20, IntegerCoding(_unpack_q4_1, 4, 32, 0), encoder=_encode_q4_1)
Q5_0 = BlockFormat("Q5_0", 6, BLOCK, 22, IntegerCoding(_unpack_q5_0, 5, 32, 16), encoder=_encode_q5_0)
Q5_1 = BlockFormat("Q5_1", 7, BLOCK, 24, IntegerCoding(_unpack_q5_1, 5, 32, 0), encoder=_encode_q5_1)
Q8_0 = BlockFormat("Q8_0", 8, BLOCK, 34, IntegerCoding(_unpack_q8_0, 8, 32, 128), encoder=_encode_q8_0)
IQ4_NL = BlockFormat("IQ4_NL", 20, BLOCK, 18, IntegerCoding(_unpack_iq4_nl, 8, 32, 128))

FORMATS = (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL)
