"""minProperties in a grammar, against what it means."""

from __future__ import annotations

import itertools
from typing import Any

import jsonschema
import pytest

from fourfold.grammar.schema.counts import without_min_properties
from fourfold.grammar.sources import make_constraint

from .vocabulary import accepts, guide, takes

FEW: list[dict[str, Any]] = [
    {"properties": {"a": True, "b": True, "c": True}, "minProperties": 1},
    {"properties": {"a": True, "b": True, "c": True}, "required": ["b"], "minProperties": 2},
    {"patternProperties": {"^[a-c]$": True}, "minProperties": 2},
    {"patternProperties": {"^(a|b)$": True}, "properties": {"c": False}, "minProperties": 2},
    {"patternProperties": {"^(?:c)$": True, "^b$": True}, "properties": {"a": True}, "minProperties": 3},
]


@pytest.mark.parametrize("schema", FEW)
def test_a_few_names(schema: dict[str, Any]) -> None:
    """Exactly the same, and by grammar: every set of names, in the order that the grammar has."""
    schema = {"type": "object", "additionalProperties": False, **schema}
    assert make_constraint("json", schema, "f").guarantee == "grammar"
    rewritten = without_min_properties(schema)
    assert "minProperties" not in rewritten
    order = list(rewritten["properties"])
    for count in range(4):
        for names in itertools.combinations(order, count):
            value = dict.fromkeys(names, 1)
            valid = jsonschema.Draft202012Validator(schema).is_valid(value)
            assert takes(schema, value) is valid, value
            assert jsonschema.Draft202012Validator(rewritten).is_valid(value) is valid


def test_a_name_written_twice_counts_once() -> None:
    schema = {"type": "object", "minProperties": 2}
    assert make_constraint("json", schema, "f").unsaid == ("#: minProperties",)
    assert takes(schema, {"x": 1, "y": 2})
    assert not takes(schema, {"x": 1})
    assert not accepts(guide("json", schema), '{"x": 1, "x": 2}')
    assert make_constraint("json", {"type": "object", "minProperties": 1}, "f").guarantee == "grammar"


@pytest.mark.parametrize(
    "schema",
    [
        {"minProperties": 2},
        {"minProperties": 1, "additionalProperties": False, "patternProperties": {"^x": True}},
        {"minProperties": 2, "additionalProperties": False, "properties": {"a": True}},
        {"minProperties": 9, "additionalProperties": False, "properties": dict.fromkeys("abcdefghijk", True)},
        {
            "minProperties": 1, "additionalProperties": False,
            "properties": {"a": {}}, "patternProperties": {"^a$": {}},
        },
    ],
)  # fmt: skip
def test_what_is_left_as_it_is(schema: dict[str, Any]) -> None:
    assert without_min_properties(schema) is schema
