"""Checkpoint metadata with its file's name, and getters that refuse a missing key or a wrong type.

Without NumPy: a server's front reads a tokenizer from here and needs NumPy for nothing else.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Final, NoReturn, overload

from fourfold.errors import LoadError


class Metadata(Mapping[str, Any]):
    """Key-values of one checkpoint file. `file` is named in errors."""

    __slots__ = ("_values", "file")

    def __init__(self, file: Path, values: Mapping[str, Any]) -> None:
        self.file = file
        self._values = values

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Metadata({str(self.file)!r}, {len(self)} keys)"


class StringArray(Sequence[str]):
    """A GGUF array of strings, decoded when first looked at.

    Raises LoadError, on first use, when an element is not UTF-8.
    """

    __slots__ = ("_buffer", "_count", "_key", "_start", "_strings", "_where")

    def __init__(self, buffer: Any, start: int, count: int, where: str, key: str) -> None:
        self._buffer = buffer
        self._start = start
        self._count = count
        self._where = where
        self._key = key
        self._strings: list[str] | None = None

    def tolist(self) -> list[str]:
        """All elements; the same list each time, not to be changed."""
        if self._strings is None:
            self._strings = self._decode()
            self._buffer = None
        return self._strings

    def _decode(self) -> list[str]:
        buffer, position, from_bytes = self._buffer, self._start, int.from_bytes
        out: list[str] = []
        append = out.append
        try:
            for _ in range(self._count):
                start = position + 8
                position = start + from_bytes(buffer[position:start], "little")
                append(buffer[start:position].decode())
        except UnicodeDecodeError as error:
            raise LoadError(
                f"{self._where}: element {len(out)} of {self._key} is not UTF-8 ({error.reason}); "
                f"the file is damaged or was written by a faulty converter"
            ) from error
        return out

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        return self.tolist()[index]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tolist())

    def __len__(self) -> int:
        return self._count

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and not isinstance(other, str) and self.tolist() == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"StringArray({self._count} strings)"


class _Missing(Enum):
    REQUIRED = "required"


REQUIRED: Final = _Missing.REQUIRED
"""Default of the getters: the key must be there."""


def _file_of(meta: Mapping[str, Any]) -> str:
    return str(meta.file) if isinstance(meta, Metadata) else "metadata"


def _wrong(meta: Mapping[str, Any], key: str, wanted: str) -> NoReturn:
    value = meta[key]
    numbers = _numbers(value)
    if isinstance(value, StringArray):
        found = "an array of strings"
    elif numbers is not None and not isinstance(value, list):
        kind = {"f": "float", "d": "float", "?": "bool"}.get(numbers.format) or (
            "uint" if numbers.format.isupper() else "int"
        )
        found = f"an array of {kind}{8 * numbers.itemsize}"
    else:
        text = repr(value)
        found = f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
    raise LoadError(f"{_file_of(meta)}: {key} must be {wanted}, but is {found}")


def require(meta: Mapping[str, Any], key: str) -> Any:
    """The value of any type. Raises LoadError naming file and key when it is missing."""
    try:
        return meta[key]
    except KeyError:
        raise LoadError(f"{_file_of(meta)}: key {key} is missing, but this kind of model needs it") from None


def get_int(meta: Mapping[str, Any], key: str, default: int | _Missing = REQUIRED) -> int:
    """An integer, not a bool.

    Raises LoadError naming file and key on a wrong type, or when the key is missing and there is no default.
    """
    if default is not REQUIRED and key not in meta:
        return default
    value = require(meta, key)
    if isinstance(value, bool) or not isinstance(value, int):
        _wrong(meta, key, "an integer")
    return value


def get_float(meta: Mapping[str, Any], key: str, default: float | _Missing = REQUIRED) -> float:
    """A number; integers count, as JSON writes 10000 for 10000.0. Errors as get_int."""
    if default is not REQUIRED and key not in meta:
        return default
    value = require(meta, key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        _wrong(meta, key, "a number")
    return float(value)


def get_bool(meta: Mapping[str, Any], key: str, default: bool | _Missing = REQUIRED) -> bool:
    """Errors as get_int."""
    if default is not REQUIRED and key not in meta:
        return default
    value = require(meta, key)
    if not isinstance(value, bool):
        _wrong(meta, key, "true or false")
    return value


def get_str(meta: Mapping[str, Any], key: str, default: str | _Missing = REQUIRED) -> str:
    """Errors as get_int."""
    if default is not REQUIRED and key not in meta:
        return default
    value = require(meta, key)
    if not isinstance(value, str):
        _wrong(meta, key, "a string")
    return value


def get_strings(meta: Mapping[str, Any], key: str) -> list[str]:
    """An array of strings. Errors as get_int."""
    value = require(meta, key)
    if isinstance(value, StringArray):
        return value.tolist()
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        _wrong(meta, key, "an array of strings")
    return value


def get_ints(meta: Mapping[str, Any], key: str) -> array[int]:
    """An array of integers below 2^63. Errors as get_int."""
    numbers = _numbers(require(meta, key))
    if numbers is None or numbers.format in "fd?":
        _wrong(meta, key, "an array of integers")
    try:
        return array("q", numbers.tolist())
    except OverflowError:
        _wrong(meta, key, "an array of integers below 2^63")


def get_floats(meta: Mapping[str, Any], key: str) -> array[float]:
    """An array of floats, as float32. Errors as get_int."""
    numbers = _numbers(require(meta, key))
    if numbers is None or numbers.format not in "fd":
        _wrong(meta, key, "an array of floats")
    if numbers.format == "d":
        return array("f", numbers.tolist())
    found = array("f")
    found.frombytes(numbers.tobytes())
    return found


def _numbers(value: Any) -> memoryview | None:
    """A 1-d view of an array of numbers (whatever library made it) or of a list of plain numbers; None for
    anything else."""
    if isinstance(value, list):
        if any(isinstance(each, bool) or not isinstance(each, (int, float)) for each in value):
            return None
        try:
            value = array("q" if all(isinstance(each, int) for each in value) else "d", value)
        except OverflowError:
            return None
    if isinstance(value, (bytes, bytearray)):
        return None
    try:
        view = memoryview(value)
    except TypeError:
        return None
    return view if view.ndim == 1 and view.format in "bBhHiIlLqQfd?" else None
