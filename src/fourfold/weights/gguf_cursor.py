"""Reading a GGUF header's primitive values, each length checked against the bytes that are left."""

from __future__ import annotations

import mmap
import struct
import sys
from array import array
from pathlib import Path
from typing import Any

from fourfold.errors import LoadError
from fourfold.weights.metadata import StringArray

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")

_NUMBERS: dict[int, struct.Struct] = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: _U32,
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    10: _U64,
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
BOOL, STRING, ARRAY = 7, 8, 9

VALUE_FORMATS = {number: each.format for number, each in _NUMBERS.items()}
"""Numbers of GGUF's value types → format of the struct module, little-endian."""

MAX_ARRAY_DEPTH = 4
_LEAST_BYTES = {BOOL: 1, STRING: 8, ARRAY: 12}
"""Fewest bytes one element of an array of this type can take."""


class Cursor:
    """A position in a mapped file. A read that would pass the end raises LoadError naming what was read."""

    __slots__ = ("_map", "path", "position", "size")

    def __init__(self, path: Path, mapped: mmap.mmap) -> None:
        self.path = path
        self._map = mapped
        self.size = len(mapped)
        self.position = 0

    def _claim(self, count: int, what: str) -> int:
        """Moves past `count` bytes and returns where they start."""
        start = self.position
        if count > self.size - start:
            raise LoadError(
                f"{self.path}: is cut short or damaged: {what} needs {start + count} bytes, "
                f"but the file has {self.size}"
            )
        self.position = start + count
        return start

    def take(self, count: int, what: str) -> bytes:
        start = self._claim(count, what)
        return self._map[start : start + count]

    def u32(self, what: str) -> int:
        number: int = _U32.unpack_from(self._map, self._claim(4, what))[0]
        return number

    def u64(self, what: str) -> int:
        number: int = _U64.unpack_from(self._map, self._claim(8, what))[0]
        return number

    def string(self, what: str, limit: int | None = None) -> str:
        length = self.u64(f"the length of {what}")
        if limit is not None and length > limit:
            raise LoadError(f"{self.path}: {what} is {length} bytes long; at most {limit} are allowed")
        raw = self.take(length, what)
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise LoadError(f"{self.path}: {what} is not UTF-8 ({error.reason})") from error

    def value(self, key: str) -> Any:
        """A value with its type in front: int, float, bool, str, or an array (see `_array`)."""
        return self._scalar_or_array(self.u32(f"the type of {key}"), key)

    def _scalar_or_array(self, kind: int, key: str) -> Any:
        number = _NUMBERS.get(kind)
        if number is not None:
            return number.unpack_from(self._map, self._claim(number.size, key))[0]
        if kind == STRING:
            return self.string(key)
        if kind == BOOL:
            byte = self.take(1, key)[0]
            if byte > 1:
                raise LoadError(f"{self.path}: {key} must be true (1) or false (0), but is {byte}")
            return byte == 1
        if kind == ARRAY:
            return self._array(key, 1)
        raise LoadError(f"{self.path}: {key} has value type {kind}; 0 to 12 are known")

    def _array(self, key: str, depth: int) -> Any:
        """Numbers as an array.array, bools as a list, strings as StringArray, arrays as a list."""
        if depth > MAX_ARRAY_DEPTH:
            raise LoadError(f"{self.path}: {key} nests arrays more than {MAX_ARRAY_DEPTH} deep")
        kind = self.u32(f"the element type of {key}")
        count = self.u64(f"the length of {key}")
        number = _NUMBERS.get(kind)
        if number is None and kind not in _LEAST_BYTES:
            raise LoadError(f"{self.path}: {key} is an array of value type {kind}; 0 to 12 are known")
        least = number.size if number is not None else _LEAST_BYTES[kind]
        if count * least > self.size - self.position:
            raise LoadError(
                f"{self.path}: {key} claims {count} elements, which need at least "
                f"{self.position + count * least} bytes, but the file has {self.size}; "
                f"it is damaged or cut short"
            )
        if number is not None:
            numbers = array(number.format[1])
            numbers.frombytes(self.take(count * number.size, key))
            if sys.byteorder == "big":
                numbers.byteswap()
            return numbers
        if kind == BOOL:
            flags = self.take(count, key)
            if flags and max(flags) > 1:
                raise LoadError(f"{self.path}: {key} must hold true (1) or false (0), but has {max(flags)}")
            return [bool(flag) for flag in flags]
        if kind == STRING:
            start = self.position
            self._skip_strings(key, count)
            return StringArray(self._map, start, count, str(self.path), key)
        return [self._array(key, depth + 1) for _ in range(count)]

    def _skip_strings(self, key: str, count: int) -> None:
        # The one hot loop of opening a file (a vocabulary has 100,000s of strings), so nothing is decoded.
        # The position only grows, so one look at the end finds any element that passes the file's end.
        position, size, unpack, data = self.position, self.size, _U64.unpack_from, self._map
        try:
            for _ in range(count):
                position += 8 + unpack(data, position)[0]
        except (struct.error, OverflowError):
            position += 8
        if position > size:
            raise LoadError(
                f"{self.path}: is cut short or damaged: the {count} strings of {key} need {position} bytes "
                f"or more, but the file has {size}"
            )
        self.position = position
