"""Checkpoint tensors to packed matrices: take the rows, reorder them, split the blocks, lay out the tiles."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fourfold import _native
from fourfold.build.packed import ELEM, PackedMatrix
from fourfold.errors import LoadError
from fourfold.models.binding import Binding
from fourfold.quant.block import Groups
from fourfold.quant.registry import get_format
from fourfold.weights.source import RawTensor, WeightSource

_HALF_EXACT = frozenset({"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL"})
"""Formats whose scales and offsets are fp16 in the file already."""

_HALF_ERROR = 2.0**-10
"""Largest relative error a scale may take from being stored as fp16 (2^-11 by rounding, subnormals more)."""

MAX_GROUP = 32


def matrix_key(binding: Binding) -> str:
    """Names the content within one checkpoint."""
    end = "" if binding.rows is None else binding.row_start + binding.rows
    rows = "" if binding.rows is None and not binding.row_start else f"[{binding.row_start}:{end}]"
    order = "" if binding.interleaved_heads is None else f"/halves{binding.interleaved_heads}"
    scale = "" if binding.scale is None else f"*{binding.scale}"
    return f"{binding.source}{rows}{order}{scale}"


def bound_rows(source: WeightSource, binding: Binding) -> RawTensor:
    """The rows of the checkpoint tensor that the binding names, in its order (a copy only if reordered)."""
    raw = source.tensor(binding.source)
    total = raw.shape[0]
    rows = total - binding.row_start if binding.rows is None else binding.rows
    if binding.row_start < 0 or rows < 1 or binding.row_start + rows > total:
        raise LoadError(
            f"{source.path}: tensor {binding.source} has {total} rows, but rows {binding.row_start} to "
            f"{binding.row_start + rows - 1} are needed"
        )
    table = raw.data.reshape(total, -1)[binding.row_start : binding.row_start + rows]
    if binding.interleaved_heads is not None:
        table = table[_halves_order(rows, binding.interleaved_heads)]
    return RawTensor(raw.name, (rows, *raw.shape[1:]), raw.format, table.reshape(-1))


def _halves_order(rows: int, heads: int) -> NDArray[np.intp]:
    """Row i of the result is row order[i] of a checkpoint with interleaved rotary pairs."""
    head_dim = rows // heads
    within = np.concatenate([np.arange(0, head_dim, 2), np.arange(1, head_dim, 2)])
    order: NDArray[np.intp] = np.arange(heads)[:, None] * head_dim + within[None, :]
    return order.reshape(-1)


def pack_vector(source: WeightSource, binding: Binding) -> NDArray[np.float32]:
    raw = bound_rows(source, binding)
    values = get_format(raw.format).decode(raw.data, raw.shape).astype(np.float32, copy=False)
    return np.ascontiguousarray(
        values.reshape(-1) + np.float32(binding.add) if binding.add else values.reshape(-1)
    )


def pack_matrix(source: WeightSource, binding: Binding, *, exact: bool) -> PackedMatrix:
    """exact: keep scales in fp32 wherever fp16 would round them.

    Raises LoadError naming file and tensor if it is missing, misshapen, of an unknown type, or not finite.
    """
    raw = bound_rows(source, binding)
    if len(raw.shape) != 2:
        raise LoadError(f"{source.path}: tensor {raw.name} has shape {list(raw.shape)}, a matrix is needed")
    n, k = raw.shape
    key = matrix_key(binding)
    if raw.format in ("F32", "F16", "BF16"):
        elem = ELEM[raw.format]
        data = _aligned(_native.packed_bytes(n, k, elem))
        _native.pack_dense(np.ascontiguousarray(raw.data).reshape(n, -1), k, elem, data)
        return PackedMatrix(key, data, n, k, elem)
    block_format = get_format(raw.format)
    if block_format.integers is None:
        return _pack_fp8(source, binding, raw, key)
    groups = _narrow(block_format.split(raw.data, raw.shape))
    if not np.isfinite(groups.scale).all() or (
        groups.offset is not None and not np.isfinite(groups.offset).all()
    ):
        raise LoadError(
            f"{source.path}: tensor {raw.name} has scales that are not finite; the file is damaged"
        )
    wide = _needs_wide(groups, raw.format, exact)
    zero = groups.zero
    data = _aligned(
        _native.packed_bytes(
            n, k, ELEM["ints"], groups.bits, groups.group, zero, groups.offset is not None, wide
        )
    )
    _native.pack_ints(
        np.ascontiguousarray(groups.q),
        np.ascontiguousarray(groups.scale),
        None if groups.offset is None else np.ascontiguousarray(groups.offset),
        groups.bits,
        groups.group,
        zero,
        wide,
        data,
    )
    return PackedMatrix(
        key, data, n, k, ELEM["ints"], groups.bits, groups.group, zero, groups.offset is not None, wide
    )


def _pack_fp8(source: WeightSource, binding: Binding, raw: RawTensor, key: str) -> PackedMatrix:
    n, k = raw.shape
    scales, group = _fp8_scales(source, binding, n, k)
    if k % 4:  # no layout for such rows: as wide as they decode
        wide = get_format(raw.format).decode(raw.data, raw.shape) * np.repeat(scales, group, axis=1)[:, :k]
        data = _aligned(_native.packed_bytes(n, k, ELEM["F32"]))
        _native.pack_dense(np.ascontiguousarray(wide).view(np.uint8), k, ELEM["F32"], data)
        return PackedMatrix(key, data, n, k, ELEM["F32"])
    elem = ELEM[raw.format]
    data = _aligned(_native.packed_bytes(n, k, elem, group=group))
    _native.pack_fp8(np.ascontiguousarray(raw.data).reshape(n, k), scales, group, elem, data)
    return PackedMatrix(key, data, n, k, elem, group=group)


def _fp8_scales(source: WeightSource, binding: Binding, n: int, k: int) -> tuple[NDArray[np.float32], int]:
    """(scale of each row and group of columns [n, ceil(k / group)], columns of a group) of the bound rows."""
    if binding.scale is None:
        return np.ones((n, 1), np.float32), k
    raw = source.tensor(binding.scale.source)
    table = get_format(raw.format).decode(raw.data, raw.shape).astype(np.float32, copy=False)
    if not np.isfinite(table).all():
        raise LoadError(
            f"{source.path}: tensor {raw.name} has scales that are not finite; the file is damaged"
        )
    group = min(binding.scale.columns, k)
    first, last = binding.row_start, binding.row_start + n
    rows = np.arange(first, last) // binding.scale.rows
    if binding.interleaved_heads is not None:
        rows = rows[_halves_order(n, binding.interleaved_heads)]
    return np.ascontiguousarray(table.reshape(-1, -(-k // group))[rows]), group


def _narrow(groups: Groups) -> Groups:
    """Groups of at most MAX_GROUP columns: larger ones repeat their scale."""
    if groups.group <= MAX_GROUP:
        return groups
    times = groups.group // MAX_GROUP
    offset = None if groups.offset is None else np.repeat(groups.offset, times, axis=1)
    return Groups(
        groups.q, np.repeat(groups.scale, times, axis=1), offset, groups.zero, MAX_GROUP, groups.bits
    )


def _needs_wide(groups: Groups, name: str, exact: bool) -> bool:
    if name in _HALF_EXACT:
        return False
    if exact:
        return True
    return any(_half_error(a) > _HALF_ERROR for a in (groups.scale, groups.offset) if a is not None)


def _half_error(values: NDArray[np.float32]) -> float:
    """Largest error of rounding to fp16, relative to the value or to 1/1000 of the largest value."""
    with np.errstate(over="ignore"):
        rounded = values.astype(np.float16).astype(np.float32)
    floor = np.abs(values).max(initial=0) * np.float32(1e-3)
    with np.errstate(invalid="ignore", divide="ignore"):
        error = np.abs(rounded - values) / np.maximum(np.abs(values), floor)
    return float(np.nan_to_num(error, nan=0.0, posinf=np.inf).max(initial=0))


def _aligned(size: int) -> NDArray[np.uint8]:
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size]
