"""A paged KV pool for the attention kernels, and the same attention in float64 without pages or tiles."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fourfold import _native
from fourfold.quant.floats import F8_E4M3

BLOCK = 32
KV_TYPES = ("bf16", "f32", "int8", "fp8")
CODED = ("int8", "fp8")
E4M3 = F8_E4M3.decode(np.arange(127, dtype=np.uint8), (127,))
"""The magnitudes, ascending."""
ISAS: tuple[str, ...] = _native.TEST_ISAS

Floats = NDArray[np.float32]


def available_isas() -> list[int]:
    return [ISAS.index(name) for name in _native.isas()]


def covered_isas() -> list[int]:
    """Also the tile unit in C++, for machines that have none."""
    return [*available_isas(), ISAS.index("amx_emulated")]


def bf16(x: NDArray[Any]) -> Floats:
    """Rounded to bfloat16, ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return rounded.astype(np.uint32).view(np.float32)


def encode(x: NDArray[Any], kv: str) -> tuple[Floats, Floats]:
    """Codes (as the numbers they stand for) and scales of rows along the last axis, as attention.h says."""
    x = np.ascontiguousarray(x, np.float32)
    top = np.float32(127 if kv == "int8" else 448)
    largest = np.abs(x).max(-1, keepdims=True)
    scaled = x * (top / largest)
    if kv == "int8":
        return np.rint(scaled), largest / top
    above = np.searchsorted(E4M3, np.abs(scaled)).clip(1, 126)
    low, high = E4M3[above - 1], E4M3[above]
    middle = (low.astype(np.float64) + high) / 2
    up = (np.abs(scaled) > middle) | ((np.abs(scaled) == middle) & (above % 2 == 0))
    return np.copysign(np.where(up, high, low), scaled), largest / top


def stored(x: NDArray[Any], kv: str) -> NDArray[np.float64]:
    """What a cache of this type makes of rows [..., head_dim]."""
    if kv in CODED:
        codes, scales = encode(x, kv)
        return codes.astype(np.float64) * scales
    return bf16(x).astype(np.float64) if kv == "bf16" else x.astype(np.float64)


@dataclass
class Layer:
    """What the op says; defaults are a plain Llama layer."""

    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    window: int = 0
    softcap: float = 0.0
    sinks: Floats | None = None
    q_norm: Floats | None = None
    k_norm: Floats | None = None
    eps: float = 1e-6
    norm_offset: float = 0.0
    rope_dim: int = 0
    exact: bool = False
    kv: str = "bf16"

    @property
    def half_bytes(self) -> int:
        """Of K or V of one head in a block."""
        return _native.kv_block_bytes(KV_TYPES.index(self.kv), 1, self.head_dim) // 2

    @property
    def scale(self) -> float:
        return float(np.float32(self.head_dim**-0.5))


def rope_tables(positions: NDArray[np.int64], dim: int) -> tuple[Floats, Floats]:
    inverse = 10000.0 ** (-np.arange(0, dim, 2) / dim)
    angles = positions[:, None] * inverse[None, :]
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


@dataclass
class Tokens:
    """q, k, v of consecutive tokens of one sequence, before norm and rotation."""

    q: Floats
    k: Floats
    v: Floats

    def __getitem__(self, rows: slice) -> Tokens:
        return Tokens(self.q[rows], self.k[rows], self.v[rows])


def random_tokens(layer: Layer, count: int, seed: int) -> Tokens:
    rng = np.random.default_rng(seed)

    def draw(heads: int) -> Floats:
        return rng.standard_normal((count, heads * layer.head_dim)).astype(np.float32)

    return Tokens(2 * draw(layer.heads), draw(layer.kv_heads), draw(layer.kv_heads) + 0.5)


