"""GGUF files, versions 2 and 3, mapped and checked before anything in them is used.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from fourfold.errors import LoadError
from fourfold.weights.ggml_types import GGML_TYPES, GGMLType
from fourfold.weights.gguf_cursor import Cursor
from fourfold.weights.gguf_header import MAX_NAME_BYTES, check_name, read_header
from fourfold.weights.metadata import Metadata
from fourfold.weights.shards import SHARD_NAME
from fourfold.weights.source import RawTensor

DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 24
MAX_DIMS = 4


class TensorInfo(msgspec.Struct, frozen=True):
    """Bytes `start` to `start + nbytes` of a file. shape is row-major (GGUF's dims reversed)."""

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    start: int
    nbytes: int


class _Shard(msgspec.Struct, frozen=True):
    path: Path
    map: mmap.mmap
    version: int
    alignment: int
    metadata: Metadata
    tensors: Mapping[str, TensorInfo]


class GGUFFile:
    """A WeightSource over one GGUF file, or over all shards of a split one (metadata is the first shard's).

    Tensors are views of the mapped file; they stay valid after this object is gone.
    """

    kind: Literal["gguf"] = "gguf"

    def __init__(self, path: Path, shards: tuple[_Shard, ...]) -> None:
        self._path = path
        self._shards = shards
        self._metadata = shards[0].metadata
        self._where = {name: (shard, info) for shard in shards for name, info in shard.tensors.items()}

    @property
    def path(self) -> Path:
        return self._path

    @property
    def metadata(self) -> Metadata:
        """Key-values: int, float, bool, str; array.array, list[bool], StringArray, or lists of arrays."""
        return self._metadata

    @property
    def version(self) -> int:
        return self._shards[0].version

    @property
    def alignment(self) -> int:
        return self._shards[0].alignment

    @property
    def files(self) -> tuple[Path, ...]:
        """The file itself, or its shards in order."""
        return tuple(shard.path for shard in self._shards)

    def names(self) -> Iterable[str]:
        return self._where.keys()

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def info(self, name: str) -> TensorInfo:
        """Raises LoadError naming the file and the tensor when it is missing."""
        return self._find(name)[1]

    def tensor(self, name: str) -> RawTensor:
        """Raises LoadError naming the file and the tensor when it is missing."""
        shard, info = self._find(name)
        data = np.frombuffer(shard.map, np.uint8, count=info.nbytes, offset=info.start)
        return RawTensor(name=name, shape=info.shape, format=info.type.name, data=data)

    def _find(self, name: str) -> tuple[_Shard, TensorInfo]:
        try:
            return self._where[name]
        except KeyError:
            raise LoadError(
                f"{self._path}: tensor {name} is missing; the file has {len(self._where)} tensors"
            ) from None


def open_gguf(path: str | Path) -> GGUFFile:
    """Maps and checks a GGUF file; of a split one, the first shard is to be given.

    Raises LoadError naming the file, and the key or tensor, for anything damaged, foreign or unsupported.
    """
    path = Path(path)
    first = _read_shard(path)
    count = _shard_int(first, "split.count", default=1)
    if count <= 1:
        return GGUFFile(path, (first,))
    if _shard_int(first, "split.no") != 0:
        raise LoadError(
            f"{path}: is not the first shard of a split model; "
            f"give the file ending in -00001-of-{count:05d}.gguf"
        )
    match = SHARD_NAME.match(path.name)
    if match is None or int(match["count"]) != count:
        raise LoadError(
            f"{path}: split.count is {count}, so the file must be named NAME-00001-of-{count:05d}.gguf "
            f"for its shards to be found"
        )
    shards = [first]
    names = set(first.tensors)
    for number in range(1, count):
        shard_path = path.with_name(f"{match['stem']}-{number + 1:05d}-of-{count:05d}.gguf")
        if not shard_path.exists():
            raise LoadError(
                f"{path}: shard {shard_path.name} is missing (split.count is {count}); "
                f"download it beside the others"
            )
        shard = _read_shard(shard_path)
        if _shard_int(shard, "split.no") != number or _shard_int(shard, "split.count") != count:
            raise LoadError(
                f"{shard_path}: split.no and split.count do not match its name; it belongs to another model"
            )
        twice = names & shard.tensors.keys()
        if twice:
            raise LoadError(f"{shard_path}: tensor {min(twice)} is already in an earlier shard")
        names |= shard.tensors.keys()
        shards.append(shard)
    total = _shard_int(first, "split.tensors.count", default=len(names))
    if total != len(names):
        raise LoadError(
            f"{path}: split.tensors.count is {total}, but the {count} shards hold {len(names)} tensors"
        )
    return GGUFFile(path, tuple(shards))


def _shard_int(shard: _Shard, key: str, default: int | None = None) -> int:
    value = shard.metadata.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise LoadError(f"{shard.path}: {key} must be an integer, but is {value!r:.80}")
    return value


def _read_shard(path: Path) -> _Shard:
    header, cursor = read_header(path)
    metadata = header.metadata
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if (
        isinstance(alignment, bool)
        or not isinstance(alignment, int)
        or not 1 <= alignment <= MAX_ALIGNMENT
        or alignment & (alignment - 1)
    ):
        raise LoadError(
            f"{path}: general.alignment must be a power of two up to {MAX_ALIGNMENT}, "
            f"but is {alignment!r:.80}"
        )
    tensors = _read_tensors(cursor, header.tensor_count, alignment)
    return _Shard(path, header.map, header.version, alignment, metadata, tensors)


def _read_tensors(cursor: Cursor, count: int, alignment: int) -> dict[str, TensorInfo]:
    path = cursor.path
    listed: dict[str, tuple[tuple[int, ...], GGMLType, int, int]] = {}
    for index in range(count):
        name = cursor.string(f"the name of tensor {index}", MAX_NAME_BYTES)
        check_name(path, f"the name of tensor {index}", name)
        if name in listed:
            raise LoadError(f"{path}: tensor {name} appears twice")
        rank = cursor.u32(f"the rank of tensor {name}")
        if not 1 <= rank <= MAX_DIMS:
            raise LoadError(f"{path}: tensor {name} has {rank} dimensions; 1 to {MAX_DIMS} are allowed")
        dims = [cursor.u64(f"the dimensions of tensor {name}") for _ in range(rank)]
        type_id = cursor.u32(f"the type of tensor {name}")
        offset = cursor.u64(f"the offset of tensor {name}")
        kind = GGML_TYPES.get(type_id)
        if kind is None:
            raise LoadError(f"{path}: tensor {name} has type {type_id}, which is not known")
        if 0 in dims:
            raise LoadError(f"{path}: tensor {name} has a dimension of 0 in {dims}")
        if dims[0] % kind.block:
            raise LoadError(
                f"{path}: tensor {name} has rows of {dims[0]} elements, which is not a multiple "
                f"of the {kind.block} that a block of {kind.name} holds"
            )
        if offset % alignment:
            raise LoadError(
                f"{path}: tensor {name} starts at offset {offset}, which is not a multiple of {alignment}"
            )
        nbytes = math.prod(dims) // kind.block * kind.block_bytes
        listed[name] = (tuple(reversed(dims)), kind, offset, nbytes)

    # The data section starts at the next multiple of the alignment after the header.
    base = -(-cursor.position // alignment) * alignment
    tensors = {
        name: TensorInfo(name, shape, kind, base + offset, nbytes)
        for name, (shape, kind, offset, nbytes) in listed.items()
    }
    _check_extents(path, cursor.size, tensors.values())
    return tensors


def _check_extents(path: Path, size: int, tensors: Iterable[TensorInfo]) -> None:
    """Every tensor inside the file, none over another."""
    order = sorted(tensors, key=lambda info: info.start)
    if not order:
        return
    last = max(order, key=lambda info: info.start + info.nbytes)
    needed = last.start + last.nbytes
    if needed > size:
        raise LoadError(
            f"{path}: is cut short or damaged: tensor {last.name} ends at byte {needed}, so the file needs "
            f"{needed} bytes, but it has {size}; download it again"
        )
    for one, two in pairwise(order):
        if one.start + one.nbytes > two.start:
            raise LoadError(
                f"{path}: tensors {one.name} (bytes {one.start} to {one.start + one.nbytes}) and {two.name} "
                f"(from byte {two.start}) overlap"
            )
