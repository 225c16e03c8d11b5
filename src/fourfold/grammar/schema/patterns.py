"""Regular expressions of users: is it one, and does a text match it, within bounded time."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING

from fourfold.errors import InvalidRequestError

if TYPE_CHECKING:
    import regex  # imported late: most engines never see a pattern

MAX_PATTERN = 16_384
"""Characters."""
MAX_COPIES = 20_000
"""Parts, counts written out."""
_PIECE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(\d+)(?:,\d*)?\}|.", re.DOTALL)
"""An escape, a class, a count or a character."""


class SlowPatternError(Exception):
    """A match was given up."""


def check_pattern(pattern: str) -> None:
    """Raises InvalidRequestError saying what is wrong and where."""
    if len(pattern) > MAX_PATTERN:
        raise InvalidRequestError(
            f"a regular expression of {len(pattern)} characters is longer than the limit of {MAX_PATTERN}"
        )
    if _copies(pattern) > MAX_COPIES:
        raise InvalidRequestError(
            f"the counts in the regular expression {pattern[:200]!r} come to more than {MAX_COPIES} parts "
            "when written out; nest fewer of them or count less"
        )
    import regex

    try:
        _compile(pattern)
    except regex.error as error:
        at = "" if error.pos is None else f" at character {error.pos}"
        raise InvalidRequestError(
            f"the regular expression {pattern[:200]!r} is not valid{at}: {error.msg}"
        ) from error


def _copies(pattern: str) -> int:
    """How many parts `pattern` has, counts written out, {m,n} as m; beyond MAX_COPIES no exact number.

    Compiling writes them out, holding the GIL: (x{99}){99}, nested thrice, takes two seconds."""
    sums, last = [0], 0
    for piece in _PIECE.finditer(pattern):
        text = piece[0]
        if piece[1] is not None:
            more = last * (int(piece[1]) - 1) if len(piece[1]) < 7 else MAX_COPIES + 1
            sums[-1] += max(more, 0)
            last += max(more, 0)
        elif text == "(":
            sums.append(0)
        elif text == ")" and len(sums) > 1:
            last = sums.pop()
            sums[-1] += last
        elif text not in "|?*+^$)":
            last = 1
            sums[-1] += 1
        if sums[-1] > MAX_COPIES:
            break
    return sums[-1]


def found_in(pattern: str, text: str, seconds: float) -> bool:
    """Whether `pattern` matches anywhere in `text`, classes like \\d meaning ASCII as in ECMA-262.

    Raises SlowPatternError after `seconds`.
    """
    try:
        return _compile(pattern).search(text, timeout=max(seconds, 1e-3)) is not None
    except TimeoutError as error:
        raise SlowPatternError(pattern) from error


@lru_cache(256)
def _compile(pattern: str) -> regex.Pattern[str]:
    import regex

    # \Z and $: in ECMA-262 a final newline is not skipped by $.
    return regex.compile(_ecma_end(pattern), regex.V0 | regex.ASCII)


def _ecma_end(pattern: str) -> str:
    """`pattern` with Python's \\Z, which is what ECMA-262 means by it, for every $ outside a class."""
    out, escaped, in_class = [], False, False
    for char in pattern:
        if escaped:
            escaped = False
        elif char == "\\":
            escaped = True
        elif in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
        elif char == "$":
            out.append(r"\Z")
            continue
        out.append(char)
    return "".join(out)
