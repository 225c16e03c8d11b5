"""Float blocks to Q4_K and Q6_K: a weighted search for each group's scale, quantized scales, then codes."""

from __future__ import annotations

import numpy as np

from fourfold.quant.block import F32, U8, to_half

_STEPS = np.linspace(-1.0, 1.0, 11, dtype=np.float32)
"""How far the top code is moved in the search, in codes: a scale slightly off the range often fits better."""


def _divide(a: F32, b: F32) -> F32:
    """a / b, 0 where b is 0."""
    return np.divide(a, b, out=np.zeros(np.broadcast_shapes(a.shape, b.shape), np.float32), where=b != 0)


def _normalized(groups: F32) -> tuple[F32, F32]:
    """Groups [g, n] over their largest magnitude [g, 1]; no square then overflows or vanishes."""
    peak = np.abs(groups).max(axis=1, keepdims=True)
    return _divide(groups, peak), peak


def _fit_affine(x: F32, top: int) -> tuple[F32, F32]:
    """Scale and minimum [g, 1] of x [g, n] ~ scale * code - minimum, code in 0..top, scale and minimum >= 0.

    For each trial scale the codes are fixed and scale and minimum solved by weighted least squares; the
    weight of an element grows with its magnitude, so that large weights are kept best.
    """
    weight = np.abs(x) + np.sqrt(np.mean(x * x, axis=1, keepdims=True))
    low = np.minimum(x.min(axis=1, keepdims=True), 0)
    span = x.max(axis=1, keepdims=True) - low
    best_scale, best_low = span / np.float32(top), low.copy()
    codes = np.clip(np.rint(_divide(x - low, best_scale)), 0, top)
    best_error = np.sum(weight * (best_scale * codes + best_low - x) ** 2, axis=1, keepdims=True)
    sw, sx = weight.sum(axis=1, keepdims=True), (weight * x).sum(axis=1, keepdims=True)
    for step in _STEPS:
        codes = np.clip(np.rint((x - low) * _divide(np.float32(top) + step, span)), 0, top)
        sc = (weight * codes).sum(axis=1, keepdims=True)
        scc = (weight * codes * codes).sum(axis=1, keepdims=True)
        sxc = (weight * x * codes).sum(axis=1, keepdims=True)
        determinant = sw * scc - sc * sc
        scale = _divide(sw * sxc - sx * sc, determinant)
        base = _divide(scc * sx - sc * sxc, determinant)
        clipped = base > 0
        base = np.where(clipped, np.float32(0), base)
        scale = np.where(clipped, _divide(sxc, scc), scale)
        error = np.sum(weight * (scale * codes + base - x) ** 2, axis=1, keepdims=True)
        better = (error < best_error) & (determinant > 0) & (scale > 0)
        best_scale, best_low = np.where(better, scale, best_scale), np.where(better, base, best_low)
        best_error = np.where(better, error, best_error)
    return best_scale, -best_low


def _fit_symmetric(x: F32, half: int) -> F32:
    """Scale [g, 1], of either sign, of x [g, n] ~ scale * code with code in -half..half-1."""
    weight = x * x
    largest = np.take_along_axis(x, np.abs(x).argmax(axis=1, keepdims=True), axis=1)
    best = largest / np.float32(-half)
    codes = np.clip(np.rint(_divide(x, best)), -half, half - 1)
    best_error = np.sum(weight * (best * codes - x) ** 2, axis=1, keepdims=True)
    for step in _STEPS:
        codes = np.clip(np.rint(x * _divide(-(np.float32(half) + step), largest)), -half, half - 1)
        sxc = (weight * x * codes).sum(axis=1, keepdims=True)
        scale = _divide(sxc, (weight * codes * codes).sum(axis=1, keepdims=True))
        error = np.sum(weight * (scale * codes - x) ** 2, axis=1, keepdims=True)
        better = error < best_error
        best, best_error = np.where(better, scale, best), np.where(better, error, best_error)
    return best


def encode_q4_k(blocks: F32) -> U8:
    """float32 [b, 256] -> uint8 [b, 144]."""
    count = len(blocks)
    groups = blocks.reshape(-1, 32)
    unit, peak = _normalized(groups)
    scale, minimum = ((part * peak).reshape(count, 8) for part in _fit_affine(unit, 15))
    d = to_half(scale.max(axis=1, keepdims=True) / np.float32(63), "Q4_K")
    dmin = to_half(minimum.max(axis=1, keepdims=True) / np.float32(63), "Q4_K")
    # Codes are chosen against the scales as they will be read back: fp16 times 6-bit integer.
    d32, dmin32 = d.view("<f2").astype(np.float32), dmin.view("<f2").astype(np.float32)
    sc = np.clip(np.rint(_divide(scale, d32)), 0, 63).astype(np.uint8)
    mn = np.clip(np.rint(_divide(minimum, dmin32)), 0, 63).astype(np.uint8)
    real_scale = (d32 * sc).reshape(-1, 1)
    real_minimum = (dmin32 * mn).reshape(-1, 1)
    q = np.clip(np.rint(_divide(groups + real_minimum, real_scale)), 0, 15).astype(np.uint8)
    q = q.reshape(count, 4, 2, 32)
    packed = np.concatenate(
        [
            (sc[:, :4] & 63) | ((sc[:, 4:] >> 4) << 6),
            (mn[:, :4] & 63) | ((mn[:, 4:] >> 4) << 6),
            (sc[:, 4:] & 15) | ((mn[:, 4:] & 15) << 4),
        ],
        axis=1,
    )
    nibbles = (q[:, :, 0] | (q[:, :, 1] << 4)).reshape(count, 128)
    return np.concatenate([d, dmin, packed, nibbles], axis=1)


def encode_q6_k(blocks: F32) -> U8:
    """float32 [b, 256] -> uint8 [b, 210]."""
    count = len(blocks)
    groups = blocks.reshape(-1, 16)
    unit, peak = _normalized(groups)
    scale = (_fit_symmetric(unit, 32) * peak).reshape(count, 16)
    largest = np.take_along_axis(scale, np.abs(scale).argmax(axis=1, keepdims=True), axis=1)
    d = to_half(largest / np.float32(-128), "Q6_K")
    d32 = d.view("<f2").astype(np.float32)
    sc = np.clip(np.rint(_divide(scale, d32)), -128, 127).astype(np.int8)
    real_scale = (d32 * sc).reshape(-1, 1)
    q = (np.clip(np.rint(_divide(groups, real_scale)), -32, 31) + 32).astype(np.uint8)
    low = (q & 15).reshape(count, 2, 2, 64)
    high = (q >> 4).reshape(count, 2, 4, 32)
    nibbles = (low[:, :, 0] | (low[:, :, 1] << 4)).reshape(count, 128)
    tops = high[:, :, 0] | (high[:, :, 1] << 2) | (high[:, :, 2] << 4) | (high[:, :, 3] << 6)
    tops = tops.reshape(count, 64)
    return np.concatenate([nibbles, tops, sc.view(np.uint8), d], axis=1)
