"""Typed getters: a wrong type or a missing key is a LoadError that names file and key (B75)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fourfold.errors import LoadError
from fourfold.weights import metadata as m
from fourfold.weights.gguf import open_gguf

from . import raw_gguf as raw

META = m.Metadata(
    Path("dir/model.gguf"),
    {
        "int": 3,
        "float": 0.5,
        "bool": True,
        "str": "text",
        "ints": np.array([1, 2], np.int32),
        "big": np.array([2**64 - 1], np.uint64),
        "floats": np.array([0.5, 1.5], np.float32),
        "bools": np.array([True]),
        "list": [1, 2],
        "mixed": [1, 2.5],
        "strings": ["a", "b"],
        "empty": [],
        "none": None,
        "huge": [2**80],
    },
)


def test_values() -> None:
    assert m.get_int(META, "int") == 3
    assert m.get_float(META, "float") == 0.5
    assert m.get_float(META, "int") == 3.0
    assert m.get_bool(META, "bool") is True
    assert m.get_str(META, "str") == "text"
    assert m.get_strings(META, "strings") == ["a", "b"]
    assert m.get_strings(META, "empty") == []
    assert m.get_ints(META, "ints").tolist() == [1, 2]
    assert m.get_ints(META, "list").typecode == "q"
    assert m.get_floats(META, "floats").tolist() == [0.5, 1.5]
    assert m.get_floats(META, "mixed").tolist() == [1, 2.5]


@pytest.mark.parametrize(
    "getter, default", [(m.get_int, 7), (m.get_float, 0.25), (m.get_bool, False), (m.get_str, "x")]
)
def test_default_is_for_missing_keys_only(getter: Callable[..., Any], default: Any) -> None:
    assert getter(META, "absent", default) == default
    with pytest.raises(LoadError, match="none must be"):
        getter(META, "none", default)


@pytest.mark.parametrize(
    "getter",
    [m.get_int, m.get_float, m.get_bool, m.get_str, m.get_strings, m.get_ints, m.get_floats, m.require],
)
def test_missing_key(getter: Callable[..., Any]) -> None:
    with pytest.raises(LoadError, match=r"^dir/model\.gguf: key absent is missing"):
        getter(META, "absent")


@pytest.mark.parametrize(
    "getter, key, message",
    [
        (m.get_int, "float", "float must be an integer, but is float 0.5"),
        (m.get_int, "bool", "bool must be an integer, but is bool True"),
        (m.get_int, "str", "str must be an integer, but is str 'text'"),
        (m.get_int, "ints", "ints must be an integer, but is an array of int32"),
        (m.get_float, "str", "str must be a number"),
        (m.get_float, "bool", "bool must be a number"),
        (m.get_bool, "int", "int must be true or false"),
        (m.get_str, "int", "int must be a string"),
        (m.get_strings, "str", "str must be an array of strings"),
        (m.get_strings, "list", "list must be an array of strings"),
        (m.get_strings, "ints", "ints must be an array of strings, but is an array of int32"),
        (m.get_ints, "floats", "floats must be an array of integers, but is an array of float32"),
        (m.get_ints, "bools", "bools must be an array of integers"),
        (m.get_ints, "mixed", "mixed must be an array of integers"),
        (m.get_ints, "strings", "strings must be an array of integers"),
        (m.get_ints, "big", r"big must be an array of integers below 2\^63"),
        (m.get_ints, "huge", "huge must be an array of integers"),
        (m.get_floats, "ints", "ints must be an array of floats"),
        (m.get_floats, "str", "str must be an array of floats"),
    ],
)
def test_wrong_type(getter: Callable[..., Any], key: str, message: str) -> None:
    with pytest.raises(LoadError, match=rf"^dir/model\.gguf: {message}"):
        getter(META, key)


def test_plain_mappings_work_without_a_file_name() -> None:
    with pytest.raises(LoadError, match="metadata: key hidden_size is missing"):
        m.get_int({}, "hidden_size")


def test_vocabulary_arrays_of_another_type(tmp_path: Path) -> None:
    """B75: scores stored as integers, token types as floats, tokens as numbers."""
    path = tmp_path / "m.gguf"
    pairs = [
        raw.array("tokenizer.ggml.scores", raw.INT32, [1]),
        raw.array("tokenizer.ggml.token_type", raw.FLOAT32, [1.0]),
        raw.array("tokenizer.ggml.tokens", raw.UINT8, [1]),
        raw.array("tokenizer.ggml.merges", raw.STRING, ["a b"]),
    ]
    path.write_bytes(raw.File(pairs).bytes())
    metadata = open_gguf(path).metadata
    with pytest.raises(LoadError, match=r"m\.gguf: tokenizer\.ggml\.scores must be an array of floats"):
        m.get_floats(metadata, "tokenizer.ggml.scores")
    with pytest.raises(LoadError, match=r"m\.gguf: tokenizer\.ggml\.token_type must be an array of integers"):
        m.get_ints(metadata, "tokenizer.ggml.token_type")
    with pytest.raises(LoadError, match=r"m\.gguf: tokenizer\.ggml\.tokens must be an array of strings"):
        m.get_strings(metadata, "tokenizer.ggml.tokens")
    with pytest.raises(LoadError, match=r"merges must be an array of floats, but is an array of strings"):
        m.get_floats(metadata, "tokenizer.ggml.merges")
    assert m.get_strings(metadata, "tokenizer.ggml.merges") == ["a b"]
