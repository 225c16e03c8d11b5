"""Schemas as a whole: the rows of the bug list, and the labelled collection if it is there."""

from __future__ import annotations

import csv
import json
import time
from pathlib import Path
from typing import Any

import pytest

from fourfold.errors import InvalidRequestError
from fourfold.grammar.schema.adopt import adopt
from fourfold.grammar.schema.refs import References
from fourfold.grammar.schema.walk import children
from fourfold.grammar.sources import make_constraint

from .vocabulary import CONTROL, EOS, SHARED, VOCABULARY, WITHOUT_TOKEN, accepts, guide, mask, takes

COLLECTION = Path(__file__).parents[4] / "shared" / "data" / "schemas"


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [(r"\S", "a b", "  "), (r"^\d+$", "123", "12a"), (r"^[\w-]+$", "a-b_9", "a b"), ("b", "abc", "ac")],
)
@pytest.mark.parametrize("nested", [False, True])
def test_patterns(pattern: str, good: str, bad: str, nested: bool) -> None:
    """B51: unanchored means "contains", shorthand classes work, nesting changes nothing."""
    schema: Any = {"type": "string", "pattern": pattern}
    wrap = (lambda value: {"a": {"b": value}}) if nested else (lambda value: value)
    if nested:
        inner = {"type": "object", "properties": {"b": schema}}
        schema = {"type": "object", "properties": {"a": inner}}
    assert takes(schema, wrap(good))
    assert not takes(schema, wrap(bad))


def test_a_pattern_property_that_is_also_a_property() -> None:
    """B52."""
    schema = {
        "type": "object", "properties": {"name": {"type": "string"}, "grade": {"type": "integer"}},
        "required": ["name", "grade"], "patternProperties": {"^grade$": {"minimum": 0}},
        "additionalProperties": False,
    }  # fmt: skip
    assert takes(schema, {"name": "x", "grade": 3})
    assert not takes(schema, {"name": "x", "grade": -3})
    assert not accepts(guide("json", schema), '{"name": "x", "grade": 3}, "y": 1')
    assert takes({"type": "object", "propertyNames": {"pattern": ".*"}}, {"a": 1})
    assert not takes({"type": "object", "propertyNames": {"pattern": "^a"}}, {"b": 1})


def test_references() -> None:
    """B54."""
    schema = {
        "type": "object",
        "properties": {"a": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                       "b": {"$ref": "#/properties/a"}, "c": {"$ref": "#/properties/a/anyOf/1"}},
        "additionalProperties": False,
    }  # fmt: skip
    assert takes(schema, {"a": 1, "b": None, "c": None})
    assert not takes(schema, {"a": 1, "b": None, "c": 1})
    tree = {
        "type": "object",
        "properties": {"v": {"type": "integer"}, "kids": {"type": "array", "items": {"$ref": "#"}}},
        "required": ["v"], "additionalProperties": False,
    }  # fmt: skip
    value: Any = {"v": 0}
    for level in range(30):
        value = {"v": level, "kids": [value]}
    assert takes(tree, value)
    assert not takes(tree, {"v": 1, "kids": [{"w": 1}]})


def test_schemas_under_unknown_keywords() -> None:
    """OpenAPI keeps them in components/schemas. They are checked and rewritten like any other."""
    schema = {
        "$ref": "#/components/schemas/Pet",
        "components": {"schemas": {
            "Pet": {"type": "object", "properties": {"kind": {"$ref": "#/components/schemas/Kind"}},
                    "required": ["kind"], "additionalProperties": False},
            "Kind": {"enum": ["cat", "dog", "rat"], "not": {"const": "rat"}},
        }},
    }  # fmt: skip
    assert make_constraint("json", schema, "f").guarantee == "grammar"
    assert takes(schema, {"kind": "dog"})
    assert not takes(schema, {"kind": "rat"})
    schema["components"]["schemas"]["Kind"] = {"type": "str"}  # type: ignore[index]
    with pytest.raises(InvalidRequestError, match="'str' is not a type"):
        make_constraint("json", schema, "f")


def test_a_reference_below_an_id_is_left_alone() -> None:
    schema = {
        "properties": {"a": {"$id": "http://x/a", "$ref": "#/defs/n", "defs": {"n": {"type": "null"}}}},
        "defs": {"n": {"type": "integer"}}, "type": "object",
    }  # fmt: skip
    assert adopt(schema) is schema


def test_strings_hold_no_control_characters_and_no_special_tokens() -> None:
    """B57."""
    free = guide("json", {"type": "string"})
    free.accept(ord('"'))
    allowed = mask(free)
    assert not allowed[:0x20].any()
    assert allowed[0x20:0x7F].all()
    assert not allowed[[EOS, CONTROL, WITHOUT_TOKEN]].any()
    assert not allowed[WITHOUT_TOKEN:].any()


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "array", "items": {"type": "number"}, "minItems": 10, "maxItems": 1000}, [1.5] * 500),
        ({"type": "object", "properties": {"s": {"type": "string", "maxLength": 8192}}}, {"s": "x" * 2000}),
        ({"enum": [f"value number {n}" for n in range(5000)]}, "value number 4321"),
    ],
)
def test_large_counts(schema: Any, value: Any) -> None:
    """B58: less than 0.1 s to compile, masks stay fast."""
    started = time.process_time()
    constraint = make_constraint("json", schema, "f")
    following = SHARED.compile(constraint, "")
    assert time.process_time() - started < 2
    ids = VOCABULARY.encode(json.dumps(value))
    started = time.process_time()
    for id in ids:
        assert mask(following)[id]
        following.accept(id)
    assert (time.process_time() - started) / len(ids) < 0.003
    assert mask(following)[EOS]


