"""Counts in regular expressions."""

from __future__ import annotations

import time

import pytest

from fourfold.errors import InvalidRequestError
from fourfold.grammar.schema.patterns import MAX_COPIES, check_pattern


@pytest.mark.parametrize(
    "pattern",
    [
        "(((x?){99}){99}){99}", "(?:(?:(?:ab){50}){50}){50}",
        "((((((((x?){10}){10}){10}){10}){10}){10}){10}){10}",
        f"x{{{MAX_COPIES + 1}}}", "x{99999999999999999999}", r"([\\]}]{200,}){200}", r"(\(\d){200}{200}",
    ],
)  # fmt: skip
def test_counts_are_limited(pattern: str) -> None:
    begin = time.process_time()
    with pytest.raises(InvalidRequestError, match="counts"):
        check_pattern(pattern)
    assert time.process_time() - begin < 0.1


@pytest.mark.parametrize(
    "pattern",
    [
        f"x{{{MAX_COPIES}}}", "((a{1,1000}){1,1000}){1,1000}", "^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$",
        r"\{99999}", "[{99999}]{3}", "(x{100}|y{100}){90}", "(x{0}){5}", "(){3}",
    ],
)  # fmt: skip
def test_other_counts_are_not(pattern: str) -> None:
    check_pattern(pattern)
