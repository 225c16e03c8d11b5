"""Our validator against the jsonschema package, and its budget."""

from __future__ import annotations

import json
import time
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.grammar.schema.exact import rewrite
from fourfold.grammar.schema.spans import finished_part, growing, span_of
from fourfold.grammar.schema.validate import TooCostlyError, Validator, equal

VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 4) | st.sampled_from([0.0, 1.0, 1.5, "", "a", "ab", "b1"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)
SMALL = st.integers(0, 3)
NAMES = st.lists(st.sampled_from("abc"), max_size=2, unique=True)
TYPE = st.sampled_from(["string", "number", "integer", "object", "array", "boolean", "null"])


def keywords(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    several = st.lists(inner, min_size=1, max_size=3)
    by_name = st.dictionaries(st.sampled_from("abc"), inner, max_size=2)
    choices: dict[str, st.SearchStrategy[Any]] = {
        "type": TYPE | st.lists(TYPE, min_size=1, max_size=2, unique=True),
        "enum": st.lists(VALUES, min_size=1, max_size=3), "const": VALUES,
        "minimum": SMALL, "maximum": SMALL, "exclusiveMinimum": SMALL, "exclusiveMaximum": SMALL,
        "multipleOf": st.sampled_from([1, 2, 0.5]),
        "minLength": SMALL, "maxLength": SMALL, "minItems": SMALL, "maxItems": SMALL,
        "minProperties": SMALL, "maxProperties": SMALL, "pattern": st.sampled_from(["a", "^a$", r"\d"]),
        "properties": by_name, "additionalProperties": inner, "required": NAMES,
        "patternProperties": st.dictionaries(st.sampled_from(["^a", "b"]), inner, max_size=2),
        "propertyNames": inner, "items": inner, "prefixItems": several, "contains": inner,
        "minContains": SMALL, "maxContains": SMALL, "uniqueItems": st.booleans(),
        "allOf": several, "anyOf": several, "oneOf": several, "not": inner,
        "if": inner, "then": inner, "else": inner,
        "dependentRequired": st.dictionaries(st.sampled_from("abc"), NAMES, max_size=2),
        "dependentSchemas": by_name,
        "unevaluatedProperties": inner, "unevaluatedItems": inner,
    }  # fmt: skip
    pairs = [st.tuples(st.just(name), value) for name, value in choices.items()]
    return st.lists(st.one_of(pairs), min_size=1, max_size=4).map(dict)


SCHEMAS = st.recursive(st.booleans() | st.builds(lambda t: {"type": t}, TYPE), keywords, max_leaves=6)


@settings(max_examples=600, deadline=None)
@given(SCHEMAS, st.lists(VALUES, min_size=3, max_size=6))
def test_it_says_what_jsonschema_says(schema: Any, values: list[Any]) -> None:
    oracle = jsonschema.Draft202012Validator(schema)
    ours = Validator(schema)
    for value in values:
        assert (ours.check(value) is None) == oracle.is_valid(value)


@settings(max_examples=600, deadline=None)
@given(SCHEMAS, st.lists(VALUES, min_size=3, max_size=6))
def test_exact_rewriting_changes_no_verdict(schema: Any, values: list[Any]) -> None:
    before = jsonschema.Draft202012Validator(schema)
    after = jsonschema.Draft202012Validator(rewrite(schema))
    for value in values:
        assert before.is_valid(value) == after.is_valid(value)


@pytest.mark.parametrize(
    ("schema", "gone"),
    [
        ({"type": ["string", "null"], "not": {"type": "null"}}, "not"),
        ({"enum": [1, 2, 3], "not": {"enum": [2]}}, "not"),
        ({"not": {"required": ["a"]}}, "not"),
        ({"type": "number", "not": {"minimum": 3}}, "not"),
        ({"oneOf": [{"type": "string"}, {"type": "number"}]}, "oneOf"),
        ({"oneOf": [{"properties": {"k": {"const": 1}}, "required": ["k"], "type": "object"},
                    {"properties": {"k": {"const": 2}}, "required": ["k"], "type": "object"}]}, "oneOf"),
        ({"dependencies": {"a": ["b"]}}, "dependencies"),
        ({"dependentSchemas": {"a": {"required": ["b"]}}}, "dependentSchemas"),
        ({"if": {"required": ["a"]}, "then": {"required": ["b"]}, "else": {"maxProperties": 1}}, "if"),
    ],
)  # fmt: skip
def test_what_is_rewritten(schema: Any, gone: str) -> None:
    assert f"'{gone}'" not in str(rewrite(schema))


def test_old_drafts() -> None:
    old = {"$schema": "http://json-schema.org/draft-04/schema#", "minimum": 1, "exclusiveMinimum": True,
           "items": [{"type": "string"}], "additionalItems": {"type": "null"},
           "dependencies": {"a": ["b"], "c": {"required": ["d"]}}}  # fmt: skip
    ours, oracle = Validator(old), jsonschema.Draft4Validator(old)
    for value in (1, 2, ["a", None], [1], ["a", 1], {"a": 1}, {"a": 1, "b": 1}, {"c": 1}, {"c": 1, "d": 1}):
        assert (ours.check(value) is None) == oracle.is_valid(value)
    beside = {"$schema": "http://json-schema.org/draft-07/schema#", "$ref": "#/definitions/x", "type": "null",
              "definitions": {"x": {"type": "string"}}}  # fmt: skip
    assert Validator(beside).check("a") is None


def test_references_by_id_and_anchor() -> None:
    schema = {
        "$id": "http://example.com/root.json",
        "properties": {
            "a": {"$ref": "item.json"}, "b": {"$ref": "#named"}, "c": {"$ref": "item.json#/properties/x"},
        },
        "$defs": {
            "item": {"$id": "item.json", "properties": {"x": {"type": "null"}}},
            "named": {"$anchor": "named", "type": "integer"},
        },
    }  # fmt: skip
    ours, oracle = Validator(schema), jsonschema.Draft202012Validator(schema)
    for value in ({"a": {"x": None}}, {"a": {"x": 1}}, {"b": 1}, {"b": "1"}, {"c": None}, {"c": 1}):
        assert (ours.check(value) is None) == oracle.is_valid(value)


def tripled(n: int) -> Any:
    return {"anyOf": [{"allOf": [{"$ref": f"#/$defs/x{n + 1}"}, False]}] * 3}


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"pattern": "^(([a-z])+.)+[A-Z]([a-z])+$"}, "a" * 5000),
        ({"pattern": "^(?=(a+))(?:a|aa)+(?!a)x$"}, "a" * 100 + "yx"),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"anyOf": [{"$ref": "#/$defs/x"}]}}}, 1),
        ({"$ref": "#/$defs/x0", "$defs": {f"x{n}": tripled(n) for n in range(40)} | {"x40": True}}, 1),
    ],
)  # fmt: skip
def test_hostile_schemas_run_out_of_budget(schema: Any, value: Any) -> None:
    started = time.process_time()
    with pytest.raises(TooCostlyError):
        Validator(schema).check(value)
    assert time.process_time() - started < 1


