"""Tokens and the bytes they stand for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import cache
from typing import Literal

from fourfold.errors import InvalidRequestError

SPACE_MARK = "▁"
"""U+2581, what SentencePiece writes for a space."""

Spelling = Literal["byte-level", "sentencepiece", "plain"]


class TokenKind(IntEnum):
    """Values of the GGUF array tokenizer.ggml.token_type."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@cache
def byte_alphabet() -> dict[str, int]:
    """The character each byte is written as in byte-level BPE (Radford et al. 2019, GPT-2), inverted.

    Printable characters of Latin-1 stand for themselves, the other 68 bytes for U+0100 and up, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    hidden = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(hidden)})
    return alphabet


def _byte_level(text: str) -> bytes:
    alphabet = byte_alphabet()
    try:
        return bytes([alphabet[char] for char in text])
    except KeyError:
        # A token that was added to the vocabulary after training is not written in the byte alphabet.
        return text.encode("utf-8", "replace")


def _sentencepiece(text: str) -> bytes:
    return text.replace(SPACE_MARK, " ").encode("utf-8", "replace")


def _plain(text: str) -> bytes:
    return text.encode("utf-8", "replace")


_SPELLINGS: dict[Spelling, Callable[[str], bytes]] = {
    "byte-level": _byte_level,
    "sentencepiece": _sentencepiece,
    "plain": _plain,
}


class Vocabulary:
    """The tokens of a model by id.

    texts: as the vocabulary file writes them; None for an id that has no token.
    kinds: a TokenKind value per token.
    spelling: how ordinary tokens write their bytes: "byte-level" (GPT-2's alphabet), "sentencepiece"
        (U+2581 for a space, <0xAB> for a byte), "plain" (UTF-8 as it is).
    """

    __slots__ = ("_bytes", "_kinds", "_spell", "_texts", "special_ids")

    def __init__(self, texts: Sequence[str | None], kinds: bytes, spelling: Spelling) -> None:
        self._texts = texts
        self._kinds = kinds
        self._spell = _SPELLINGS[spelling]
        self._bytes: dict[int, bytes] = {}
        self.special_ids = frozenset(
            id for kind in (TokenKind.CONTROL, TokenKind.UNKNOWN) for id in positions(kinds, kind)
        )

    def __len__(self) -> int:
        return len(self._texts)

    def token_text(self, id: int) -> str:
        """The token as the vocabulary writes it. Raises InvalidRequestError if there is no such token."""
        text = self._texts[id] if 0 <= id < len(self._texts) else None
        if text is None:
            raise InvalidRequestError(
                f"token id {id} does not exist; ids run from 0 to {len(self._texts) - 1}"
            )
        return text

    def token_bytes(self, id: int) -> bytes:
        """The bytes of text the token stands for, not always whole characters.

        Raises InvalidRequestError if there is no such token.
        """
        data = self._bytes.get(id)
        if data is None:
            data = self._bytes[id] = self._make_bytes(id)
        return data

    def _make_bytes(self, id: int) -> bytes:
        text = self.token_text(id)
        kind = self._kinds[id]
        if kind == TokenKind.BYTE:
            return bytes([int(text[3:5], 16)])
        if kind in (TokenKind.CONTROL, TokenKind.UNKNOWN, TokenKind.USER_DEFINED):
            return _plain(text)
        return self._spell(text)


def positions(data: bytes, value: int) -> list[int]:
    """Indices of a byte, ascending."""
    found = []
    at = data.find(value)
    while at >= 0:
        found.append(at)
        at = data.find(value, at + 1)
    return found
