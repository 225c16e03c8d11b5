"""A GGUF file byte by byte, apart from the project's writer, so that every part of it can be made wrong."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

UINT8, INT8, UINT16, INT16, UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64, INT64, FLOAT64 = range(13)
_CODES = {
    UINT8: "B", INT8: "b", UINT16: "H", INT16: "h", UINT32: "I", INT32: "i", FLOAT32: "f", BOOL: "?",
    UINT64: "Q", INT64: "q", FLOAT64: "d",
}  # fmt: skip


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def scalar(kind: int, value: Any) -> bytes:
    return string(value) if kind == STRING else struct.pack("<" + _CODES[kind], value)


def pair(key: str | bytes, kind: int, value: Any) -> bytes:
    return string(key) + struct.pack("<I", kind) + scalar(kind, value)


def array(key: str, kind: int, values: list[Any], claimed: int | None = None) -> bytes:
    count = len(values) if claimed is None else claimed
    body = b"".join(scalar(kind, each) for each in values)
    return string(key) + struct.pack("<IIQ", ARRAY, kind, count) + body


@dataclass
class Tensor:
    name: str | bytes = "t"
    dims: tuple[int, ...] = (32,)
    kind: int = 0
    offset: int = 0

    def info(self) -> bytes:
        rank = len(self.dims)
        return string(self.name) + struct.pack(f"<I{rank}QIQ", rank, *self.dims, self.kind, self.offset)


@dataclass
class File:
    pairs: list[bytes] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    data: bytes = b""
    magic: bytes = b"GGUF"
    version: int = 3
    tensor_count: int | None = None
    kv_count: int | None = None
    alignment: int = 32

    def bytes(self) -> bytes:
        tensors = len(self.tensors) if self.tensor_count is None else self.tensor_count
        pairs = len(self.pairs) if self.kv_count is None else self.kv_count
        head = self.magic + struct.pack("<IQQ", self.version, tensors, pairs)
        head += b"".join(self.pairs) + b"".join(each.info() for each in self.tensors)
        return head + bytes(-len(head) % self.alignment) + self.data
