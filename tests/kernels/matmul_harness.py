"""Packed matrices and the matmul kernels' documented order of operations, emulated bit for bit in NumPy."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fourfold import _native
from fourfold.quant.floats import F8_E4M3, F8_E5M2

ISAS: tuple[str, ...] = _native.TEST_ISAS
ELEM = {"ints": 0, "f32": 1, "f16": 2, "bf16": 3, "f8_e4m3": 4, "f8_e5m2": 5}
COMPUTE = {"int8": 0, "bf16": 1, "f32": 2}
ACT = {"none": 0, "silu": 1, "gelu_tanh": 2, "gelu": 3}
GROUP: int = _native.ACTIVATION_GROUP

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]


def available_isas() -> list[int]:
    return [ISAS.index(name) for name in _native.isas()]


def matmul_isas() -> list[int]:
    """Those of this CPU, and amx with its tile unit written out in C++."""
    return [*available_isas(), ISAS.index("amx_emulated")]


def bf16_bits(x: Floats) -> NDArray[np.uint16]:
    """Round to nearest, ties to even. Not for NaN."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: NDArray[np.uint16]) -> Floats:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def fma(a: Floats, b: Floats, c: Floats) -> Floats:
    """fp32 a * b + c with one rounding.

    The product is exact in float64. The sum is rounded to odd (Boldo and Melquiond 2008), after which
    rounding to float32 is the rounding of the exact value.
    """
    p, c64 = np.asarray(a, np.float64) * b, np.asarray(c, np.float64)
    total = p + c64
    part = total - p
    error = (p - (total - part)) + (c64 - part)
    bits = total.view(np.int64).copy() if total.shape else np.array(total).view(np.int64)
    away = np.where((error > 0) == (total > 0), 1, -1)
    bits += np.where((error != 0) & (bits % 2 == 0), away, 0)
    return bits.view(np.float64).astype(np.float32)


FP8_FORMATS = {"f8_e4m3": F8_E4M3, "f8_e5m2": F8_E5M2}
WHOLE_ROW = 1 << 20
"""A group that no row is longer than."""


@dataclass(frozen=True)
class Kind:
    """How the weights of a matrix are held. zero and offset are those of native/matrix.h."""

    elem: str
    bits: int = 0
    group: int = 0
    zero: int = 0
    offset: bool = False
    wide: bool = False

    def __str__(self) -> str:
        if self.elem in FP8_FORMATS:
            return f"{self.elem}-g{self.group}" if self.group < WHOLE_ROW else self.elem
        if self.elem != "ints":
            return self.elem
        shift = "offset" if self.offset else f"zero{self.zero}"
        return f"int{self.bits}-g{self.group}-{shift}-{'fp32' if self.wide else 'fp16'}"


INT_KINDS = [
    *((4, group, offset) for group in (16, 32) for offset in (False, True)),
    *((5, 32, offset) for offset in (False, True)),
    (6, 16, False),
    (8, 32, False),
]
"""(bits, group, with offsets) of the integers that some checkpoint format comes to."""

INTS = [
    Kind("ints", bits, group, 0 if offset else 1 << (bits - 1), offset, wide)
    for bits, group, offset in INT_KINDS
    for wide in (False, True)
]
DENSE = [Kind("f32"), Kind("f16"), Kind("bf16")]
FP8 = [
    Kind("f8_e4m3", group=WHOLE_ROW),
    Kind("f8_e4m3", group=128),
    Kind("f8_e5m2", group=WHOLE_ROW),
    Kind("f8_e5m2", group=64),
]


@dataclass(frozen=True)
class Packed:
    """A packed matrix [n, k]; w: what it decodes to. q, scale, offset: what integers and fp8 are made of."""

    kind: Kind
    n: int
    k: int
    data: NDArray[np.uint8]
    w: Floats
    q: NDArray[np.uint8] | None = None
    scale: Floats | None = None
    offset: Floats | None = None

    @property
    def description(self) -> tuple[int, int, int, int, bool, bool]:
        kind = self.kind
        return (ELEM[kind.elem], kind.bits, kind.group, kind.zero, kind.offset, kind.wide)


def aligned(size: int) -> NDArray[np.uint8]:
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size]


