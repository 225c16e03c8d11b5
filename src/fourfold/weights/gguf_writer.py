"""Writes GGUF version 3 files: key-values, then tensors. Little-endian."""

from __future__ import annotations

import math
import os
import struct
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fourfold.weights.ggml_types import GGML_TYPES
from fourfold.weights.gguf import DEFAULT_ALIGNMENT, MAX_DIMS
from fourfold.weights.gguf_cursor import ARRAY, BOOL, STRING, VALUE_FORMATS
from fourfold.weights.gguf_header import MAGIC
from fourfold.weights.source import RawTensor

_UINT32, _INT32, _FLOAT32, _UINT64, _INT64 = 4, 5, 6, 10, 11
_TYPE_IDS = {each.name: number for number, each in GGML_TYPES.items()}
_VALUE_DTYPES = {number: np.dtype(form) for number, form in VALUE_FORMATS.items()}
_VALUE_IDS = {dtype: number for number, dtype in _VALUE_DTYPES.items()}


def write_gguf(
    path: str | Path,
    metadata: Mapping[str, Any],
    tensors: Sequence[RawTensor],
    alignment: int = DEFAULT_ALIGNMENT,
) -> None:
    """Writes `path` whole or not at all (through a file beside it that is renamed at the end).

    metadata: bool, str, int (u32, or i32, u64, i64 where the value needs it), float (f32), numpy scalars of
        any GGUF type; numpy arrays [n]; lists of str, of bool, of int, of float, or of such lists. An
        alignment other than 32 is added as general.alignment.
    tensors: format is the name of a ggml type; data is uint8 [nbytes].
    Raises ValueError naming the key or tensor that GGUF cannot hold.
    """
    path = Path(path)
    if not 1 <= alignment <= 1 << 24 or alignment & (alignment - 1):
        raise ValueError(f"alignment must be a power of two up to {1 << 24}, got {alignment}")
    values = dict(metadata)
    if alignment != DEFAULT_ALIGNMENT:
        values["general.alignment"] = np.uint32(alignment)
    header = bytearray(MAGIC + struct.pack("<IQQ", 3, len(tensors), len(values)))
    for key, value in values.items():
        header += _string(key) + _typed(key, value)
    offset = 0
    names: set[str] = set()
    for tensor in tensors:
        if tensor.name in names:
            raise ValueError(f"tensor {tensor.name} is given twice")
        names.add(tensor.name)
        header += _tensor_info(tensor, offset)
        offset += _padded(tensor.data.size, alignment)
    header += bytes(_padded(len(header), alignment) - len(header))

    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            file.write(header)
            for tensor in tensors:
                file.write(np.ascontiguousarray(tensor.data).data)
                file.write(bytes(_padded(tensor.data.size, alignment) - tensor.data.size))
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _padded(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _tensor_info(tensor: RawTensor, offset: int) -> bytes:
    type_id = _TYPE_IDS.get(tensor.format)
    if type_id is None:
        raise ValueError(f"tensor {tensor.name}: GGUF has no type {tensor.format}")
    kind = GGML_TYPES[type_id]
    if not 1 <= len(tensor.shape) <= MAX_DIMS or 0 in tensor.shape:
        raise ValueError(
            f"tensor {tensor.name}: GGUF holds 1 to {MAX_DIMS} dimensions, none 0, got {tensor.shape}"
        )
    elements = math.prod(tensor.shape)
    if tensor.shape[-1] % kind.block or tensor.data.size != elements // kind.block * kind.block_bytes:
        raise ValueError(f"tensor {tensor.name}: {tensor.data.size} bytes are not {kind.name} {tensor.shape}")
    dims = tuple(reversed(tensor.shape))
    return _string(tensor.name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, type_id, offset)


def _typed(key: str, value: Any) -> bytes:
    number, payload = _value(key, value)
    return struct.pack("<I", number) + payload


def _value(key: str, value: Any) -> tuple[int, bytes]:
    """Type id and bytes of a value."""
    if isinstance(value, (bool, np.bool_)):
        return BOOL, bytes([bool(value)])
    if isinstance(value, str):
        return STRING, _string(value)
    if isinstance(value, (np.ndarray, array, list, tuple)):
        return ARRAY, _array(key, value)
    if isinstance(value, np.generic):
        dtype = value.dtype
    elif isinstance(value, int):
        dtype = _VALUE_DTYPES[_int_type(key, value, value)]
    elif isinstance(value, float):
        dtype = _VALUE_DTYPES[_FLOAT32]
    else:
        raise ValueError(f"key {key}: GGUF cannot hold a {type(value).__name__}")
    if dtype not in _VALUE_IDS:
        raise ValueError(f"key {key}: GGUF cannot hold a {dtype}")
    return _VALUE_IDS[dtype], np.array(value, dtype).tobytes()


def _int_type(key: str, low: int, high: int) -> int:
    for number, least, most in (
        (_UINT32, 0, 2**32), (_INT32, -(2**31), 2**31), (_UINT64, 0, 2**64), (_INT64, -(2**63), 2**63),
    ):  # fmt: skip
        if least <= low and high < most:
            return number
    raise ValueError(f"key {key}: integers from {low} to {high} do not fit 64 bits")


def _array(key: str, value: Any) -> bytes:
    if isinstance(value, array):
        value = np.asarray(value)
    if isinstance(value, np.ndarray):
        if value.ndim != 1:
            raise ValueError(f"key {key}: numpy arrays must have one dimension, got shape {value.shape}")
        if value.dtype == np.bool_:
            return _array_header(BOOL, len(value)) + value.astype(np.uint8).tobytes()
        dtype = value.dtype.newbyteorder("<")
        if dtype not in _VALUE_IDS:
            raise ValueError(f"key {key}: GGUF cannot hold an array of {value.dtype}")
        return _array_header(_VALUE_IDS[dtype], len(value)) + value.astype(dtype).tobytes()
    kinds = {type(each) for each in value}
    if kinds == {str}:
        return _array_header(STRING, len(value)) + b"".join(map(_string, value))
    if kinds == {bool}:
        return _array_header(BOOL, len(value)) + bytes(value)
    if kinds == {int}:
        dtype = _VALUE_DTYPES[_int_type(key, min(value), max(value))]
        return _array(key, np.array(value, dtype))
    if kinds and kinds <= {int, float}:
        return _array(key, np.array(value, np.float32))
    if kinds and kinds <= {list, tuple, array, np.ndarray}:
        return _array_header(ARRAY, len(value)) + b"".join(_array(key, each) for each in value)
    raise ValueError(
        f"key {key}: an array must hold elements of one GGUF type, and an empty one be a numpy array"
    )


def _array_header(kind: int, count: int) -> bytes:
    return struct.pack("<IQ", kind, count)
