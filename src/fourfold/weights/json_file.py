"""JSON of checkpoints, parsed strictly: no duplicate keys, no NaN, no runaway nesting."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

from fourfold.errors import LoadError
from fourfold.weights.mapped import lfs_pointer_error

MAX_JSON_BYTES = 100_000_000


def parse_object(text: bytes, where: str) -> dict[str, Any]:
    """Raises LoadError, beginning with `where`, unless text is one JSON object, UTF-8, no key repeated."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
            raise LoadError(f"{where}: key {twice!r} appears twice")
        return found

    def constant(name: str) -> NoReturn:
        raise LoadError(f"{where}: holds {name}, which is not JSON")

    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=unique, parse_constant=constant)
    except UnicodeDecodeError as error:
        raise LoadError(f"{where}: is not UTF-8 text ({error.reason} at byte {error.start})") from error
    except RecursionError as error:
        raise LoadError(f"{where}: nests too deeply") from error
    except ValueError as error:
        raise LoadError(f"{where}: is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise LoadError(f"{where}: must be a JSON object, but is a {type(value).__name__}")
    return value


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises LoadError naming the file."""
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise LoadError(f"{path}: is {size} bytes; at most {MAX_JSON_BYTES} are read as JSON")
        text = path.read_bytes()
    except OSError as error:
        raise LoadError(f"{path}: cannot be read: {error.strerror or error}") from error
    pointer = lfs_pointer_error(path, text, "JSON file")
    if pointer is not None:
        raise pointer
    return parse_object(text, str(path))