def random_fp8(kind: Kind, n: int, k: int, rng: np.random.Generator) -> Packed:
    """Every finite code, and scales that bring the largest to the size of one."""
    codes = rng.integers(0, 256, (n, k)).astype(np.uint8)
    finite = 0x7E if kind.elem == "f8_e4m3" else 0x7B
    codes = np.where(codes & 0x7F > finite, codes & 0x80, codes).astype(np.uint8)
    top = float(FP8_FORMATS[kind.elem].decode(np.array([finite], np.uint8), (1,))[0])
    scale = (np.exp(rng.standard_normal((n, -(-k // kind.group)))) / top).astype(np.float32)
    data = aligned(_native.packed_bytes(n, k, ELEM[kind.elem], group=kind.group))
    _native.pack_fp8(codes, scale, kind.group, ELEM[kind.elem], data)
    values = FP8_FORMATS[kind.elem].decode(codes.reshape(-1), (n, k))
    w = values * np.repeat(scale, min(kind.group, k), 1)[:, :k]
    return Packed(kind, n, k, data, w, codes, scale)


def random_matrix(kind: Kind, n: int, k: int, seed: int = 0) -> Packed:
    rng = np.random.default_rng(seed)
    if kind.elem in FP8_FORMATS:
        return random_fp8(kind, n, k, rng)
    if kind.elem != "ints":
        w = rng.standard_normal((n, k)).astype(np.float32)
        rows: NDArray[np.uint8]
        if kind.elem == "f16":
            half = w.astype(np.float16)
            w, rows = half.astype(np.float32), half.view(np.uint8)
        elif kind.elem == "bf16":
            bits = bf16_bits(w)
            w, rows = from_bf16(bits), bits.view(np.uint8)
        else:
            rows = w.view(np.uint8)
        data = aligned(_native.packed_bytes(n, k, ELEM[kind.elem]))
        _native.pack_dense(rows, k, ELEM[kind.elem], data)
        return Packed(kind, n, k, data, w)

    q = rng.integers(0, 1 << kind.bits, (n, k)).astype(np.uint8)
    q[:, 0], q[:, -1] = 0, (1 << kind.bits) - 1
    stored = np.float32 if kind.wide else np.float16
    groups = k // kind.group
    scale = (rng.standard_normal((n, groups)) / (1 << kind.bits)).astype(stored).astype(np.float32)
    offset = rng.standard_normal((n, groups)).astype(stored).astype(np.float32) if kind.offset else None
    return packed_ints(kind, q, scale, offset)


def packed_ints(kind: Kind, q: NDArray[np.uint8], scale: Floats, offset: Floats | None = None) -> Packed:
    """q [n, k]; scale, offset [n, k / group], of the kind's width."""
    n, k = q.shape
    data = aligned(
        _native.packed_bytes(n, k, 0, kind.bits, kind.group, kind.zero, offset is not None, kind.wide)
    )
    _native.pack_ints(q, scale, offset, kind.bits, kind.group, kind.zero, kind.wide, data)
    w = (q.astype(np.float32) - kind.zero) * np.repeat(scale, kind.group, 1)
    if offset is not None:
        w = w + np.repeat(offset, kind.group, 1)
    return Packed(kind, n, k, data, w, q, scale, offset)


@dataclass(frozen=True)
class Epilogue:
    """out = act(gate) * (norm(x) w^T + bias) + residual; each part may be absent.

    outliers: columns of x kept out of its int8 groups.
    """

    norm: Floats | None = None
    bias: Floats | None = None
    residual: Floats | None = None
    gate: Floats | None = None
    act: str = "none"
    outliers: NDArray[np.int32] | None = None


def columns_of(m: Packed, channels: NDArray[np.int32]) -> NDArray[np.uint16]:
    """Columns of an integer matrix as fp16 bits, [tiles][channels][16]."""
    out = np.full(-(-m.n // 16) * 16 * len(channels), 0xFFFF, np.uint16)
    _, bits, group, zero, has_offset, wide = m.description
    _native.extract_columns(m.data, m.n, m.k, bits, group, zero, has_offset, wide, channels, out)
    return out


PLAIN = Epilogue()
EPS = 1e-5


def matmul(
    isa: int,
    x: Floats,
    m: Packed,
    compute: str,
    epilogue: Epilogue = PLAIN,
    tiles: int = 4,
    rows: int = 96,
) -> Floats:
    """The kernel: x [rows, k] -> [rows, n], in blocks of `tiles` tiles of 16 columns and `rows` rows."""
    out = np.full((len(x), m.n), np.nan, np.float32)
    _native.test_matmul(
        isa,
        np.ascontiguousarray(x),
        m.data,
        m.n,
        *m.description,
        COMPUTE[compute],
        epilogue.norm,
        EPS,
        epilogue.bias,
        epilogue.residual,
        epilogue.gate,
        ACT[epilogue.act],
        epilogue.outliers,
        None if epilogue.outliers is None else columns_of(m, epilogue.outliers),
        tiles,
        rows,
        out,
    )
    return out


def lane_sum(lanes: Floats) -> Floats:
    """[..., 16] -> [...]: halves added until one is left."""
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]


def norm_rows(x: Floats, weight: Floats, eps: float = EPS) -> Floats:
    """RMSNorm in the kernel's order: sixteen running sums, halved, then x * r * weight."""
    rows, k = x.shape
    padded = np.zeros((rows, -(-k // 16) * 16), np.float32)
    padded[:, :k] = x
    sums = np.zeros((rows, 16), np.float32)
    for i in range(0, k, 16):
        sums = fma(padded[:, i : i + 16], padded[:, i : i + 16], sums)
    r = np.float32(1) / np.sqrt(lane_sum(sums) / np.float32(k) + np.float32(eps))
    return np.asarray(x * r[:, None] * weight, np.float32)


def quantize(x: Floats) -> tuple[NDArray[np.int32], Floats]:
    """int8 [rows, k] and scales [rows, ceil(k / GROUP)]: scale = max|x| / 127, q = round(x / scale)."""
    rows, k = x.shape
    q, scales = np.zeros((rows, k), np.int32), np.zeros((rows, -(-k // GROUP)), np.float32)
    for g, start in enumerate(range(0, k, GROUP)):
        part = x[:, start : start + GROUP]
        largest = np.abs(part).max(1)
        scales[:, g] = largest / np.float32(127)
        with np.errstate(divide="ignore"):
            inverse = np.where(largest > 0, np.float32(127) / largest, np.float32(0))
        q[:, start : start + GROUP] = np.rint(part * inverse[:, None])
    return q, scales


def emulate_int8(x: Floats, m: Packed, outliers: NDArray[np.int32] | None = None) -> Floats:
    """The order stated at the head of native/kernels/matmul.h."""
    assert m.q is not None
    assert m.scale is not None
    size = m.kind.group
    y, kept = np.zeros((2, len(x), m.n), np.float32)
    if outliers is not None:
        for k in outliers:
            kept = fma(x[:, k, None], m.w[None, :, k].astype(np.float16).astype(np.float32), kept)
        x = x.copy()
        x[:, outliers] = 0
    q, scales = quantize(x)
    for block, start in enumerate(range(0, m.k, GROUP)):
        part = np.zeros_like(y)
        for k in range(start, min(start + GROUP, m.k), size):
            a, w = q[:, k : k + size], m.q[:, k : k + size].astype(np.int32) - m.kind.zero
            part = fma((a @ w.T).astype(np.float32), m.scale[:, k // size][None], part)
            if m.offset is not None:
                sums = a.sum(1).astype(np.float32)[:, None]
                part = fma(sums, m.offset[:, k // size][None], part)
        y = fma(part, scales[:, block, None], y)
    return y + kept


def decoded_to_bf16(m: Packed) -> Packed:
    """The weights as stated at the head of native/kernels/decode_bf16.h."""
    assert m.q is not None
    assert m.scale is not None
    size = min(m.kind.group, m.k)
    d = m.scale * np.float32(1 + 2.0**-8 * 0.72134752)
    scale = np.repeat(d, size, 1)[:, : m.k]
    if m.kind.elem in FP8_FORMATS:
        w = FP8_FORMATS[m.kind.elem].decode(m.q.reshape(-1), m.q.shape) * scale
    else:
        o = np.float32(-m.kind.zero) * d
        if m.offset is not None:
            o = m.offset * np.float32(1 + 2.0**-8 * 0.72134752)
        w = fma(m.q.astype(np.float32), scale, np.repeat(o, size, 1))
    return replace(m, w=(w.view(np.uint32) & 0xFFFF0000).view(np.float32))


def emulate_f32(x: Floats, m: Packed) -> Floats:
    y = np.zeros((len(x), m.n), np.float32)
    for k in range(m.k):
        y = fma(x[:, k, None], m.w[None, :, k], y)
    return y


def emulate_fp8(x: Floats, m: Packed) -> Floats:
    """The order stated at the head of native/kernels/matmul_fp8.h; within a group as emulate_bf16."""
    assert m.q is not None
    assert m.scale is not None
    a = from_bf16(bf16_bits(x))
    w = FP8_FORMATS[m.kind.elem].decode(m.q.reshape(-1), m.q.shape)
    y = np.zeros((len(x), m.n), np.float32)
    for start in range(0, m.k, m.kind.group):
        part = np.zeros_like(y)
        for k in range(start, min(start + m.kind.group, m.k), 2):
            part = fma(a[:, k + 1, None], w[None, :, k + 1], part)
            part = fma(a[:, k, None], w[None, :, k], part)
        y = fma(part, m.scale[:, start // m.kind.group][None], y)
    return y


def emulate_bf16(x: Floats, m: Packed, start: int = 0, y: Floats | None = None) -> Floats:
    """Pairs of k from `start` on top of y, the odd one first (as vdpbf16ps); two roundings per pair."""
    a, w = from_bf16(bf16_bits(x)), m.w
    if m.k % 2:
        a, w = np.pad(a, ((0, 0), (0, 1))), np.pad(w, ((0, 0), (0, 1)))
    if y is None:
        y = np.zeros((len(x), m.n), np.float32)
    for k in range(start, a.shape[1], 2):
        y = fma(a[:, k + 1, None], w[None, :, k + 1], y)
        y = fma(a[:, k, None], w[None, :, k], y)
    return y


def emulate_bf16_tiles(x: Floats, m: Packed) -> Floats:
    """The order stated at the head of native/kernels/matmul_tiles.h: TDPBF16PS over 32 k at a time."""
    a, y = from_bf16(bf16_bits(x)), np.zeros((len(x), m.n), np.float32)
    whole = m.k // 32 * 32
    for start in range(0, whole, 32):
        sums = np.zeros((2, len(x), m.n), np.float32)
        for k in range(start, start + 32):
            sums[k % 2] = fma(a[:, k, None], m.w[None, :, k], sums[k % 2])
        y = y + (sums[0] + sums[1])
    return emulate_bf16(x, m, whole, y)
