"""Answers drawn at random under random schemas: what is finished, and not refused by validation, is valid by
the jsonschema package."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.errors import InvalidRequestError
from fourfold.grammar.guide import Guide
from fourfold.grammar.sources import make_constraint

from .vocabulary import EOS, SHARED, VOCABULARY, mask

VALUES = [1, 2, "a", "b", None, True, 1.5, [1], {"a": 1}, "", 0, False, [1, 2], {"k": []}, 1.0, -0.5]
DEFINITIONS = {
    "some": {"type": ["integer", "string"], "maxLength": 2},
    "list": {
        "type": "object", "properties": {"next": {"$ref": "#/$defs/list"}, "v": {"type": "null"}},
        "required": ["v"],
    },
}  # fmt: skip


class Maker:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def perhaps(self, chance: float, **keywords: Callable[[], Any]) -> dict[str, Any]:
        return {name: make() for name, make in keywords.items() if self.rng.random() < chance}

    def schema(self, depth: int) -> Any:
        kinds = [self.number, self.string, self.values, self.types, lambda depth: self.rng.choice([True, {}])]
        if depth > 0:
            kinds += [self.object, self.array, self.combined, self.object]
        return self.rng.choice(kinds)(depth)

    def number(self, depth: int) -> Any:
        bound = lambda: self.rng.choice([-3, 0, 1, 2.5, 7, 99.99])  # noqa: E731
        bounds = self.perhaps(
            0.3, minimum=bound, maximum=bound, exclusiveMinimum=bound, exclusiveMaximum=bound,
            multipleOf=lambda: self.rng.choice([2, 3, 0.5]),
        )  # fmt: skip
        return {"type": self.rng.choice(["integer", "number"]), **bounds}

    def string(self, depth: int) -> Any:
        patterns = ["^a", "b$", "^[a-c]+$", "x|y", r"^\d{2}$", r"\S", "^(?:ab)*$", "^a.c$", "^(?!a)"]
        lengths = self.perhaps(
            0.3, minLength=lambda: self.rng.randint(0, 3), maxLength=lambda: self.rng.randint(1, 6),
            pattern=lambda: self.rng.choice(patterns),
        )  # fmt: skip
        return {"type": "string", **lengths}

    def values(self, depth: int) -> Any:
        if self.rng.random() < 0.3:
            return {"$ref": f"#/$defs/{self.rng.choice(sorted(DEFINITIONS))}"}
        return {"enum": self.rng.sample(VALUES, self.rng.randint(1, 4))}

    def types(self, depth: int) -> Any:
        kinds = ["integer", "string", "null", "boolean", "array", "object", "number"]
        few = lambda: self.rng.randint(0, 2)  # noqa: E731
        return {"type": self.rng.sample(kinds, 2)} | self.perhaps(
            0.3, minLength=few, maximum=few, maxItems=few
        )

    def object(self, depth: int) -> Any:
        names = self.rng.sample(["a", "b", "c", "d e", '"q'], self.rng.randint(0, 3))
        inner = lambda: self.schema(depth - 1)  # noqa: E731
        keywords = self.perhaps(
            0.3,
            required=lambda: self.rng.sample(["a", "b", "z"], self.rng.randint(0, 2)),
            patternProperties=lambda: {self.rng.choice(["^x", "^[ab]", "c$"]): inner()},
            minProperties=lambda: self.rng.randint(0, 2),
            maxProperties=lambda: self.rng.randint(1, 3),
            propertyNames=lambda: {"maxLength": 2},
            dependentRequired=lambda: {"a": ["b"]},
            additionalProperties=lambda: self.rng.choice([False, inner()]),
        )
        return {"type": "object", "properties": {name: inner() for name in names}, **keywords}

    def array(self, depth: int) -> Any:
        inner = lambda: self.schema(depth - 1)  # noqa: E731
        few = lambda: self.rng.randint(0, 3)  # noqa: E731
        keywords = self.perhaps(
            0.35, items=inner, prefixItems=lambda: [inner()], minItems=few, maxItems=few, contains=inner,
            uniqueItems=lambda: True,
        )  # fmt: skip
        return {"type": "array", **keywords}

    def combined(self, depth: int) -> Any:
        inner = lambda: self.schema(depth - 1)  # noqa: E731
        base = inner() if self.rng.random() < 0.4 else {}
        kind = self.rng.choice(["allOf", "anyOf", "oneOf", "not", "if"])
        if kind == "not":
            more: dict[str, Any] = {"not": inner()}
        elif kind == "if":
            more = {"if": inner(), "then": inner(), "else": inner()}
        else:
            more = {kind: [inner() for _ in range(self.rng.randint(1, 3))]}
        return {**(base if isinstance(base, dict) else {}), **more}


def drawn(following: Guide, rng: random.Random, most: int = 150) -> list[int] | None:
    """Tokens of a finished answer, biased to what closes something; None if it does not end."""
    answer: list[int] = []
    while not following.finished and len(answer) < most:
        allowed = mask(following)
        if following.error is not None:
            return None
        if allowed[EOS] and rng.random() < 0.6:
            break
        tokens = [int(token) for token in np.flatnonzero(allowed) if token != EOS]
        tokens = [token for token in tokens if token < 127 or token >= 256] or tokens
        if not tokens:
            break
        closing = [token for token in tokens if VOCABULARY.token_bytes(token)[:1] in b'"}],']
        token = rng.choice(closing if closing and rng.random() < 0.5 else tokens)
        following.accept(token)
        answer.append(token)
    return answer if following.finished or mask(following)[EOS] else None


@settings(max_examples=250, deadline=None)
@given(st.integers(0, 2**32))
def test_whatever_is_drawn_is_valid(seed: int) -> None:
    schema = Maker(seed).schema(3)
    if not isinstance(schema, dict):
        return
    schema = {**schema, "$defs": DEFINITIONS}
    try:
        constraint = make_constraint("json", schema, "f")
        SHARED.compile(constraint, "")
    except InvalidRequestError:
        return  # said, not served
    for draw in range(3):
        following = SHARED.compile(constraint, "")
        answer = drawn(following, random.Random(seed + draw))
        if answer is None or following.check(answer) is not None:
            continue
        text = b"".join(VOCABULARY.token_bytes(token) for token in answer).decode("utf-8", "replace")
        try:
            jsonschema.Draft202012Validator(schema).validate(json.loads(text))
        except jsonschema.ValidationError as error:
            pytest.fail(f"{constraint.guarantee} let {text} through {json.dumps(schema)}: {error.message}")
