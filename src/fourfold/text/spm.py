"""SentencePiece-style encoding, in native code (native/text/spm.h)."""

from __future__ import annotations

from array import array

from fourfold import _native
from fourfold.text.tokenizer import utf8


class SpmEncoder:
    """texts, kinds (a TokenKind per byte) and scores (float32) of the vocabulary, as long as each other.

    add_space_prefix: text at the beginning and after a special token gets a space in front.
    strip_after: ids of special tokens that swallow the white space to their right.
    """

    def __init__(
        self,
        texts: list[str],
        kinds: bytes,
        scores: array[float],
        unknown_id: int | None,
        add_space_prefix: bool,
        strip_after: list[int],
    ) -> None:
        self._merger = _native.SpmTokenizer(
            texts,
            scores,
            kinds,
            -1 if unknown_id is None else unknown_id,
            add_space_prefix,
            strip_after,
        )

    def encode(self, text: str, parse_special: bool) -> list[int]:
        ids: list[int] = self._merger.encode(utf8(text), parse_special)
        return ids