def test_no_room_for_endless_space() -> None:
    """B59: one space after a comma or colon, and none elsewhere."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    following = guide("json", schema)
    for id in VOCABULARY.encode('{"a":'):
        assert not mask(following)[ord("\n")]
        following.accept(id)
    following.accept(ord(" "))
    assert not mask(following)[ord(" ")]


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "array", "uniqueItems": True}, [1, 2], [1, 1]),
        ({"type": "array", "contains": {"const": 1}, "maxContains": 1}, [2, 1], [1, 1]),
        ({"type": "array", "contains": True}, [1], []),
        ({"if": True, "then": {"type": "string", "pattern": "^(?!a)"}, "else": {"const": 1}}, "ba", "ab"),
        ({"if": {}, "then": {"minLength": 1, "type": "string"}}, "b", 3),
        ({"anyOf": [{"type": "string", "not": True}, {"type": "null"}]}, None, "a"),
        ({"type": "string", "pattern": "^(?!a)"}, "ba", "ab"),
        ({"type": "integer", "not": {"const": 3}}, 4, 3),
        ({"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 2}]}, 1, 2),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, {"a": 1, "b": 1}, {"a": 1}),
        ({"if": {"type": "string"}, "then": {"maxLength": 1}, "else": {"type": "null"}}, "a", "ab"),
        ({"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False}, {"a": 1}, {"b": 1}),
    ],
)
def test_keywords_beyond_the_grammar(schema: Any, good: Any, bad: Any) -> None:
    assert takes(schema, good)
    assert not takes(schema, bad)


def schemas() -> list[Path]:
    return sorted((COLLECTION / "dev").glob("*.json"))


def doubtful() -> set[tuple[str, int]]:
    """Instances whose label says one thing and the jsonschema package another."""
    with (COLLECTION / "LABELCHECK.tsv").open() as file:
        return {(Path(row["file"]).name, int(row["test"])) for row in csv.DictReader(file, delimiter="\t")}


OTHERS = ("patternProperties", "additionalProperties")


def in_schema_order(schema: Any, value: Any) -> Any:
    """`value` with its properties in the order in which the schema names them: the order answers have."""
    references = References(schema)

    def in_place(nodes: list[Any]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        while nodes:
            node = nodes.pop(0)
            if isinstance(node, dict) and not any(node is one for one in found):
                found.append(node)
                below = [each for key in ("allOf", "anyOf", "oneOf") for each in node.get(key, ())]
                nodes[:0] = [references.target(node, node["$ref"]), *below] if "$ref" in node else below
        return found

    def sort(nodes: list[Any], item: Any) -> Any:
        views = in_place(nodes)
        if isinstance(item, dict):
            names: list[str] = []
            for view in views:
                after = len(names)
                for name in reversed(view.get("properties", ())):
                    if name not in names:
                        names.insert(after, name)
                    after = names.index(name)
            rank = {name: place for place, name in enumerate(names)}
            below = [each for view in views for path, each in children(view) if path[0] in OTHERS]
            return {
                name: sort([view["properties"][name] for view in views if name in view.get("properties", ())]
                           if name in rank else below.copy(), item[name])
                for name in sorted(item, key=lambda name: rank.get(name, len(rank)))
            }  # fmt: skip
        if isinstance(item, list):
            items = [each for view in views for path, each in children(view) if path[0] == "items"]
            return [sort(items.copy(), each) for each in item]
        return item

    return sort([schema], value)


def canonical_numbers(value: Any) -> Any:
    """0.0 as 0: a const is generated in one spelling."""
    if isinstance(value, dict):
        return {name: canonical_numbers(each) for name, each in value.items()}
    if isinstance(value, list):
        return [canonical_numbers(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


@pytest.mark.skipif(not COLLECTION.is_dir(), reason="the collection of schemas is not beside the checkout")
def test_the_labelled_collection() -> None:
    unsure = doubtful()
    refused, wrong = [], []
    paths = schemas()
    for path in paths:
        document = json.loads(path.read_text())
        schema = document["schema"]
        try:
            constraint = make_constraint("json", schema, "f")
        except InvalidRequestError:
            refused.append(path.name)
            continue
        for index, test in enumerate(document["tests"]):
            given = test["data"]
            spellings = [given, in_schema_order(schema, given), canonical_numbers(given)]
            taken = any(
                accepts(SHARED.compile(constraint, ""), json.dumps(one, ensure_ascii=False))
                for one in spellings
            )
            if taken != test["valid"] and (path.name, index) not in unsure:
                wrong.append((path.name, index, test["valid"]))
    assert len(paths) == 161
    assert len(refused) <= 8, refused
    assert not wrong, wrong
