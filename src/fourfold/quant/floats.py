"""Formats of one float per element: F32, F16, BF16, and FP8 (E4M3 and E5M2, Micikevicius et al. 2022)."""

from __future__ import annotations

import numpy as np

from fourfold.quant.block import F32 as Floats
from fourfold.quant.block import U8, BlockFormat


def _decode_f32(data: U8) -> Floats:
    return data.view("<f4").astype(np.float32)


def _encode_f32(blocks: Floats) -> U8:
    return np.ascontiguousarray(blocks, "<f4").view(np.uint8)


def _decode_f16(data: U8) -> Floats:
    return data.view("<f2").astype(np.float32)


def _encode_f16(blocks: Floats) -> U8:
    with np.errstate(over="ignore"):
        return blocks.astype("<f2").view(np.uint8)


def _decode_bf16(data: U8) -> Floats:
    bits = data.view("<u2").astype(np.uint32)
    bits <<= 16
    return bits.view(np.float32)


def _encode_bf16(blocks: Floats) -> U8:
    """Round to nearest, ties to even. Only finite values come here."""
    bits = np.ascontiguousarray(blocks).view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    return rounded.astype("<u2").view(np.uint8)


def _fp8_table(exponent_bits: int, mantissa_bits: int, has_infinity: bool) -> Floats:
    """Value of each of the 256 codes. Without infinity only the all-ones code is NaN (the "FN" variant)."""
    codes = np.arange(256)
    sign = np.where(codes & 0x80, -1.0, 1.0)
    exponent = (codes & 0x7F) >> mantissa_bits
    fraction = (codes & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    bias = (1 << (exponent_bits - 1)) - 1
    value = np.where(exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias))
    if has_infinity:
        top = exponent == (1 << exponent_bits) - 1
        value = np.where(top, np.where(fraction == 0, np.inf, np.nan), value)
    else:
        value = np.where((codes & 0x7F) == 0x7F, np.nan, value)
    table = (sign * value).astype(np.float32)
    table.flags.writeable = False
    return table


_E4M3 = _fp8_table(4, 3, has_infinity=False)
_E5M2 = _fp8_table(5, 2, has_infinity=True)

F32 = BlockFormat("F32", 0, 1, 4, floats=_decode_f32, encoder=_encode_f32)
F16 = BlockFormat("F16", 1, 1, 2, floats=_decode_f16, encoder=_encode_f16)
BF16 = BlockFormat("BF16", 30, 1, 2, floats=_decode_bf16, encoder=_encode_bf16)
F8_E4M3 = BlockFormat("F8_E4M3", None, 1, 1, floats=lambda data: _E4M3[data])
F8_E5M2 = BlockFormat("F8_E5M2", None, 1, 1, floats=lambda data: _E5M2[data])

FORMATS = (F32, F16, BF16, F8_E4M3, F8_E5M2)
