"""A vocabulary of bytes, a few longer tokens, and two special ids: enough to constrain answers with."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from fourfold.errors import InvalidRequestError
from fourfold.grammar.compile import Compiler
from fourfold.grammar.guide import Guide
from fourfold.grammar.sources import Kind, make_constraint

LONGER = [b'{"', b'":', b'", "', b"true", b"false", b"null", b"name", b"re", b"red", b", "]
EOS = 256 + len(LONGER)
CONTROL = EOS + 1
WITHOUT_TOKEN = EOS + 2
ROWS = 288


class Vocabulary:
    """A TokenSource. Encodes by the longest token first."""

    vocab_size = WITHOUT_TOKEN + 1
    eos_ids = (EOS,)
    special_ids = frozenset({EOS, CONTROL})

    def __init__(self) -> None:
        self._texts = [bytes([byte]) for byte in range(256)] + LONGER + [b"<eos>", b"<control>"]

    def token_bytes(self, id: int, /) -> bytes:
        if id >= len(self._texts):
            raise InvalidRequestError("no such token")
        return self._texts[id]

    def encode(self, text: str, add_special_tokens: bool = False, parse_special: bool = False) -> list[int]:
        data, at, ids = text.encode(), 0, []
        longest_first = sorted(range(256, EOS), key=lambda id: -len(self._texts[id]))
        while at < len(data):
            found = next((i for i in longest_first if data.startswith(self._texts[i], at)), data[at])
            ids.append(found)
            at += len(self._texts[found])
        return ids


VOCABULARY = Vocabulary()


def compiler() -> Compiler:
    return Compiler(Vocabulary, ROWS)


SHARED = compiler()
"""Its cache is per content, so tests do not see each other."""


def guide(kind: Kind, content: Any) -> Guide:
    return SHARED.compile(make_constraint(kind, content, "response_format"), "")


def mask(guide: Guide) -> np.ndarray:
    """bool [ROWS]: what may come next."""
    row = np.empty((1, guide.words), np.uint32)
    guide.fill_masks(row, (), (0,))
    guide.look(row)
    return np.unpackbits(row.view(np.uint8), bitorder="little")[:ROWS].astype(bool)


def accepts(guide: Guide, text: str) -> bool:
    """Whether the whole of `text`, token by token, is a finished answer."""
    ids = VOCABULARY.encode(text)
    for id in ids:
        if guide.finished:
            return False
        guide.accept(id)
        if guide.error is not None:
            return False
    return bool(mask(guide)[EOS]) and guide.check(ids) is None


def takes(schema: Any, value: Any) -> bool:
    return accepts(guide("json", schema), json.dumps(value, ensure_ascii=False))
