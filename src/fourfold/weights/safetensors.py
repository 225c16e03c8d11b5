"""safetensors files, mapped and checked before anything in them is used.

Format: https://github.com/huggingface/safetensors#format. 8 bytes little-endian header length; a JSON object
name -> {dtype, shape, data_offsets}; then the data, which the tensors must cover without holes or overlaps.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fourfold.errors import LoadError
from fourfold.weights.json_file import parse_object
from fourfold.weights.mapped import map_file
from fourfold.weights.source import RawTensor

MAX_HEADER_BYTES = 100_000_000
MAX_DIMS = 32
"""What numpy 1 can hold; no weight has more than five."""
_LENGTH = struct.Struct("<Q")

_DTYPES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "C64": 8,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip


class SafetensorInfo(msgspec.Struct, frozen=True):
    """A tensor is bytes `start` to `start + nbytes` of the file."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    start: int
    nbytes: int


class SafetensorsFile:
    """One safetensors file. Tensors are views of the mapped file and stay valid after this object is gone."""

    def __init__(
        self, path: Path, mapped: mmap.mmap, tensors: Mapping[str, SafetensorInfo], notes: Mapping[str, str]
    ) -> None:
        self._path = path
        self._map = mapped
        self._tensors = tensors
        self._notes = notes

    @property
    def path(self) -> Path:
        return self._path

    @property
    def notes(self) -> Mapping[str, str]:
        """The header's `__metadata__`."""
        return self._notes

    def names(self) -> Iterable[str]:
        return self._tensors.keys()

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def tensor(self, name: str) -> RawTensor:
        """Raises LoadError naming the file and the tensor when it is missing."""
        info = self._tensors.get(name)
        if info is None:
            raise LoadError(
                f"{self._path}: tensor {name} is missing; the file has {len(self._tensors)} tensors"
            )
        if info.nbytes:
            data = np.frombuffer(self._map, np.uint8, count=info.nbytes, offset=info.start)
        else:
            data = np.empty(0, np.uint8)
        return RawTensor(name=name, shape=info.shape, format=info.dtype, data=data)


def open_safetensors(path: str | Path) -> SafetensorsFile:
    """Maps and checks a safetensors file.

    Raises LoadError naming the file, and the tensor, for anything damaged or foreign.
    """
    path = Path(path)
    mapped = map_file(path, "safetensors file", _LENGTH.size + 2)
    length: int = _LENGTH.unpack_from(mapped, 0)[0]
    if length > MAX_HEADER_BYTES:
        raise LoadError(
            f"{path}: the header claims {length} bytes; at most {MAX_HEADER_BYTES} are allowed. "
            f"It is damaged or not a safetensors file"
        )
    base = _LENGTH.size + length
    if base > len(mapped):
        raise LoadError(
            f"{path}: is cut short or damaged: the header ends at byte {base}, but the file has {len(mapped)}"
        )
    text = mapped[_LENGTH.size : base]
    if not text.startswith(b"{"):
        raise LoadError(f"{path}: is not a safetensors file: its header starts with {text[:1]!r}, not b'{{'")
    header = parse_object(text, f"{path}: header")
    for name in header:
        if not name.isprintable():
            raise LoadError(f"{path}: tensor name {_short(name)} holds characters that cannot be printed")
    notes = _read_notes(path, header.pop("__metadata__", {}))
    tensors = {name: _read_info(path, name, entry, base) for name, entry in header.items()}
    _check_extents(path, base, len(mapped), tensors.values())
    return SafetensorsFile(path, mapped, tensors, notes)


def _read_notes(path: Path, value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(each, str) for each in value.values()):
        raise LoadError(f"{path}: __metadata__ must be an object of strings")
    return value


def _whole_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _read_info(path: Path, name: str, entry: Any, base: int) -> SafetensorInfo:
    if not isinstance(entry, dict) or not entry.keys() >= {"dtype", "shape", "data_offsets"}:
        raise LoadError(f"{path}: tensor {name} must have dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise LoadError(f"{path}: tensor {name} has dtype {_short(dtype)}; known are {', '.join(_DTYPES)}")
    if not isinstance(shape, list) or len(shape) > MAX_DIMS or not all(map(_whole_number, shape)):
        raise LoadError(
            f"{path}: tensor {name} has shape {_short(shape)}; "
            f"it must be a list of up to {MAX_DIMS} integers from 0"
        )
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_whole_number, offsets)):
        raise LoadError(
            f"{path}: tensor {name} has data_offsets {_short(offsets)}; they must be two integers from 0"
        )
    first, last = offsets
    nbytes = math.prod(shape) * _DTYPES[dtype]
    if last - first != nbytes:
        raise LoadError(
            f"{path}: tensor {name}, {dtype} {shape}, needs {nbytes} bytes, but data_offsets {offsets} hold "
            f"{last - first}"
        )
    return SafetensorInfo(name, tuple(shape), dtype, base + first, nbytes)


def _check_extents(path: Path, base: int, size: int, tensors: Iterable[SafetensorInfo]) -> None:
    """The tensors cover the data section exactly: no hole, no overlap, nothing after the last one."""
    order = sorted(tensors, key=lambda info: (info.start, info.nbytes))
    end, before = base, "the header"
    for info in order:
        if info.start != end:
            kind = "overlaps" if info.start < end else "leaves a hole after"
            raise LoadError(
                f"{path}: tensor {info.name} starts at byte {info.start}, which {kind} {before} "
                f"(it ends at {end})"
            )
        end, before = info.start + info.nbytes, info.name
    if end > size:
        raise LoadError(
            f"{path}: is cut short: its tensors need {end} bytes, but the file has {size}; download it again"
        )
    if end < size:
        raise LoadError(f"{path}: has {size - end} bytes after its last tensor; it is damaged")
