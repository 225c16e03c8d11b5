"""allOf of references as one schema: the same values, by the jsonschema package; and what it is for."""

from __future__ import annotations

from typing import Any

import jsonschema
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.grammar.schema.product import MAX_PRODUCTS, merge_references
from fourfold.grammar.sources import make_constraint

from .counting import all_of, counter, nested
from .vocabulary import takes

DEFINITIONS = 4
references = st.integers(0, DEFINITIONS - 1).map(lambda n: {"$ref": f"#/$defs/d{n}"})
small = st.integers(0, 2)
leaves = st.sampled_from([True, False, {"type": "string"}, {"type": ["object", "number"], "maximum": 3}])


@st.composite
def definitions(draw: st.DrawFn) -> dict[str, Any]:
    below = references | leaves
    keywords: dict[str, st.SearchStrategy[Any]] = {
        "type": st.sampled_from(["object", ["object", "array"], ["object", "null", "string"]]),
        "properties": st.dictionaries(st.sampled_from("ab"), below, max_size=2),
        "additionalProperties": below,
        "required": st.lists(st.sampled_from("ab"), unique=True, max_size=1),
        "minProperties": small,
        "maxProperties": small,
        "items": below,
        "minItems": small,
        "maxLength": small,
        "title": st.just("no matter"),
        "not": st.just({"required": ["b"]}),
    }
    chosen = draw(st.sets(st.sampled_from(sorted(keywords)), max_size=4))
    found = {key: draw(keywords[key]) for key in sorted(chosen)}
    if draw(st.booleans()):
        found["allOf"] = draw(st.lists(references | leaves.filter(lambda one: one is not False), min_size=1))
    return found


values = st.recursive(
    st.none() | st.integers(0, 5) | st.text("x", max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)


def valid(schema: Any, value: Any) -> bool | None:
    try:
        return bool(jsonschema.Draft202012Validator(schema).is_valid(value))
    except RecursionError:  # {"$ref": ...} that comes back to itself says nothing
        return None


@settings(max_examples=300, deadline=None)
@given(
    st.lists(definitions(), min_size=DEFINITIONS, max_size=DEFINITIONS),
    st.lists(references, min_size=2, max_size=3),
    st.lists(values, min_size=5, max_size=5),
)
def test_the_same_values(given: list[Any], branches: list[Any], instances: list[Any]) -> None:
    schema = {"allOf": branches, "$defs": {f"d{n}": one for n, one in enumerate(given)}}
    merged = merge_references(schema)
    for value in instances:
        expected = valid(schema, value)
        assert expected is None or valid(merged, value) is expected, merged


def test_deep_intersections_are_said_by_the_grammar() -> None:
    """Of the kind that llguidance refuses, and that was left to validation as a whole: 2 * 3 * 5 states."""
    schema = all_of("x0", "y0", "z0", **counter("x", 2, 1), **counter("y", 3, 1), **counter("z", 5, 4))
    assert make_constraint("json", schema, "f").guarantee == "grammar"
    # 19 is 1 modulo 2 and 3 and 4 modulo 5; so is 49.
    assert [depth for depth in range(55) if takes(schema, nested(depth))] == [19, 49]


def test_too_many_combinations_are_left_alone() -> None:
    primes = (2, 3, 5, 7, 11)
    schema: dict[str, Any] = {"allOf": [{"$ref": f"#/$defs/p{prime}x0"} for prime in primes], "$defs": {}}
    for prime in primes:
        schema["$defs"] |= counter(f"p{prime}x", prime, 0)
    assert MAX_PRODUCTS < 2 * 3 * 5 * 7 * 11
    assert merge_references(schema) is schema
    assert "#: allOf" in make_constraint("json", schema, "f").unsaid


def test_one_branch_says_something_when_all_cannot() -> None:
    """What is validated at the end only is begun, at least, as the branch with the fewest types says."""
    schema = {
        "allOf": [
            {"minLength": 1}, {"$ref": "#/$defs/letters"},
            {"pattern": "^z9((.){10,10}){10,10}z9$"}, {"pattern": "^..((c1d3g3).{4,8}){6,6}"},
            {"pattern": "(t|8){10,10}..$"},
        ],
        "$defs": {"letters": {"type": "string", "pattern": "^([a-z][0-9])+$"}},
    }  # fmt: skip
    constraint = make_constraint("json", schema, "f")
    assert constraint.unsaid == ("#: allOf",)
    assert '"allOf":[{"$ref":"#/$defs/letters"}]' in constraint.grammar.replace(" ", "")
