"""The beginning of a GGUF file: version, counts, and metadata. Checked before anything in it is used.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import msgspec

from fourfold.errors import LoadError
from fourfold.weights.gguf_cursor import Cursor
from fourfold.weights.mapped import map_file
from fourfold.weights.metadata import Metadata

MAGIC = b"GGUF"
MAX_NAME_BYTES = 65535

_HEADER_BYTES = 24
_LEAST_KV_BYTES = 8 + 1 + 4 + 1
_LEAST_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8


class Header(msgspec.Struct, frozen=True):
    """metadata: see GGUFFile.metadata.  tensor_count: descriptions of tensors that follow."""

    map: mmap.mmap
    version: int
    tensor_count: int
    metadata: Metadata


def read_header(path: Path) -> tuple[Header, Cursor]:
    """With the position where the descriptions of tensors begin.

    Raises LoadError naming the file, and the key, for anything damaged, foreign or unsupported.
    """
    mapped = map_file(path, "GGUF file", _HEADER_BYTES)
    cursor = Cursor(path, mapped)
    version = _read_version(cursor)
    tensor_count = cursor.u64("the tensor count")
    kv_count = cursor.u64("the key-value count")
    needed = cursor.position + kv_count * _LEAST_KV_BYTES + tensor_count * _LEAST_TENSOR_BYTES
    if needed > cursor.size:
        raise LoadError(
            f"{path}: the header claims {kv_count} key-values and {tensor_count} tensors, which need "
            f"at least {needed} bytes, but the file has {cursor.size}; it is damaged or cut short"
        )
    return Header(mapped, version, tensor_count, Metadata(path, _read_metadata(cursor, kv_count))), cursor


def _read_version(cursor: Cursor) -> int:
    magic = cursor.take(4, "the magic")
    if magic != MAGIC:
        raise LoadError(f"{cursor.path}: is not a GGUF file: it starts with {magic!r} instead of {MAGIC!r}")
    version = cursor.u32("the version")
    if version and version & 0xFFFF == 0:
        raise LoadError(
            f"{cursor.path}: is a big-endian GGUF file; convert it to little-endian (gguf-convert-endian)"
        )
    if version == 1:
        raise LoadError(
            f"{cursor.path}: is GGUF version 1, which is obsolete; convert the model again to version 3"
        )
    if version not in (2, 3):
        raise LoadError(f"{cursor.path}: is GGUF version {version}; versions 2 and 3 are supported")
    return version


def _read_metadata(cursor: Cursor, count: int) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for index in range(count):
        key = cursor.string(f"key {index}", MAX_NAME_BYTES)
        check_name(cursor.path, f"key {index}", key)
        if key in values:
            raise LoadError(f"{cursor.path}: key {key} appears twice")
        values[key] = cursor.value(key)
    return values


def check_name(path: Path, what: str, name: str) -> None:
    if not name:
        raise LoadError(f"{path}: {what} is empty")
    if not name.isprintable():
        raise LoadError(f"{path}: {what} holds characters that cannot be printed: {name[:80]!a}")
