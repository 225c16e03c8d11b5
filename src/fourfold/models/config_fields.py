"""Typed reading of a model's configuration.

A wrong type, a missing key or an absurd value is a LoadError that names the file and the key.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Final, NoReturn

import msgspec

from fourfold.errors import LoadError

LIMIT: Final = 2**31 - 1
"""Largest size any field may state."""


class _Required:
    """Marks a field without default."""


REQUIRED: Final = _Required()


class Fields(msgspec.Struct, frozen=True):
    """config.json, or the GGUF keys of one architecture.

    prefix: put before each key ("llama." in GGUF files).  read: keys asked for so far, for `refuse_unread`.
    """

    path: Path
    data: Mapping[str, Any]
    prefix: str = ""
    read: set[str] = msgspec.field(default_factory=set)

    def fail(self, key: str, problem: str) -> NoReturn:
        raise LoadError(f"{self.path}: {self.prefix}{key} {problem}")

    def raw(self, key: str) -> Any:
        """The value as it is, None when absent or null."""
        self.read.add(self.prefix + key)
        return self.data.get(self.prefix + key)

    def integer(
        self, key: str, default: int | _Required = REQUIRED, *, least: int = 1, most: int = LIMIT
    ) -> int:
        value = self.raw(key)
        if value is None:
            if isinstance(default, _Required):
                self.fail(key, "is missing; it must be an integer")
            return default
        if isinstance(value, bool) or not isinstance(value, Integral):
            self.fail(key, f"must be an integer, got {value!r}")
        number = int(value)
        if not least <= number <= most:
            self.fail(key, f"must be between {least} and {most}, got {number}")
        return number

    def uniform_integer(self, key: str, default: int | _Required = REQUIRED) -> int:
        """An integer, or a list of the same integer once per layer, as GGUF files may have it."""
        value = self.raw(key)
        if not isinstance(value, Iterable) or isinstance(value, str | bytes | Mapping):
            return self.integer(key, default)
        items = set(value)
        if len(items) != 1:
            self.fail(key, f"differs between layers ({sorted(items)}), which is not supported")
        return Fields(self.path, {self.prefix + key: items.pop()}, self.prefix).integer(key)

    def number(
        self,
        key: str,
        default: float | _Required = REQUIRED,
        *,
        least: float = -math.inf,
        above: float = -math.inf,
    ) -> float:
        """A finite number, at least `least` and greater than `above`."""
        value = self.raw(key)
        if value is None:
            if isinstance(default, _Required):
                self.fail(key, "is missing; it must be a number")
            return default
        if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
            self.fail(key, f"must be a finite number, got {value!r}")
        if value < least or value <= above:
            self.fail(
                key, f"must be {'above' if value <= above else 'at least'} {max(least, above)}, got {value}"
            )
        return float(value)

    def present(self, key: str) -> bool:
        return self.raw(key) is not None

    def optional_number(
        self, key: str, *, absent: float | None = None, above: float = -math.inf
    ) -> float | None:
        """None when null; `absent` when there is no such key."""
        if self.raw(key) is None:
            return None if self.prefix + key in self.data else absent
        return self.number(key, above=above)

    def filled(self, defaults: Mapping[str, Any]) -> Fields:
        """With the family's defaults where a key is absent (not where it is null)."""
        prefixed = {self.prefix + key: value for key, value in defaults.items()}
        return Fields(self.path, {**prefixed, **self.data}, self.prefix, self.read)

    def boolean(self, key: str, default: bool) -> bool:
        value = self.raw(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.fail(key, f"must be true or false, got {value!r}")
        return value

    def text(self, key: str, default: str | _Required = REQUIRED) -> str:
        value = self.raw(key)
        if value is None:
            if isinstance(default, _Required):
                self.fail(key, "is missing; it must be a string")
            return default
        if not isinstance(value, str):
            self.fail(key, f"must be a string, got {value!r}")
        return value

    def numbers(self, key: str, length: int) -> tuple[float, ...]:
        """A list of exactly `length` positive numbers."""
        value = self.raw(key)
        if not isinstance(value, list | tuple) or len(value) != length:
            got = f"{len(value)} items" if isinstance(value, list | tuple) else repr(value)
            self.fail(key, f"must be a list of {length} numbers, got {got}")
        for item in value:
            if isinstance(item, bool) or not isinstance(item, Real) or not 0 < float(item) < math.inf:
                self.fail(key, f"must hold positive numbers, got {item!r}")
        return tuple(float(item) for item in value)

    def section(self, key: str) -> Fields | None:
        """A nested mapping, None when absent, null or empty."""
        value = self.raw(key)
        if value is None or value == {}:
            return None
        if not isinstance(value, Mapping):
            self.fail(key, f"must be a mapping, got {value!r}")
        prefix = f"{self.prefix}{key}."
        return Fields(self.path, {prefix + str(name): item for name, item in value.items()}, prefix)

    def token_ids(self, key: str) -> tuple[int, ...]:
        """A token id or a list of them; empty when absent."""
        value = self.raw(key)
        items = value if isinstance(value, list | tuple) else () if value is None else (value,)
        for item in items:
            if isinstance(item, bool) or not isinstance(item, Integral) or not 0 <= int(item) <= LIMIT:
                self.fail(key, f"must be a token id or a list of them, got {value!r}")
        return tuple(int(item) for item in items)

    def refuse(self, neutral: Mapping[str, tuple[Any, ...]], advice: str = "this is not supported") -> None:
        """LoadError when a field that would change the meaning is set to something but its neutral values."""
        for key, harmless in neutral.items():
            value = self.raw(key)
            if value is not None and value not in harmless:
                self.fail(key, f"is {value!r}; {advice}")

    def refuse_unread(self, harmless: Iterable[str]) -> None:
        """LoadError when a key under the prefix was neither read nor known to be harmless: it may change what
        the model computes."""
        allowed = {self.prefix + key for key in harmless}
        for key, value in self.data.items():
            if not key.startswith(self.prefix) or key in self.read | allowed:
                continue
            if not isinstance(value, bool | Integral | Real | str) or value:
                raise LoadError(
                    f"{self.path}: {key} = {value!r} is not known for this architecture; it may change what "
                    "the model computes, so it is not ignored"
                )
