"""Text as a parser reads it.

A parser is a coroutine that asks for the next character and waits where there is none yet. So what it does
depends on the characters alone, never on how they were cut (design rule 6).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
Step = Generator[None, None, T]
"""A part of a parser: yields whenever it needs more text, returns T."""

Write = Callable[[str], None]


class Reader:
    """Characters in order. At the end of the text every read gives ""."""

    __slots__ = ("_at", "_base", "_ended", "_kept", "_text")

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._base = 0
        """Characters dropped before _text."""
        self._kept: int | None = None
        """Position from which on everything is kept, for `since`."""
        self._ended = False

    def feed(self, text: str) -> None:
        drop = self._at if self._kept is None else self._kept - self._base
        self._text = self._text[drop:] + text
        self._at -= drop
        self._base += drop

    def end(self) -> None:
        self._ended = True

    def mark(self) -> int:
        """The position; what is read from here on is kept until the next mark or `forget`."""
        self._kept = self._base + self._at
        return self._kept

    def since(self, mark: int) -> str:
        """What was read since the mark made last."""
        return self._text[mark - self._base : self._at]

    def forget(self) -> None:
        self._kept = None

    def peek(self) -> Step[str]:
        """The next character, not taken."""
        while self._at >= len(self._text):
            if self._ended:
                return ""
            yield
        return self._text[self._at]

    def take(self) -> Step[str]:
        char = yield from self.peek()
        self._at += len(char)
        return char

    def run(self, stops: re.Pattern[str]) -> Step[str]:
        """What is there up to the first match of `stops` (a single character); "" before one, and at the
        end. More of the same may follow."""
        yield from self.peek()
        found = stops.search(self._text, self._at)
        end = len(self._text) if found is None else found.start()
        text = self._text[self._at : end]
        self._at = end
        return text

    def literal(self, text: str) -> Step[bool]:
        """Takes `text` if it comes next. If not, what agrees with its beginning is taken."""
        for char in text:
            if (yield from self.peek()) != char:
                return False
            self._at += 1
        return True

    def one_of(self, texts: tuple[str, ...]) -> Step[str]:
        """Takes the first of `texts` to be complete; "" if none comes next, and then nothing is taken."""
        seen = ""
        while True:
            char = yield from self._ahead(len(seen))
            seen += char
            if seen in texts:
                self._at += len(seen)
                return seen
            if not char or not any(text.startswith(seen) for text in texts):
                return ""

    def spaces(self) -> Step[str]:
        """Takes white space."""
        taken = ""
        while True:
            char = yield from self.peek()
            if not char.isspace():
                return taken
            taken += char
            self._at += 1

    def _ahead(self, distance: int) -> Step[str]:
        while self._at + distance >= len(self._text):
            if self._ended:
                return ""
            yield
        return self._text[self._at + distance]


def scan(reader: Reader, tags: tuple[str, ...], write: Write) -> Step[str]:
    """Writes the text before the first of `tags`, takes that and returns it; "" if none comes any more.

    No tag may be the beginning of another.
    """
    first = _first(tags)
    while True:
        text = yield from reader.run(first)
        if text:
            write(text)
            continue
        char = yield from reader.peek()
        if not char:
            return ""
        tag = yield from reader.one_of(tags)
        if tag:
            return tag
        write((yield from reader.take()))


@lru_cache(256)
def _first(tags: tuple[str, ...]) -> re.Pattern[str]:
    """Finds the characters that a tag can begin with."""
    return (
        re.compile("[" + "".join({re.escape(tag[0]) for tag in tags}) + "]") if tags else re.compile(r"(?!)")
    )
