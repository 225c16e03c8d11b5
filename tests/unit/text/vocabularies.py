"""Vocabularies for the text tests: real ones where they are, and small ones made here."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fourfold.errors import FourfoldError
from fourfold.hub import resolve
from fourfold.text.gguf import load_gguf_tokenizer
from fourfold.text.tokenizer import Tokenizer, load_tokenizer
from fourfold.text.vocabulary import byte_alphabet
from fourfold.weights.gguf import open_gguf

VOCABULARIES = Path(__file__).parents[4] / "shared" / "data" / "vocab"


@cache
def vocabulary(name: str) -> Tokenizer:
    """A tokenizer of ../shared/data/vocab; skips the test where the file is not there."""
    path = VOCABULARIES / f"ggml-vocab-{name}.gguf"
    if not path.exists():
        pytest.skip(f"{path.name} is not in ../shared/data/vocab")
    return load_tokenizer(open_gguf(path))


def model_path(name: str) -> Path:
    """A real model that was downloaded before; skips the test where it was not.

    TEST_MODELS names a directory that is looked into first, for files called after the model.
    """
    folder = os.environ.get("TEST_MODELS")
    for path in sorted(Path(folder).glob(f"{name}*.gguf")) if folder else ():
        return path
    try:
        return resolve(name, offline=True).path
    except FourfoldError:
        pytest.skip(f"{name} is not on this machine (fourfold pull {name})")


@cache
def real(name: str) -> Tokenizer:
    return load_tokenizer(open_gguf(model_path(name)))


def bpe_metadata(words: tuple[str, ...] = (), **changes: Any) -> dict[str, Any]:
    """A byte-level BPE vocabulary: 256 bytes, `words` merged letter by letter, then three control tokens.

    changes: keys of tokenizer.ggml to replace; None removes one.
    """
    tokens = [char for char, _ in sorted(byte_alphabet().items(), key=lambda item: item[1])]
    merges = []
    for word in words:
        for end in range(2, len(word) + 1):
            if word[:end] not in tokens:
                tokens.append(word[:end])
                merges.append(f"{word[: end - 1]} {word[end - 1]}")
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    kinds = [1] * len(tokens) + [3] * len(special)
    tokens += special
    values = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": np.array(kinds, np.int32),
        "merges": merges,
        "bos_token_id": tokens.index("<|im_start|>"),
        "eos_token_id": tokens.index("<|im_end|>"),
    }
    return _keys(values, changes)


def spm_metadata(words: tuple[str, ...] = (), **changes: Any) -> dict[str, Any]:
    """A SentencePiece vocabulary: <unk>, <s>, </s>, 256 byte tokens, a user-defined "  ", then `words`."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "  ", *words]
    kinds = [2, 3, 3, *([6] * 256), 4, *([1] * len(words))]
    values = {
        "model": "llama",
        "tokens": tokens,
        "token_type": np.array(kinds, np.int32),
        "scores": -np.arange(len(tokens), dtype=np.float32),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return _keys(values, changes)


def _keys(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    return {f"tokenizer.ggml.{k}": v for k, v in {**values, **changes}.items() if v is not None}


def make(metadata: dict[str, Any]) -> Tokenizer:
    return load_gguf_tokenizer(metadata, Path("made.gguf"))


@cache
def small_bpe() -> Tokenizer:
    return make(bpe_metadata(("Hello", "Ġworld", "Ġthe", "stop", "ABCDEFG")))


@cache
def small_spm() -> Tokenizer:
    return make(spm_metadata(("▁", "H", "e", "l", "o", "w", "r", "d", "▁H", "el", "▁w", "lo", "▁▁")))
