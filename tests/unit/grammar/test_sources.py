from __future__ import annotations

import time
from typing import Any

import pytest

from fourfold.errors import InvalidRequestError
from fourfold.grammar.schema.relax import relax
from fourfold.grammar.sources import Kind, _json_complaint, make_constraint

from .vocabulary import accepts, guide, mask


@pytest.mark.parametrize(
    ("kind", "content", "named"),
    [
        ("regex", "foo**", "character 4: multiple repeat"),  # B49
        ("regex", "a[bc", "unterminated character set"),
        ("regex", "(ab", "missing )"),
        ("regex", "(?=a)b", "look-around"),
        ("regex", r"(a)\1", "backreferences"),
        ("json", {"type": "str"}, "at #/type: 'str' is not a type"),
        ("json", {"properties": {"a": {"items": {"type": "str"}}}}, "#/properties/a/items/type"),
        ("json", {"properties": {"a/b": {"pattern": "(x"}}}, "#/properties/a~1b/pattern"),
        ("json", "{", "not valid JSON"),
        ("json", 7, "must be an object, true or false"),
        ("json", {"anyOf": []}, "#/anyOf"),
        ("json", {"items": 7}, "#/items"),
        ("json", {"properties": []}, "#/properties"),
        ("json", {"minItems": -1}, "#/minItems"),
        ("json", {"maximum": "9"}, "#/maximum"),
        ("json", {"multipleOf": 0}, "#/multipleOf"),
        ("json", {"required": [1]}, "#/required"),
        ("json", {"$ref": "/$defs/X", "$defs": {"X": {}}}, "#/$ref"),  # B53
        ("json", {"$ref": "http://127.0.0.1:1/x.json"}, "never fetched"),
        ("json", {"$ref": "other.json"}, "#/$ref"),
        ("json", {"$ref": "#/$defs/Y", "$defs": {"X": {}}}, "'#/$defs/Y' names nothing"),
        ("json", {"$ref": 5}, "#/$ref"),
        ("lark", "not a grammar", "Expected"),
        ("lark", "start: missing", "missing"),
        ("gbnf", "root ::= (", "Expected ')'"),
        ("gbnf", "other", "Expected ::="),
        ("choice", [], "at least one"),
        ("choice", ["a", ""], "none of them empty"),
        ("choice", {"a": 1}, "a list"),
    ],
)
def test_bad_constraints_say_what_and_where(kind: Kind, content: Any, named: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        make_constraint(kind, content, "some_field")
    assert named in str(caught.value)
    assert str(caught.value).startswith("some_field: ")
    assert caught.value.param == "some_field"


def deep(levels: int) -> Any:
    schema: Any = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("kind", "content", "named"),
    [
        ("json", {"description": "x" * 10_000_000}, "limit is 1048576"),
        ("json", {"enum": list(range(100_000))}, "100000 values, the limit is 20000"),
        ("json", {"enum": list(range(1_000_000))}, "limit"),
        ("json", deep(150), "levels deep"),
        ("json", "[" * 100_000, "JSON"),
        ("json", {"anyOf": [{"type": "null"}] * 60_000}, "50000 subschemas"),
        ("json", {"minItems": 10**9}, "#/minItems"),
        ("choice", [str(n) for n in range(10_001)], "limit is 10000"),
        ("regex", "a" * 20_000, "limit of 16384"),
    ],
)
def test_hostile_constraints_end_soon(kind: Kind, content: Any, named: str) -> None:
    """On a core that is shared, too; those that are large are checked in a process of their own."""
    started = time.process_time()
    with pytest.raises(InvalidRequestError, match=named):
        make_constraint(kind, content, "f")
    assert time.process_time() - started < 4


def test_what_is_too_large_is_not_tried_again() -> None:
    """No schema that says the same is smaller, and each attempt goes through all of it."""
    objects = {f"p{n}": {"type": "object", "properties": {"a": {"type": "string"}}} for n in range(10_000)}
    tried = []

    def compile(schema: Any) -> str:
        tried.append(schema)
        return _json_complaint(schema)

    with pytest.raises(InvalidRequestError, match=r"has 20001 subschemas.*about 16600"):
        relax({"type": "object", "properties": objects}, compile)
    assert len(tried) == 1


@pytest.mark.parametrize("pattern", ["(((a{1,100}){1,100}){1,100}){1,100}", "(a|aa|a?)*b", "(.*)*(.*)*x"])
def test_no_regex_is_catastrophic(pattern: str) -> None:
    started = time.process_time()
    following = guide("regex", pattern)
    for _ in range(300):
        mask(following)
        following.accept(ord("a"))
    assert time.process_time() - started < 3


@pytest.mark.parametrize("choice", ["yes", "no", 'a "quoted"\nline', "日本"])
def test_choices(choice: str) -> None:
    assert accepts(guide("choice", ["yes", "no", 'a "quoted"\nline', "日本"]), choice)
    assert not accepts(guide("choice", ["yes", "no"]), choice + "x")
    assert not accepts(guide("choice", ["yes", "no"]), "y")


def test_regex_is_matched_whole() -> None:
    assert accepts(guide("regex", r"[ab]+\d"), "abba7")
    assert not accepts(guide("regex", r"[ab]+\d"), "abba7x")
    assert not accepts(guide("regex", r"[ab]+\d"), "abba")


LARK = """
start: "(" /[0-9]+/ ")" | "none"
"""
GBNF = r"""
root  ::= expr ("," expr)*   # a comment
expr  ::= [a-z]+ | "(" root ")" | "\x41" | [^\n0-9a-zA-Z(),]{2,3}
"""


def test_lark() -> None:
    assert accepts(guide("lark", LARK), "(12)")
    assert not accepts(guide("lark", LARK), "(x)")


@pytest.mark.parametrize("kind", ["gbnf", "lark"])
def test_gbnf_under_both_names(kind: Kind) -> None:
    """vLLM's and SGLang's EBNF fields are given GBNF as often as Lark."""
    for text in ("ab,(c,d)", "A", "++", "---"):
        assert accepts(guide(kind, GBNF), text)
    for text in ("", "ab,", "B", "+", "++++", "1"):
        assert not accepts(guide(kind, GBNF), text)


def test_json_object_is_an_object() -> None:
    assert accepts(guide("json_object", ""), '{"a": [1, {"b": null}]}')
    assert not accepts(guide("json_object", ""), "[1]")
    assert not accepts(guide("json_object", ""), '{"a": 1} x')


def test_what_only_validation_guarantees_is_named() -> None:
    plain = make_constraint("json", {"type": "array", "items": {"type": "integer"}}, "f")
    assert (plain.guarantee, plain.schema, plain.unsaid) == ("grammar", None, ())
    unique = make_constraint("json", {"properties": {"a": {"uniqueItems": True}}}, "f")
    assert unique.guarantee == "validation"
    assert unique.unsaid == ("#/properties/a: uniqueItems",)