def test_equality_is_json_s() -> None:
    assert equal(1, 1.0)
    assert equal({"a": [1]}, {"a": [1.0]})
    assert not equal(True, 1)
    assert not equal(0, False)
    assert not equal(None, False)


@given(VALUES, st.sampled_from([None, 2]))
def test_spans(value: Any, indent: int | None) -> None:
    text = " " + json.dumps(value, indent=indent)

    def paths(item: Any, path: tuple[str | int, ...]) -> Any:
        yield path, item
        pairs = item.items() if isinstance(item, dict) else enumerate(item) if isinstance(item, list) else ()
        for key, below in pairs:
            yield from paths(below, (*path, key))

    for path, item in paths(value, ()):
        start, end = span_of(text, path)
        assert equal(json.loads(text[start:end]), item)


@settings(max_examples=400, deadline=None)
@given(SCHEMAS, VALUES, st.sampled_from([None, 1]))
def test_a_beginning_is_refused_only_if_every_end_is(schema: Any, value: Any, indent: int | None) -> None:
    """A valid value is never refused at any place in its text."""
    if not jsonschema.Draft202012Validator(schema).is_valid(value):
        return
    ours = Validator(schema)
    text = json.dumps(value, indent=indent)
    for end in range(len(text) + 1):
        part = finished_part(text[:end])
        if part is None:
            continue
        begun = json.loads("".join(part))
        paths = growing(begun, len(part[1]))
        assert paths is not None
        assert ours.check(begun, paths) is None


def test_what_cannot_be_mended_is_seen_at_once() -> None:
    ours = Validator(
        {"items": {"type": "object", "uniqueItems": True, "required": ["a"]}, "uniqueItems": True}
    )
    part = finished_part('[{"a": 1}, {"a": 1}, {"b": [1, "]')
    assert part == ('[{"a": 1}, {"a": 1}, {"b": [1', "]}]")
    begun = json.loads("".join(part))
    assert growing(begun, 3) == [(), (2,), (2, "b")]
    found = ours.check(begun, [(), (2,), (2, "b")])
    assert found is not None
    assert found.path == (1,)
    assert ours.check([{"a": 1}, {}], [(), (1,)]) is None
    assert ours.check([{"a": 1}, {}], [()]) is not None
