"""Files in llama-perplexity's layout, whole and damaged."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from fourfold.bench.llama_logits import LlamaLogits
from fourfold.errors import LoadError

CONTEXT, VOCAB, CHUNKS = 9, 5, 2
FIRST = CONTEXT // 2
ROWS = CONTEXT - 1 - FIRST


def _file(path: Path) -> tuple[Path, np.ndarray, np.ndarray]:
    """The file, its tokens [chunks, context] and its log-probabilities [chunks, rows, vocab]."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, VOCAB, (CHUNKS, CONTEXT))
    logits = random.standard_normal((CHUNKS, ROWS, VOCAB)) * 4
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    out = bytearray(
        b"_logits_" + struct.pack("<Iii", CONTEXT, VOCAB, CHUNKS) + tokens.astype("<i4").tobytes()
    )
    for row in log_p.reshape(-1, VOCAB):
        least = max(row.min(), row.max() - 16)
        scale = (row.max() - least) / 65535
        steps = np.clip(np.rint((row - least) / scale), 0, 65535).astype("<u2")
        out += struct.pack("<ff", scale, least) + steps.tobytes() + bytes(2 * (VOCAB % 2))
    path.write_bytes(out)
    return path, tokens, log_p


def test_a_whole_file(tmp_path: Path) -> None:
    path, tokens, log_p = _file(tmp_path / "base")
    file = LlamaLogits(path)
    assert file.context == CONTEXT
    windows = file.windows(VOCAB, None)
    assert [window.tokens.tolist() for window in windows] == tokens.tolist()
    for size in (1, 3, 20):
        for index, window in enumerate(windows):
            # llama.cpp scores the tokens behind position context/2.
            assert window.first == FIRST + 1
            found = np.concatenate([rows.logits for rows in file.rows(index, window, size)])
            # 16 nats in 65535 steps, rounded
            np.testing.assert_allclose(found, log_p[index], atol=16 / 65535)


def test_bos_takes_the_first_place(tmp_path: Path) -> None:
    path, tokens, _ = _file(tmp_path / "base")
    first, second = LlamaLogits(path).windows(VOCAB, 3)
    assert first.tokens.tolist() == [3, *tokens[0, 1:]]
    assert second.tokens.tolist() == [3, *tokens[1, 1:]]


@pytest.mark.parametrize(
    "offset,value,words",
    [
        (0, b"GGUF", "is not a file of llama-perplexity"),
        (8, struct.pack("<I", 2**32 - 1), "chunks of 4294967295 tokens"),
        (8, struct.pack("<I", 0), "chunks of 0 tokens"),
        (12, struct.pack("<i", -5), "-5 logits"),
        (16, struct.pack("<i", 2**31 - 1), "2147483647 chunks"),
        (16, struct.pack("<i", 0), "0 chunks"),
    ],
)
def test_damaged_headers(tmp_path: Path, offset: int, value: bytes, words: str) -> None:
    path, _, _ = _file(tmp_path / "base")
    data = bytearray(path.read_bytes())
    data[offset : offset + len(value)] = value
    path.write_bytes(data)
    with pytest.raises(LoadError, match=words) as error:
        LlamaLogits(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("share", [0, 0.1, 0.5, 0.999])
def test_cut_short(tmp_path: Path, share: float) -> None:
    path, _, _ = _file(tmp_path / "base")
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(LoadError, match=r"is not a file of|write it again"):
        LlamaLogits(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="cannot be read: No such file"):
        LlamaLogits(tmp_path / "gone")


def test_other_vocabulary(tmp_path: Path) -> None:
    path, _, _ = _file(tmp_path / "base")
    with pytest.raises(LoadError, match="of a vocabulary of 5, the model has 7"):
        LlamaLogits(path).windows(7, None)
    data = bytearray(path.read_bytes())
    data[20:24] = struct.pack("<i", -1)
    path.write_bytes(data)
    with pytest.raises(LoadError, match="tokens -1 to 4 of a vocabulary"):
        LlamaLogits(path).windows(VOCAB, None)