@dataclass
class Pool:
    """A KV pool whose every slot is NaN until written, and shuffled block tables."""

    layer: Layer
    blocks: int
    isa: int
    seed: int = 0
    data: NDArray[np.uint8] = field(init=False)
    free: list[int] = field(init=False)
    tables: dict[str, list[int]] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)
    items: int = 0
    """Work items of the last run."""

    def __post_init__(self) -> None:
        # All ones is NaN in every type but int8, whose scales are then NaN.
        self.data = np.full(self.blocks * self.layer.kv_heads * 2 * self.layer.half_bytes, 0xFF, np.uint8)
        self.free = list(np.random.default_rng(self.seed).permutation(self.blocks))

    def run(
        self, batch: dict[str, Tokens], threads: int = 1, planned_threads: int | None = None
    ) -> dict[str, Floats]:
        """Appends each sequence's tokens and attends; outputs per sequence."""
        layer = self.layer
        row_start, context, block_start, blocks, positions = [0], [], [0], [], []
        for name, tokens in batch.items():
            done, count = self.lengths.get(name, 0), len(tokens.q)
            table = self.tables.setdefault(name, [])
            while len(table) * BLOCK < done + count:
                table.append(int(self.free.pop()))
            row_start.append(row_start[-1] + count)
            context.append(done)
            blocks += table
            block_start.append(len(blocks))
            positions.append(np.arange(done, done + count))
            self.lengths[name] = done + count
        q, k, v = (np.concatenate([getattr(t, f) for t in batch.values()]) for f in "qkv")
        out = np.full_like(q, np.nan)
        cos = sin = None
        if layer.rope_dim:
            cos, sin = rope_tables(np.concatenate(positions), layer.rope_dim)
        self.items = _native.test_attention(
            self.isa, q, k, v, out, layer.heads, layer.kv_heads, layer.head_dim, layer.scale, layer.window,
            layer.softcap, layer.sinks, layer.q_norm, layer.k_norm, layer.eps, layer.norm_offset, cos, sin,
            layer.exact, KV_TYPES.index(layer.kv), self.data, np.array(row_start, np.int32),
            np.array(context, np.int32), np.array(block_start, np.int32), np.array(blocks, np.int32), threads,
            planned_threads or threads,
        )  # fmt: skip
        return {name: out[row_start[i] : row_start[i + 1]] for i, name in enumerate(batch)}

    def cached(self, name: str) -> tuple[Floats, Floats]:
        """K and V of a sequence as they lie in the pool: float32 [tokens, kv_heads, head_dim]."""
        layer, hd = self.layer, self.layer.head_dim
        halves = self.data.reshape(self.blocks, layer.kv_heads, 2, -1)[self.tables[name]]
        scales = None
        if layer.kv in CODED:
            scales = np.ascontiguousarray(halves[..., hd * BLOCK :]).view(np.float32)
            numbers = self._decode(halves[..., : hd * BLOCK])
        elif layer.kv == "f32":
            numbers = halves.view(np.float32)
        else:
            numbers = (halves.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        k, v = numbers[:, :, 0], numbers[:, :, 1]
        if layer.kv == "f32":
            k = k.reshape(-1, layer.kv_heads, hd, BLOCK).transpose(0, 3, 1, 2)
            v = v.reshape(-1, layer.kv_heads, BLOCK, hd).transpose(0, 2, 1, 3)
        else:
            k = k.reshape(-1, layer.kv_heads, hd // 2, BLOCK, 2).transpose(0, 3, 1, 2, 4)
            v = v.reshape(-1, layer.kv_heads, BLOCK // 2, hd, 2).transpose(0, 2, 4, 1, 3)
        n, shape = self.lengths[name], (-1, layer.kv_heads, hd)
        k, v = k.reshape(shape)[:n], v.reshape(shape)[:n]
        if scales is not None:
            of = scales.transpose(2, 0, 3, 1).reshape(2, -1, layer.kv_heads, 1)[:, :n]
            k, v = k * of[0], v * of[1]
        return k, v

    def _decode(self, codes: NDArray[np.uint8]) -> Floats:
        if self.layer.kv == "fp8":
            return F8_E4M3.decode(codes.reshape(-1), codes.shape)
        return np.where(codes & 0x80, -1, 1).astype(np.float32) * (codes & 0x7F)


def prepared(layer: Layer, tokens: Tokens) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """q [tokens, heads, head_dim], k [tokens, kv_heads, head_dim] after norm and rotation from position 0."""
    count, hd = len(tokens.q), layer.head_dim

    def prepare(x: Floats, heads: int, weight: Floats | None) -> NDArray[np.float64]:
        y = x.astype(np.float64).reshape(count, heads, hd)
        if weight is not None:
            y = y / np.sqrt((y**2).mean(-1, keepdims=True) + layer.eps) * (weight + layer.norm_offset)
        if layer.rope_dim:
            half = layer.rope_dim // 2
            cos, sin = (t[:, None, :] for t in rope_tables(np.arange(count), layer.rope_dim))
            a, b = y[..., :half].copy(), y[..., half : 2 * half].copy()
            y[..., :half], y[..., half : 2 * half] = a * cos - b * sin, b * cos + a * sin
        return y

    return prepare(tokens.q, layer.heads, layer.q_norm), prepare(tokens.k, layer.kv_heads, layer.k_norm)


def reference(layer: Layer, tokens: Tokens, cached_k: Floats | None = None) -> NDArray[np.float64]:
    """Attention of a whole sequence from position 0, in float64.

    cached_k: K as the cache holds it. Without it, K is computed and rounded here, and a K within float32
    rounding of a tie of the cache's type may differ from the kernel's.
    """
    count, hd, group = len(tokens.q), layer.head_dim, layer.heads // layer.kv_heads

    q, k = prepared(layer, tokens)
    v = tokens.v.astype(np.float64).reshape(count, layer.kv_heads, hd)
    k = stored(k, layer.kv) if cached_k is None else cached_k.astype(np.float64)
    v = stored(v, layer.kv)
    out = np.empty((count, layer.heads, hd))
    row, column = np.arange(count)[:, None], np.arange(count)[None, :]
    visible = column <= row
    if layer.window:
        visible &= column > row - layer.window
    for head in range(layer.heads):
        scores = q[:, head] @ k[:, head // group].T * layer.scale
        if layer.softcap:
            scores = layer.softcap * np.tanh(scores / layer.softcap)
        scores = np.where(visible, scores, -np.inf)
        top = scores.max(-1, keepdims=True)
        weights = np.exp(scores - top)
        total = weights.sum(-1, keepdims=True)
        if layer.sinks is not None:
            total = total + np.exp(layer.sinks[head] - top)
        out[:, head] = weights / total @ v[:, head // group]
    return out.reshape(count, -1)


def hide(part: NDArray[np.uint8]) -> None:
    """Makes memory that begins and ends with a page unreadable: to read it ends the process."""
    libc = ctypes.CDLL(None, use_errno=True)
    no_access = 0
    if libc.mprotect(ctypes.c_void_p(part.ctypes.data), ctypes.c_size_t(part.nbytes), no_access):
        raise OSError(ctypes.get_errno(), "mprotect")
