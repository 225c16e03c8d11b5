"""Each parser on recorded outputs: the whole says what was written, and every cut says the same."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.answers.answer import AnswerParser, Expected
from fourfold.answers.formats import FORMATS
from fourfold.answers.parts import Answer

from .recorded import RECORDED, TOOLS, Recorded


def parse(recorded: Recorded, pieces: Iterable[str]) -> Answer:
    parser = AnswerParser(Expected(recorded.format, TOOLS, recorded.opened))
    answer = Answer()
    for piece in pieces:
        for part in parser.push(piece):
            answer.add(part)
    for part in parser.finish():
        answer.add(part)
    return answer


def cut(text: str, places: Iterable[int]) -> list[str]:
    ends = [0, *sorted({place % (len(text) + 1) for place in places}), len(text)]
    return [text[start:end] for start, end in pairwise(ends)]


def test_there_are_enough() -> None:
    assert len(RECORDED) >= 200
    written = {each.format.tools.name for each in RECORDED if each.format.tools is not None}
    assert written | {"mistral_v11"} == set(FORMATS)


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda each: each.name)
def test_it_says_what_was_written(recorded: Recorded) -> None:
    answer = parse(recorded, [recorded.text])
    assert (answer.content, answer.reasoning) == (recorded.content, recorded.reasoning)
    assert [call.name for call in answer.calls] == [name for name, _ in recorded.calls]
    for call, (_, wanted) in zip(answer.calls, recorded.calls, strict=True):
        assert call.ended
        assert (call.arguments if isinstance(wanted, str) else json.loads(call.arguments)) == wanted


@settings(max_examples=600, deadline=None)
@given(st.sampled_from(RECORDED), st.lists(st.integers(0, 10_000), max_size=12))
def test_every_cut_says_the_same(recorded: Recorded, places: list[int]) -> None:
    """B61, B62."""
    assert parse(recorded, cut(recorded.text, places)) == parse(recorded, [recorded.text])


@pytest.mark.parametrize("recorded", RECORDED[::7], ids=lambda each: each.name)
def test_cut_in_two_everywhere_and_into_characters(recorded: Recorded) -> None:
    """B62."""
    whole = parse(recorded, [recorded.text])
    assert parse(recorded, recorded.text) == whole
    for place in range(len(recorded.text)):
        assert parse(recorded, [recorded.text[:place], recorded.text[place:]]) == whole


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(RECORDED),
    st.integers(0, 10_000),
    st.integers(0, 10_000),
    st.text(max_size=8),
    st.lists(st.integers(0, 10_000), max_size=6),
)
def test_damaged_outputs(recorded: Recorded, start: int, end: int, put: str, places: list[int]) -> None:
    """A part replaced by other text: nothing is raised, nothing depends on the cut, and a text without calls
    and markup is kept to the letter."""
    a, b = sorted((start % (len(recorded.text) + 1), end % (len(recorded.text) + 1)))
    text = recorded.text[:a] + put + recorded.text[b:]
    whole = parse(recorded, [text])
    assert parse(recorded, cut(text, places)) == whole
    if not whole.calls and not whole.reasoning and not any(mark in text for mark in recorded.format.markers):
        assert whole.content == text


def test_content_comes_as_soon_as_it_can_be_no_tag() -> None:
    """B02: held back only while it may still become a tag."""
    recorded = RECORDED[0]
    parser = AnswerParser(Expected(recorded.format, TOOLS))
    sent = [("".join(part.text for part in parser.push(char))) for char in "ab<to x"]
    assert sent == ["a", "b", "", "", "", "<to", " x"]


def test_arguments_come_as_they_are_written() -> None:
    recorded = RECORDED[0]
    parser = AnswerParser(Expected(recorded.format, TOOLS))
    name = parser.push('<tool_call>{"name": "add", "arguments": ')
    first = parser.push('{"a": 12')
    assert [(part.kind, part.text) for part in name + first] == [("call", "add"), ("arguments", '{"a": ')]
    assert [part.text for part in parser.push(', "b": "x')] == ['12, "b": "x']


def test_most_calls() -> None:
    recorded = RECORDED[2]
    parser = AnswerParser(Expected(recorded.format, TOOLS, most_calls=1))
    answer = Answer()
    for part in parser.push(recorded.text):
        answer.add(part)
    assert parser.done
    assert [(call.name, call.ended) for call in answer.calls] == [("add", True)]
    assert answer.content == ""
    assert parser.push("more") == []


def test_no_tools_no_calls() -> None:
    recorded = RECORDED[0]
    parser = AnswerParser(Expected(recorded.format))
    parts = parser.push(recorded.text) + parser.finish()
    assert "".join(part.text for part in parts if part.kind == "content") == recorded.text


@pytest.mark.parametrize("depth", [10, 10_000])
def test_deep_arguments(depth: int) -> None:
    recorded = RECORDED[0]
    text = '<tool_call>{"name": "add", "arguments": {"a": ' + "[" * depth + "]" * depth + "}}</tool_call>"
    answer = parse(recorded, [text])
    assert len(answer.calls) == 1
    assert (answer.calls[0].arguments + answer.content).replace(" ", "").count("]") == depth
