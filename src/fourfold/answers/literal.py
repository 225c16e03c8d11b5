"""JSON and Python literals, read as they come and written as JSON.

Valid JSON is passed on as it stands. What models write besides is mended: raw control characters in strings,
unknown escapes, single quotes, True, False and None, tuples, a comma before a closing bracket.
"""

from __future__ import annotations

import json
import re
from functools import partial

from fourfold.answers.reader import Reader, Step, Write

MAX_DEPTH = 256

_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_NUMBER_PARTS = frozenset("+-.0123456789_eExXabcdfABCDF")
_WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_WORD_PARTS = frozenset("abcdefghijklmnopqrstuvwxyzTFN")
_CLOSERS = {"{": "}", "[": "]", "(": ")"}
_WRITTEN = {")": "]", "(": "["}
_SPECIAL = {quote: re.compile(rf"[{quote}\\\x00-\x1f]" + (r'|"' if quote == "'" else "")) for quote in "\"'"}
_CONTROL = {char: json.dumps(char)[1:-1] for char in map(chr, range(32))}


def value(reader: Reader, write: Write) -> Step[bool]:
    """Reads one value. False at the first character that cannot belong to it, which is not taken; what was
    written until then is its beginning."""
    closers: list[str] = []
    comma = ""  # held until it is known that something follows
    while True:
        comma += yield from _spaces(reader, write, hold=bool(comma))
        char = yield from reader.peek()
        if closers and char == closers[-1]:
            yield from reader.take()
            write(_WRITTEN.get(char, char))
            closers.pop()
        else:
            write(comma)
            if closers and closers[-1] == "}" and not (yield from _key(reader, write)):
                return False
            char = yield from reader.peek()
            if char in _CLOSERS and char:
                if len(closers) == MAX_DEPTH:
                    return False
                yield from reader.take()
                write(_WRITTEN.get(char, char))
                closers.append(_CLOSERS[char])
                comma = ""
                continue
            if not (yield from _scalar(reader, write, char)):
                return False
        comma = ""
        if not closers:
            return True
        while True:
            yield from _spaces(reader, write)
            char = yield from reader.peek()
            if char == ",":
                yield from reader.take()
                comma = ","
                break
            if char != closers[-1]:
                return False
            yield from reader.take()
            write(_WRITTEN.get(char, char))
            closers.pop()
            if not closers:
                return True


def string(reader: Reader, write: Write) -> Step[bool]:
    """Reads a string in either kind of quotes, and writes it as JSON, with quotes."""
    quote = yield from reader.peek()
    if quote not in ('"', "'"):
        return False
    yield from reader.take()
    write('"')
    special = _SPECIAL[quote]
    while True:
        text = yield from reader.run(special)
        if text:
            write(text)
            continue
        char = yield from reader.take()
        if not char:
            return False
        if char == quote:
            write('"')
            return True
        if char == '"':
            write('\\"')
        elif char == "\\":
            if not (yield from _escape(reader, write)):
                return False
        else:
            write(_CONTROL[char])


def text_of(reader: Reader) -> Step[str | None]:
    """Reads a string and returns what it says; None if there is none."""
    pieces: list[str] = []
    if not (yield from string(reader, pieces.append)):
        return None
    text: str = json.loads("".join(pieces))
    return text


def quoted(text: str) -> str:
    """What stands between the quotes of a JSON string that says `text`."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _escape(reader: Reader, write: Write) -> Step[bool]:
    char = yield from reader.take()
    if not char:
        return False
    if char in '"\\/bfnrt':
        write("\\" + char)
    elif char == "'":
        write("'")
    elif char in "ux":
        digits = ""
        while len(digits) < (4 if char == "u" else 2):
            digit = yield from reader.peek()
            if not digit or digit not in "0123456789abcdefABCDEF":
                break
            digits += yield from reader.take()
        whole = len(digits) == (4 if char == "u" else 2)
        write("\\u" + digits.rjust(4, "0") if whole else f"\\\\{char}{digits}")
    else:
        write("\\\\" + _CONTROL.get(char, char))
    return True


def _key(reader: Reader, write: Write) -> Step[bool]:
    if not (yield from string(reader, write)):
        return False
    yield from _spaces(reader, write)
    if (yield from reader.peek()) != ":":
        return False
    write((yield from reader.take()))
    yield from _spaces(reader, write)
    return True


def _scalar(reader: Reader, write: Write, char: str) -> Step[bool]:
    if char in ('"', "'"):
        return (yield from string(reader, write))
    if char and char in "+-.0123456789":
        return (yield from _number(reader, write))
    word = ""
    while (char := (yield from reader.peek())) and char in _WORD_PARTS and len(word) < 6:
        word += yield from reader.take()
    if word in _WORDS:
        write(_WORDS[word])
        return True
    write(word)
    return False


def _number(reader: Reader, write: Write) -> Step[bool]:
    text = ""
    while (char := (yield from reader.peek())) and char in _NUMBER_PARTS:
        text += yield from reader.take()
    if not _NUMBER.fullmatch(text):
        for kind in (partial(int, base=0), float):
            try:
                text = json.dumps(kind(text), allow_nan=False)
                break
            except ValueError:
                continue
        else:
            write(text)
            return False
    write(text)
    return True


def _spaces(reader: Reader, write: Write, hold: bool = False) -> Step[str]:
    space = yield from reader.spaces()
    if hold:
        return space
    write(space)
    return ""
