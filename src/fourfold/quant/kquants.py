"""ggml's k-quants: super-blocks of 256 elements whose group scales are themselves quantized. Q2_K ... Q6_K.

Element order: a run of packed bytes holds several bit planes; plane p of byte l is element p * run + l of
its part.
"""

from __future__ import annotations

import numpy as np

from fourfold.quant.block import F32, U8, BlockFormat, IntegerCoding, half_column
from fourfold.quant.kquants_encode import encode_q4_k, encode_q6_k

BLOCK = 256

_PAIRS = np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
_NIBBLES = np.array([0, 4], np.uint8).reshape(1, 1, 2, 1)
_BITS = np.arange(8, dtype=np.uint8).reshape(1, 8, 1)


def _planes(packed: U8, run: int, shifts: U8, mask: int, out: U8) -> None:
    """out [b, parts * planes * run] = bit planes of packed [b, parts * run], plane after plane in a part."""
    view = out.reshape(len(out), -1, shifts.size, run)
    np.right_shift(packed.reshape(len(packed), -1, 1, run), shifts, out=view)
    np.bitwise_and(out, mask, out=out)


def _bit_planes(packed: U8, weight: int) -> U8:
    """[b, 32] -> [b, 256]: bit p of byte l, times `weight`, at p * 32 + l."""
    bits = packed[:, None, :] >> _BITS
    bits &= 1
    bits *= np.uint8(weight)
    return bits.reshape(len(packed), BLOCK)


def _six_bit_scales(packed: U8) -> tuple[U8, U8]:
    """12 bytes -> eight 6-bit scales and eight 6-bit minima (Q4_K, Q5_K).

    Bytes 0-3 and 4-7 hold scales and minima 0-3 in their low six bits; their top two bits are the top bits
    of scales and minima 4-7, whose low nibbles are in bytes 8-11 (scale low, minimum high).
    """
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 2) & 48)], axis=1)
    minima = np.concatenate([second & 63, (third >> 4) | ((second >> 2) & 48)], axis=1)
    return scales, minima


def _unpack_q2_k(blocks: U8, q: U8) -> tuple[F32, F32]:
    """16 bytes: 4-bit scale (low) and minimum (high) per group of 16; 64 of 2-bit codes; fp16 d, dmin."""
    scales = blocks[:, 0:16]
    _planes(blocks[:, 16:80], 32, _PAIRS, 3, q)
    d, dmin = half_column(blocks, 80), half_column(blocks, 82)
    return d * (scales & 15).astype(np.float32), -(dmin * (scales >> 4).astype(np.float32))


def _unpack_q3_k(blocks: U8, q: U8) -> tuple[F32, None]:
    """32 bytes: third bit of each code; 64 of low 2 bits; 12: sixteen 6-bit scales, plus 32; fp16 d."""
    _planes(blocks[:, 32:96], 32, _PAIRS, 3, q)
    np.bitwise_or(q, _bit_planes(blocks[:, 0:32], 4), out=q)
    low, high = blocks[:, 96:104], blocks[:, 104:108]
    nibbles = np.concatenate([low & 15, low >> 4], axis=1)
    tops = np.concatenate([(high >> shift) & 3 for shift in (0, 2, 4, 6)], axis=1)
    scales = (nibbles | (tops << 4)).astype(np.float32) - np.float32(32)
    return half_column(blocks, 108) * scales, None


def _unpack_q4_k(blocks: U8, q: U8) -> tuple[F32, F32]:
    """fp16 d; fp16 dmin; 12 bytes of 6-bit scales and minima; 128 bytes of nibbles."""
    _planes(blocks[:, 16:144], 32, _NIBBLES, 15, q)
    return _scaled_six_bit(blocks)


def _unpack_q5_k(blocks: U8, q: U8) -> tuple[F32, F32]:
    """As Q4_K, with 32 bytes of fifth bits before the nibbles."""
    _planes(blocks[:, 48:176], 32, _NIBBLES, 15, q)
    np.bitwise_or(q, _bit_planes(blocks[:, 16:48], 16), out=q)
    return _scaled_six_bit(blocks)


def _scaled_six_bit(blocks: U8) -> tuple[F32, F32]:
    scales, minima = _six_bit_scales(blocks[:, 4:16])
    d, dmin = half_column(blocks, 0), half_column(blocks, 2)
    return d * scales.astype(np.float32), -(dmin * minima.astype(np.float32))


def _unpack_q6_k(blocks: U8, q: U8) -> tuple[F32, None]:
    """128 bytes of low nibbles; 64 bytes of the top 2 bits; sixteen int8 scales; fp16 d."""
    _planes(blocks[:, 0:128], 64, _NIBBLES, 15, q)
    high = np.empty_like(q)
    _planes(blocks[:, 128:192], 32, _PAIRS, 3, high)
    np.left_shift(high, 4, out=high)
    np.bitwise_or(q, high, out=q)
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    return half_column(blocks, 208) * scales, None


Q2_K = BlockFormat("Q2_K", 10, BLOCK, 84, IntegerCoding(_unpack_q2_k, 4, 16, 0))
Q3_K = BlockFormat("Q3_K", 11, BLOCK, 110, IntegerCoding(_unpack_q3_k, 4, 16, 4))
Q4_K = BlockFormat("Q4_K", 12, BLOCK, 144, IntegerCoding(_unpack_q4_k, 4, 32, 0), encoder=encode_q4_k)
Q5_K = BlockFormat("Q5_K", 13, BLOCK, 176, IntegerCoding(_unpack_q5_k, 5, 32, 0))
Q6_K = BlockFormat("Q6_K", 14, BLOCK, 210, IntegerCoding(_unpack_q6_k, 6, 16, 32), encoder=encode_q6_k)

FORMATS = (Q2_K, Q3_K, Q4_K, Q5_K, Q6_K)
