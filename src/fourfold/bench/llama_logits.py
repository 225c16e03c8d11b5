"""Reads what `llama-perplexity --kl-divergence-base FILE` writes: the reference of its own comparison.

Layout, little-endian (llama.cpp, tools/perplexity/perplexity.cpp): "_logits_", u32 context, i32 vocab,
i32 chunks, i32 tokens [chunks, context]; then for each chunk, for the positions context/2 .. context - 2, one
row of u16 [4 + vocab rounded up to even]: two float32, scale and least log-probability, then in steps of that
scale the log-probabilities. What is less likely than e^-16 times the likeliest is stored as exactly that.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fourfold.bench.accuracy import Rows, Window
from fourfold.errors import LoadError

_MAGIC = b"_logits_"
_HEADER = struct.Struct("<8sIii")
_FLOOR = -16.0
"""llama.cpp sums over tokens likelier than e^-16; so do we, to measure the same thing."""


class LlamaLogits:
    """One such file. context: tokens of each window.  Implements accuracy.Reference for its own windows.

    Raises LoadError naming the file if it is not one or is not whole.
    """

    def __init__(self, path: Path) -> None:
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                head = file.read(_HEADER.size)
        except OSError as error:
            raise LoadError(f"{path}: cannot be read: {error.strerror}") from error
        if len(head) < _HEADER.size or not head.startswith(_MAGIC):
            raise LoadError(f"{path} is not a file of llama-perplexity --kl-divergence-base")
        _, context, vocab, chunks = _HEADER.unpack(head)
        rows, width = context - 1 - context // 2, 4 + vocab + vocab % 2
        table_at = _HEADER.size + 4 * chunks * context
        wanted = table_at + 2 * chunks * rows * width
        if rows < 1 or chunks < 1 or vocab < 1 or wanted != size:
            raise LoadError(
                f"{path}: {chunks} chunks of {context} tokens and {vocab} logits need {wanted} bytes, "
                f"the file has {size}; let llama-perplexity write it again"
            )
        self.path = path
        self.context: int = context
        self._vocab: int = vocab
        self._tokens = np.fromfile(path, "<i4", chunks * context, offset=_HEADER.size).reshape(
            chunks, context
        )
        self._table: NDArray[np.uint16] = np.memmap(
            path, "<u2", mode="r", offset=table_at, shape=(chunks, rows, width)
        )

    def windows(self, vocab_size: int, bos_id: int | None) -> list[Window]:
        """bos_id: takes the place of each window's first token, as it does in llama.cpp; None if the model
        wants none.  Raises LoadError if the file is of another vocabulary."""
        tokens = self._tokens.astype(np.int32)
        if self._vocab != vocab_size or tokens.min() < 0 or tokens.max() >= vocab_size:
            raise LoadError(
                f"{self.path} has tokens {tokens.min()} to {tokens.max()} of a vocabulary of {self._vocab}, "
                f"the model has {vocab_size}; write the file with the same model"
            )
        if bos_id is not None:
            tokens[:, 0] = bos_id
        return [Window(row, self.context // 2 + 1) for row in tokens]

    def rows(self, index: int, window: Window, size: int) -> Iterator[Rows]:
        first = 0
        for _, rows in window.steps(size):
            if not rows:
                continue
            table = self._table[index, first : first + len(rows)]
            first += len(rows)
            scale, least = np.ascontiguousarray(table[:, :4]).view("<f4").T
            logits = table[:, 4 : 4 + self._vocab] * scale[:, None] + least[:, None]
            yield Rows(logits, np.zeros(len(rows)), _FLOOR)
