"""Token ids to text, as they come."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fourfold.text.tokenizer import Tokenizer


class Detokenizer:
    """Turns a stream of token ids into text that never ends in half a character.

    The pieces joined are the decoding of all ids at once, however the ids were cut (design rule 6): tokens
    stand for bytes, and the beginning of an unfinished character is kept back.
    Bytes that can never become a character are shown as U+FFFD as soon as that is certain.

    keep_leading_space: the text continues another one, so that a first space belongs to it.
    shown: special tokens that are not skipped.
    """

    __slots__ = ("_begun", "_skip", "_strip", "_token_bytes")

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        keep_leading_space: bool = False,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skip: frozenset[int] = tokenizer.special_ids - shown if skip_special_tokens else frozenset()
        self._strip = tokenizer.spec.strip_leading_space and not keep_leading_space
        self._begun = b""  # of a character

    def push(self, ids: Sequence[int]) -> str:
        """The text that `ids` complete, maybe none. Raises InvalidRequestError for an id without a token."""
        token_bytes = self._token_bytes
        skip = self._skip
        data = b"".join([token_bytes(id) for id in ids if id not in skip])
        if not data:
            return ""
        if self._strip:
            self._strip = False
            data = data.removeprefix(b" ")
        data = self._begun + data
        # What codecs' incremental decoder does, which is Python code around this.
        text, taken = codecs.utf_8_decode(data, "replace", False)
        self._begun = data[taken:]
        return text

    def finish(self) -> str:
        """What an unfinished character at the very end is shown as: one U+FFFD, or nothing."""
        begun, self._begun = self._begun, b""
        return begun.decode("utf-8", "replace")
