"""SentencePiece-style encoding, in native code (native/text/spm.h)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fourfold.text.tokenizer import utf8


class SpmEncoder:
    """texts, kinds uint8 [V], scores float32 [V] of the vocabulary.

    add_space_prefix: text at the beginning and after a special token gets a space in front.
    strip_after: ids of special tokens that swallow the white space to their right.
    """

    def __init__(
        self,
        texts: list[str],
        kinds: NDArray[np.uint8],
        scores: NDArray[np.float32],
        unknown_id: int | None,
        add_space_prefix: bool,
        strip_after: list[int],
    ) -> None:
        from fourfold import _native  # vocabularies of the other kind work without the native module

        self._merger = _native.SpmTokenizer(
            texts,
            np.ascontiguousarray(scores),
            np.ascontiguousarray(kinds),
            -1 if unknown_id is None else unknown_id,
            add_space_prefix,
            strip_after,
        )

    def encode(self, text: str, parse_special: bool) -> list[int]:
        ids: list[int] = self._merger.encode(utf8(text), parse_special)
        return ids
