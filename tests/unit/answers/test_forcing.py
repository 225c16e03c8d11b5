"""Grammars of calls whose arguments are not JSON: whatever they allow, the parser reads as arguments that the
tool's schema allows, by the jsonschema package; and they allow what such models write."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from grammar.vocabulary import CONTROL, EOS, VOCABULARY, guide, mask

from fourfold.answers.answer import AnswerFormat, AnswerParser, Expected
from fourfold.answers.detect import format_of
from fourfold.answers.forcing import Forcible, forcible_format, optional, required
from fourfold.answers.parts import Answer
from fourfold.grammar.guide import Guide

from .recorded import FAMILIES, SCENES, TOOLS

FORMATS = ("pythonic", "qwen3_coder", "glm45")
RICH: dict[str, Any] = {
    "type": "object",
    "$defs": {
        "unit": {"enum": ["C", "F"]},
        "pair": {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
    },
    "properties": {
        "text": {"type": "string"},
        "short": {"type": "string", "minLength": 1, "maxLength": 3},
        "zip": {"type": "string", "pattern": r"^\d{2}-[a-c]+$"},
        "unit": {"type": "string", "enum": ["C", "F", "degrees of Réaumur"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
        "sure": {"type": "boolean"},
        "nothing": {"type": "null"},
        "perhaps": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        "either": {"type": ["number", "string"]},
        "any": {},
        "where": {"$ref": "#/$defs/pair"},
        "deep": {"type": "object", "properties": {"u": {"$ref": "#/$defs/unit"}}, "required": ["u"],
                 "additionalProperties": False},
    },
    "required": ["days", "unit"],
    "additionalProperties": False,
}  # fmt: skip
ENDS = ("</parameter>", "\n</parameter>", "</arg_value>", "</function>", "</tool_call>", '"', ")", "]")


def no_token(_: str) -> int | None:
    return None


def one_token(text: str) -> int | None:
    """As if the end of a value were one control token."""
    return CONTROL if text in ("</parameter>", "</arg_value>") else None


def tool(name: str, schema: Any, strict: bool = True) -> Forcible:
    return Forcible(name, schema, strict)


def drawn(following: Guide, rng: random.Random, most: int = 900) -> str | None:
    """A finished answer at random: any token that may come, and now and then what would end a value."""
    answer: list[int] = []
    while not following.finished and len(answer) < most:
        allowed = mask(following)
        if allowed[EOS] and rng.random() < 0.5:
            break
        wanted = VOCABULARY.encode(rng.choice(ENDS)) if rng.random() < 0.4 else []
        if not (wanted and allowed[wanted[0]]):
            printable = [int(one) for one in np.flatnonzero(allowed) if one not in (EOS,) and one < 128]
            some = printable or [int(one) for one in np.flatnonzero(allowed) if one != EOS]
            wanted = [rng.choice(some)]
        for token in wanted:
            if not mask(following)[token] or token == EOS:
                break
            following.accept(token)
            answer.append(token)
    if not mask(following)[EOS]:
        return None
    texts = ["</parameter>" if one == CONTROL else VOCABULARY.token_bytes(one) for one in answer]
    return b"".join(t.encode() if isinstance(t, str) else t for t in texts).decode("utf-8", "replace")


def read(format: AnswerFormat, text: str, tools: dict[str, Any]) -> Answer:
    parser, answer = AnswerParser(Expected(format, tools)), Answer()
    for part in (*parser.push(text), *parser.finish()):
        answer.add(part)
    return answer


@pytest.mark.parametrize(
    ("parser", "token_of"), [*((each, no_token) for each in FORMATS), ("qwen3_coder", one_token)]
)
def test_whatever_is_drawn_is_valid(parser: str, token_of: Any) -> None:
    format = format_of("", parser)
    tools = [tool("rich", RICH), tool("bare", {}), tool("free", {"properties": {"a": {"type": "string"}}})]
    schemas = {each.name: each.schema for each in tools}
    assert forcible_format(format, tools, token_of) is format
    node = required(format, tools, False, token_of)
    whole = 0
    for seed in range(60):
        following = guide("structural_tag", {"type": "structural_tag", "format": node})
        text = drawn(following, random.Random(seed))
        if text is None:
            continue
        whole += 1
        answer = read(format, text, schemas)
        assert not answer.content, text
        (call,) = answer.calls
        assert call.ended, text
        jsonschema.validate(json.loads(call.arguments), schemas[call.name])
    assert whole > 20


def fits(node: Any, text: str) -> bool:
    following = guide("structural_tag", {"type": "structural_tag", "format": node})
    for token in VOCABULARY.encode(text):
        if not mask(following)[token]:
            return False
        following.accept(token)
    return bool(mask(following)[EOS])


@pytest.mark.parametrize(
    "family", [name for name, each in FAMILIES.items() if each.tools in (*FORMATS, "llama4_pythonic")]
)
def test_what_such_models_write_is_allowed(family: str) -> None:
    """Everything but parameters that no schema declares, and Python's spelling of what is not a literal of
    JSON within arrays and objects."""
    written = FAMILIES[family]
    tools = [tool(name, schema, False) for name, schema in TOOLS.items()]
    node = optional(written.format, tools, True, no_token)
    assert node is not None
    seen = 0
    for scene in SCENES:
        if scene.reasoning or not written.fits(scene):
            continue
        text = scene.before + "\n\n" * bool(scene.before and scene.calls)
        text += written.write(scene.calls) if scene.calls else ""
        if written.tools != "llama4_pythonic" or "'" not in text:
            assert fits(node, text), text
            seen += 1
    assert seen >= 3


@pytest.mark.parametrize(
    ("parser", "begin"),
    [("pythonic", "["), ("qwen3_coder", "Let me see. <tool_call>\n<function="), ("qwen3_coder", "<function="),
     ("glm45", "Well\n<tool_call>")],
)  # fmt: skip
def test_free_until_a_call_begins(parser: str, begin: str) -> None:
    node = optional(format_of("", parser), [tool("add", TOOLS["add"])], True, no_token)
    assert node is not None
    for text in ("", "No call: a[0] < b.", " well [add(a=1)] is a call"):
        assert fits(node, text)
    following = guide("structural_tag", {"type": "structural_tag", "format": node})
    for token in VOCABULARY.encode(begin):
        assert mask(following)[token]
        following.accept(token)
    allowed = np.flatnonzero(mask(following))
    assert [chr(token) for token in allowed] == ["a"], "only the declared tool's name may come"


@pytest.mark.parametrize(
    "limited",
    [
        {"type": "string", "format": "date"},
        {"type": "string", "pattern": "a|b"},
        {"type": "string", "maxLength": 9999},
        {"type": ["string", "null"], "maxLength": 3},
        {"type": "string", "enum": ["\n"]},
        {"$ref": "#/properties/a"},
    ],
)
def test_what_no_grammar_says_is_left_to_hermes(limited: Any) -> None:
    schema = {"type": "object", "properties": {"a": limited}, "required": ["a"]}
    for parser in ("qwen3_coder", "glm45"):
        format = format_of("", parser)
        assert optional(format, [tool("f", schema)], True, no_token) is None
        instead = forcible_format(format, [tool("f", schema)], no_token)
        assert instead.tools is not None
        assert instead.tools.name == "hermes"


def test_a_name_that_python_has_no_way_to_write() -> None:
    for schema in ({"properties": {"a-b": {}}}, {"properties": {"a": {}}, "minProperties": 1}):
        assert optional(format_of("", "pythonic"), [tool("f", schema)], True, no_token) is None
    assert optional(format_of("", "pythonic"), [tool("f:g", {})], True, no_token) is None
