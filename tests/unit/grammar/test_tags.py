"""Structural tags: free until a trigger, bound until the end of the tag, and free again."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fourfold.errors import InvalidRequestError
from fourfold.grammar.sources import make_constraint

from .vocabulary import CONTROL, EOS, VOCABULARY, guide, mask

NUMBER = {
    "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
    "additionalProperties": False,
}  # fmt: skip
LEGACY = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<fn=a>", "schema": NUMBER, "end": "</fn>"},
        {"begin": "<fn=b>", "schema": {"type": "boolean"}, "end": "</fn>"},
    ],
    "triggers": ["<fn="],
}


def tag(begin: Any, content: Any, end: Any = "</t>") -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def form(**format: Any) -> dict[str, Any]:
    return {"type": "structural_tag", "format": format}


def accepts(asked: Any, answer: str | list[str | int]) -> bool:
    """Whether `answer` is a finished answer; numbers in it are token ids."""
    following = guide("structural_tag", asked)
    pieces = [answer] if isinstance(answer, str) else answer
    for piece in pieces:
        for token in [piece] if isinstance(piece, int) else VOCABULARY.encode(piece):
            if not mask(following)[token]:
                return False
            following.accept(token)
            assert following.error is None
    return bool(mask(following)[EOS])


@pytest.mark.parametrize(
    ("answer", "fits"),
    [
        ("", True),
        ("no tag at all, {not json} </fn> <f n=", True),
        ('say <fn=a>{"a": 4}</fn> and', True),
        ('<fn=a>{"a": 4}</fn><fn=b>true</fn> x <fn=b>false</fn>', True),
        ("say <fn=", False),
        ("say <fn=c>", False),
        ('say <fn=a>{"a": 4', False),
        ('say <fn=a>{"a": "x"}</fn>', False),
        ('say <fn=a>{"a": 4}</fx>', False),
        ("say <fn=b>{", False),
    ],
)
def test_legacy(answer: str, fits: bool) -> None:
    assert accepts(LEGACY, answer) is fits
    assert accepts(json.dumps(LEGACY), answer) is fits


ONE = tag("<a>", {"type": "regex", "pattern": "[0-9]+"}, "</a>")
TWO = tag("<b>", {"type": "grammar", "grammar": 'start: "x" | "y"'}, "</b>")


@pytest.mark.parametrize(
    ("format", "good", "bad"),
    [
        ({"type": "const_string", "value": "hi"}, ["hi"], ["h", "hi ", "ho"]),
        (ONE, ["<a>1</a>"], ["", "1", "<a></a>", "<a>1</a> "]),
        (
            {"type": "sequence", "elements": [{"type": "any_text"}, ONE]},
            ["<a>1</a>", "x <b> <a>12</a>"],
            ["x", "x <a>b", "<a>1</a> x"],
        ),
        ({"type": "or", "elements": [ONE, TWO]}, ["<a>1</a>", "<b>x</b>"], ["<a>x</a>", "<a>1</a><b>x</b>"]),
        (
            # Thinking is free, what follows is not.
            {"type": "sequence", "elements": [tag("<t>", {"type": "any_text"}), ONE]},
            ["<t></t><a>1</a>", '<t>a < b, {"x"} </t</t><a>12</a>'],
            ["<t>a", "<t>a</t>", "<t>a</t>b", "<t></t><a>x"],
        ),
        (
            {"type": "triggered_tags", "triggers": ["<"], "tags": [ONE, TWO], "at_least_one": True},
            ["x <a>1</a> y <b>x</b>", "<b>y</b>"],
            ["", "x", "x <c"],
        ),
        (
            {
                "type": "triggered_tags", "triggers": ["<a", "<b"], "tags": [ONE, TWO],
                "stop_after_first": True,
            },
            ["x <a>1</a>", "x", "<b>y</b>", "x < 3"],
            ["x <a>1</a> ", "x <a>1</a><b>y</b>"],
        ),
        (
            tag("<t>", {"type": "triggered_tags", "triggers": ["<a"], "tags": [ONE]}),
            ["<t>x</t>", "<t>x <a>1</a> y</t>", "<t></t>"],
            ["<t>x <a>y", "<t>x</t> ", "<t>x"],
        ),
        (
            {"type": "tags_with_separator", "separator": ", ", "tags": [ONE, TWO]},
            ["", "<a>1</a>", "<a>1</a>, <b>x</b>, <a>2</a>"],
            ["x", "<a>1</a>, ", "<a>1</a><b>x</b>"],
        ),
        (
            {
                "type": "tags_with_separator", "separator": ";", "tags": [ONE, TWO], "at_least_one": True,
                "stop_after_first": True,
            },
            ["<a>1</a>", "<b>y</b>"],
            ["", "<a>1</a>;<b>x</b>"],
        ),
        ({"type": "star", "content": ONE}, ["", "<a>1</a><a>2</a>"], ["<a>1"]),
        ({"type": "plus", "content": ONE}, ["<a>1</a>"], [""]),
        ({"type": "sequence", "elements": [{"type": "optional", "content": ONE}, TWO]},
         ["<b>x</b>", "<a>1</a><b>x</b>"], ["<a>1</a>", "<a>1</a><a>1</a><b>x</b>"]),
        (
            {"type": "sequence", "elements": [{"type": "any_text"}, {"type": "const_string", "value": "."},
                                              {"type": "any_text"}]},
            [".", "a. b. c"],
            ["", "a"],
        ),
    ],
)  # fmt: skip
def test_formats(format: Any, good: list[str], bad: list[str]) -> None:
    for answer in good:
        assert accepts({"format": format}, answer), answer
    for answer in bad:
        assert not accepts({"format": format}, answer), answer


def test_special_tokens_begin_and_end_tags() -> None:
    call = {"type": "token", "token": CONTROL}
    tags = [tag(call, {"type": "json_schema", "json_schema": NUMBER}, "")]
    asked = form(type="triggered_tags", triggers=[call], tags=tags)
    assert accepts(asked, "free < text")
    assert accepts(asked, ["free", CONTROL, '{"a": 1}', " and ", CONTROL, '{"a": 2}'])
    assert not accepts(asked, ["free", CONTROL, "x"])
    assert not accepts(asked, ["free", CONTROL])
    ended = form(**tag("<t>", {"type": "any_text"}, call))
    assert accepts(ended, ["<t>what ever", CONTROL])
    assert not accepts(ended, ["<t>what ever"])


def test_what_the_grammar_cannot_say_is_refused_or_told() -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    content = {"type": "json_schema", "json_schema": schema}
    with pytest.raises(InvalidRequestError, match=r"format.content.json_schema: .*uniqueItems"):
        make_constraint("structural_tag", form(**tag("<t>", content)), "response_format")
    made = make_constraint("structural_tag", form(**tag("<t>", {**content, "strict": False})), "f")
    assert made.unsaid == ("#: uniqueItems",)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ([], "must be an object"),
        ({"type": "structural_tag"}, "format or structures"),
        ({**LEGACY, "triggers": []}, "structures.triggers must be a list"),
        ({**LEGACY, "triggers": ["<nothing"]}, "starts with none of the triggers"),
        ({**LEGACY, "structures": [{"begin": "x"}]}, r"structures\[0\].schema is required"),
        ({**LEGACY, "structures": "x"}, "must be a list"),
        ({"format": {"type": "any"}}, "format.type is 'any'; known are"),
        ({"format": None}, "format must be an object"),
        ({"format": {"type": "tag", "begin": 5, "content": {"type": "any_text"}, "end": ""}}, "format.begin"),
        ({"format": tag("<t>", {"type": "any_text"}, ["a", "b"])}, "format.end must be one text, got 2"),
        ({"format": tag("<t>", {"type": "any_text"}, {"type": "token", "token": True})}, "format.end"),
        ({"format": tag("<t>", {"type": "regex", "pattern": "(?=a)"})}, "format.content.pattern"),
        ({"format": tag("<t>", {"type": "regex", "pattern": 5})}, "must be a text"),
        (
            {"format": tag("<t>", {"type": "json_schema", "json_schema": {"type": "str"}})},
            "'str' is not a type",
        ),
        (
            {"format": {"type": "sequence", "elements": [{"type": "any_text"}, {"type": "any_text"}]}},
            "free text must end",
        ),
        ({"format": {"type": "or", "elements": [ONE] * 3000}}, "more than 2000 parts"),
        ({"format": tag({"type": "token", "token": 10**6}, {"type": "any_text"}, "x")}, "compiled"),
    ],
)
def test_a_bad_one_is_refused_by_name(asked: Any, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        guide("structural_tag", asked)


def test_deep_nesting_is_refused() -> None:
    format: Any = {"type": "any_text"}
    for _ in range(60):
        format = {"type": "sequence", "elements": [format]}
    with pytest.raises(InvalidRequestError, match="nests more than 32 levels"):
        make_constraint("structural_tag", {"format": format}, "f")
