"""Encoding with the `tokenizers` library."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import tokenizers
from tokenizers import AddedToken, Regex, models, pre_tokenizers

from fourfold.text.pretokenizers import PreTokenizer
from fourfold.text.tokenizer import utf8
from fourfold.text.vocabulary import TokenKind, positions


class LibraryEncoder:
    """Encodes with a `tokenizers.Tokenizer`, which is used by nobody else."""

    def __init__(self, library: tokenizers.Tokenizer) -> None:
        self._library = library
        # Whether special tokens are parsed is a state of the library's object.
        self._lock = threading.Lock()

    def encode(self, text: str, parse_special: bool) -> list[int]:
        if not text.isascii():
            utf8(text)
        with self._lock:
            self._library.encode_special_tokens = not parse_special
            ids: list[int] = self._library.encode(text, add_special_tokens=False).ids
        return ids


class BpeEncoder(LibraryEncoder):
    """Byte-level BPE from a vocabulary and its merges ("left right", best first).

    Raises ValueError when a merge is malformed or makes a token that the vocabulary does not have.
    """

    def __init__(self, texts: Sequence[str], kinds: bytes, merges: list[str], pre: PreTokenizer) -> None:
        bad = next((merge for merge in merges if merge.count(" ") != 1), None)
        if bad is not None:
            raise ValueError(f"merge {bad!r} is not two tokens with a space between")
        # One split over all of them takes a third of the time of one split each.
        halves = " ".join(merges).split(" ") if merges else []
        pairs = list(zip(halves[::2], halves[1::2], strict=True))
        vocabulary = dict(zip(texts, range(len(texts)), strict=True))
        try:
            model = models.BPE(vocabulary, pairs, ignore_merges=pre.ignore_merges)
        except Exception as error:  # the library raises nothing more specific
            raise ValueError(str(error)) from error
        library = tokenizers.Tokenizer(model)
        library.pre_tokenizer = pre_tokenizers.Sequence(
            [
                *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        for kind in (TokenKind.UNKNOWN, TokenKind.CONTROL, TokenKind.USER_DEFINED):
            added = [texts[id] for id in positions(kinds, kind) if texts[id]]
            special = kind != TokenKind.USER_DEFINED
            add = library.add_special_tokens if special else library.add_tokens
            add([AddedToken(text, normalized=False, special=special) for text in added])
        super().__init__(library)
