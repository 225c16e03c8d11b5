"""Validation of one JSON value, within a budget: JSON Schema drafts 4 to 2020-12, `format` as an annotation.

A library would do but for two things: its patterns are matched without a limit of time, and a schema with
nested alternatives can keep it busy for hours. Here both end the request instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Any

import msgspec

from fourfold.grammar.schema.patterns import SlowPatternError, found_in
from fourfold.grammar.schema.refs import References
from fourfold.grammar.schema.walk import Path

MAX_STEPS = 100_000
"""Subschemas applied in one validation."""
MAX_SECONDS = 0.1
"""Of processor time, so that a busy machine refuses nothing."""
MAX_DEPTH = 200


class Violation(msgspec.Struct, frozen=True):
    """path: of the value that a keyword refused, in the instance."""

    path: Path
    message: str


class TooCostlyError(Exception):
    """A validation went over its budget."""


_NEED_THE_END = frozenset(
    {"const", "contains", "dependencies", "dependentRequired", "dependentSchemas", "enum", "if", "minItems"}
    | {"minProperties", "not", "required", "unevaluatedItems", "unevaluatedProperties"}
)
"""Keywords whose verdict on an array or object can still change while it grows."""


class Validator:
    """One schema. Raises TooCostlyError from `check` if MAX_STEPS or MAX_SECONDS do not do."""

    def __init__(self, schema: Any) -> None:
        self._schema = schema
        self._references = References(schema)
        self._siblings_of_ref = not _is_old(schema)

    def check(self, instance: Any, unfinished: Collection[Path] = ()) -> Violation | None:
        """The first keyword found that refuses `instance`; None if it is valid.

        unfinished: paths of arrays and objects that will still grow: only what no growth can mend is found.
        """
        run = _Run(self._references, self._siblings_of_ref, frozenset(unfinished))
        return run.check(self._schema, instance, ())


def _is_old(schema: Any) -> bool:
    """Drafts up to 7: whatever stands beside a $ref is ignored."""
    named = schema.get("$schema", "") if isinstance(schema, dict) else ""
    return isinstance(named, str) and any(f"draft-0{n}" in named for n in (3, 4, 6, 7))


class _Run:
    def __init__(self, references: References, siblings_of_ref: bool, unfinished: frozenset[Path]) -> None:
        self._references = references
        self._unfinished = unfinished
        self._siblings = siblings_of_ref
        self._steps = 0
        self._depth = 0
        self._deadline = time.thread_time() + MAX_SECONDS

    def check(self, schema: Any, value: Any, path: Path) -> Violation | None:
        if schema is True:
            return None
        if schema is False:
            return Violation(path, "no value is allowed here")
        self._steps += 1
        if self._steps > MAX_STEPS or (self._steps % 64 == 0 and time.thread_time() > self._deadline):
            raise TooCostlyError(f"validation took more than {MAX_STEPS} steps or {MAX_SECONDS} s")
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise TooCostlyError(f"schema and value together nest more than {MAX_DEPTH} levels deep")
        try:
            if "$ref" in schema and not self._siblings:
                return self._ref(schema["$ref"], value, path, schema)
            for keyword, given in schema.items():
                rule = _RULES.get(keyword)
                if rule is not None and path in self._unfinished:
                    rule = None if keyword in _NEED_THE_END else _UNFINISHED.get(keyword, rule)
                if rule is not None:
                    found = rule(self, given, value, path, schema)
                    if found is not None:
                        return found
            return None
        finally:
            self._depth -= 1

    def valid(self, schema: Any, value: Any, path: Path) -> bool:
        return self.check(schema, value, path) is None

    def matches(self, pattern: str, text: str) -> bool:
        try:
            return found_in(pattern, text, self._deadline - time.thread_time())
        except SlowPatternError as error:
            raise TooCostlyError(f"matching the pattern {pattern[:100]!r} took too long") from error

    def _ref(self, given: str, value: Any, path: Path, schema: dict[str, Any]) -> Violation | None:
        return self.check(self._references.target(schema, given), value, path)

    def _type(self, given: Any, value: Any, path: Path, _: dict[str, Any]) -> Violation | None:
        names = [given] if isinstance(given, str) else given
        if any(_has_type(name, value) for name in names):
            return None
        return Violation(path, f"is not of type {' or '.join(names)}")

    def _enum(self, given: list[Any], value: Any, path: Path, _: dict[str, Any]) -> Violation | None:
        return (
            None if any(equal(item, value) for item in given) else Violation(path, "is not one of the enum")
        )

    def _const(self, given: Any, value: Any, path: Path, _: dict[str, Any]) -> Violation | None:
        return None if equal(given, value) else Violation(path, "is not the const")

    def _all_of(self, given: list[Any], value: Any, path: Path, _: dict[str, Any]) -> Violation | None:
        for item in given:
            found = self.check(item, value, path)
            if found is not None:
                return found
        return None

    def _any_of(self, given: list[Any], value: Any, path: Path, _: dict[str, Any]) -> Violation | None:
        if any(self.valid(item, value, path) for item in given):
            return None
        return Violation(path, "matches none of anyOf")

    def _one_of(self, given: list[Any], value: Any, path: Path, _: dict[str, Any]) -> Violation | None:
        matched = sum(self.valid(item, value, path) for item in given)
        return None if matched == 1 else Violation(path, f"matches {matched} of oneOf, not exactly one")

    def _not(self, given: Any, value: Any, path: Path, _: dict[str, Any]) -> Violation | None:
        return Violation(path, "matches what `not` excludes") if self.valid(given, value, path) else None

    def _if(self, given: Any, value: Any, path: Path, schema: dict[str, Any]) -> Violation | None:
        branch = "then" if self.valid(given, value, path) else "else"
        return self.check(schema.get(branch, True), value, path)

    def _properties(
        self, given: dict[str, Any], value: Any, path: Path, _: dict[str, Any]
    ) -> Violation | None:
        if isinstance(value, dict):
            for name, item in given.items():
                if name in value and (found := self.check(item, value[name], (*path, name))):
                    return found
        return None

    def _pattern_properties(
        self, given: dict[str, Any], value: Any, path: Path, _: dict[str, Any]
    ) -> Violation | None:
        if isinstance(value, dict):
            for pattern, item in given.items():
                for name in value:
                    if self.matches(pattern, name) and (
                        found := self.check(item, value[name], (*path, name))
                    ):
                        return found
        return None

    def _additional_properties(
        self, given: Any, value: Any, path: Path, schema: dict[str, Any]
    ) -> Violation | None:
        if isinstance(value, dict):
            for name in value:
                if not self._is_named(name, schema) and (
                    found := self.check(given, value[name], (*path, name))
                ):
                    return found
        return None

    def _is_named(self, name: str, schema: dict[str, Any]) -> bool:
        return name in schema.get("properties", {}) or any(
            self.matches(pattern, name) for pattern in schema.get("patternProperties", {})
        )

    def _property_names(self, given: Any, value: Any, path: Path, _: dict[str, Any]) -> Violation | None:
        if isinstance(value, dict):
            for name in value:
                if found := self.check(given, name, path):
                    return Violation(path, f"has the property name {name[:60]!r}, which {found.message}")
        return None

    def _required(self, given: Any, value: Any, path: Path, _: dict[str, Any]) -> Violation | None:
        if isinstance(value, dict) and isinstance(given, list):
            for name in given:
                if name not in value:
                    return Violation(path, f"lacks the required property {name[:60]!r}")
        return None

    def _dependencies(
        self, given: dict[str, Any], value: Any, path: Path, _: dict[str, Any]
    ) -> Violation | None:
        if isinstance(value, dict):
            for name, needed in given.items():
                if name in value:
                    if isinstance(needed, list | str):
                        names = [needed] if isinstance(needed, str) else needed
                        found = self._required(names, value, path, {})
                    else:
                        found = self.check(needed, value, path)
                    if found is not None:
                        return found
        return None

    def _items(self, given: Any, value: Any, path: Path, schema: dict[str, Any]) -> Violation | None:
        if not isinstance(value, list):
            return None
        if isinstance(given, list):
            pairs = list(zip(given, range(len(value)), strict=False))
        else:
            pairs = [(given, index) for index in range(len(schema.get("prefixItems", ())), len(value))]
        for item, index in pairs:
            if found := self.check(item, value[index], (*path, index)):
                return found
        return None

    def _prefix_items(self, given: list[Any], value: Any, path: Path, _: dict[str, Any]) -> Violation | None:
        return self._items(given, value, path, {})

    def _additional_items(
        self, given: Any, value: Any, path: Path, schema: dict[str, Any]
    ) -> Violation | None:
        first = schema.get("items")
        if isinstance(value, list) and isinstance(first, list):
            return self._items(given, value, path, {"prefixItems": first})
        return None

    def _contains(self, given: Any, value: Any, path: Path, schema: dict[str, Any]) -> Violation | None:
        if not isinstance(value, list):
            return None
        count = sum(self.valid(given, item, (*path, index)) for index, item in enumerate(value))
        if count < schema.get("minContains", 1):
            return Violation(path, f"has {count} items that `contains` asks for, which is too few")
        most = schema.get("maxContains")
        if most is not None and count > most:
            return Violation(path, f"has {count} items that match `contains`, more than {most}")
        return None

    def _unique_items(self, given: Any, value: Any, path: Path, _: dict[str, Any]) -> Violation | None:
        if given is True and isinstance(value, list):
            seen = set()
            for index, item in enumerate(value):
                key = _key(item)
                if key in seen and (*path, index) not in self._unfinished:
                    return Violation((*path, index), "is there twice in an array of unique items")
                seen.add(key)
        return None

    def _pattern(self, given: str, value: Any, path: Path, _: dict[str, Any]) -> Violation | None:
        if isinstance(value, str) and not self.matches(given, value):
            return Violation(path, f"does not match the pattern {given[:60]!r}")
        return None

    def _multiple_of(self, given: Any, value: Any, path: Path, _: dict[str, Any]) -> Violation | None:
        from fractions import Fraction  # brings decimal with it, and few schemas ask

        if _has_type("number", value) and Fraction(str(value)) % Fraction(str(given)):
            return Violation(path, f"is no multiple of {given}")
        return None

    def _minimum(self, given: Any, value: Any, path: Path, schema: dict[str, Any]) -> Violation | None:
        if _has_type("number", value):
            strict = schema.get("exclusiveMinimum") is True
            if value < given or (strict and value == given):
                return Violation(path, f"is below the minimum of {given}")
        return None

    def _maximum(self, given: Any, value: Any, path: Path, schema: dict[str, Any]) -> Violation | None:
        if _has_type("number", value):
            strict = schema.get("exclusiveMaximum") is True
            if value > given or (strict and value == given):
                return Violation(path, f"is above the maximum of {given}")
        return None

    def _exclusive_minimum(self, given: Any, value: Any, path: Path, _: dict[str, Any]) -> Violation | None:
        if not isinstance(given, bool) and _has_type("number", value) and value <= given:
            return Violation(path, f"is not above {given}")
        return None

    def _exclusive_maximum(self, given: Any, value: Any, path: Path, _: dict[str, Any]) -> Violation | None:
        if not isinstance(given, bool) and _has_type("number", value) and value >= given:
            return Violation(path, f"is not below {given}")
        return None

    def _unevaluated_properties(
        self, given: Any, value: Any, path: Path, schema: dict[str, Any]
    ) -> Violation | None:
        if isinstance(value, dict):
            seen = self._evaluated(schema, value, path, own=False)
            for name in value:
                if name not in seen and (found := self.check(given, value[name], (*path, name))):
                    return found
        return None

    def _unevaluated_items(
        self, given: Any, value: Any, path: Path, schema: dict[str, Any]
    ) -> Violation | None:
        if isinstance(value, list):
            seen = self._evaluated(schema, value, path, own=False)
            for index, item in enumerate(value):
                if index not in seen and (found := self.check(given, item, (*path, index))):
                    return found
        return None

    def _evaluated(self, schema: Any, value: Any, path: Path, *, own: bool) -> set[Any]:
        """Names or indexes of what a keyword of `schema`, or of one applied in place, applied to."""
        if not isinstance(schema, dict):
            return set()
        everything: set[Any] = set(value) if isinstance(value, dict) else set(range(len(value)))
        if own and ("unevaluatedProperties" if isinstance(value, dict) else "unevaluatedItems") in schema:
            return everything
        seen: set[Any] = set()
        if isinstance(value, dict):
            if "additionalProperties" in schema:
                return everything
            seen = {name for name in value if self._is_named(name, schema)}
        else:
            first = schema.get("items")
            if (first is not None and not isinstance(first, list)) or "additionalItems" in schema:
                return everything
            seen = set(range(min(len(value), len(first or schema.get("prefixItems", ())))))
            if "contains" in schema:
                seen |= {
                    i for i, item in enumerate(value) if self.valid(schema["contains"], item, (*path, i))
                }
        for branch in self._in_place(schema, value, path):
            seen |= self._evaluated(branch, value, path, own=True)
        return seen

    def _in_place(self, schema: dict[str, Any], value: Any, path: Path) -> list[Any]:
        """The subschemas that apply to `value` itself and hold."""
        branches = [item for key in ("allOf", "anyOf", "oneOf") for item in schema.get(key, ())]
        for key in ("$ref", "$dynamicRef"):
            if key in schema:
                branches.append(self._references.target(schema, schema[key]))
        if "if" in schema:
            held = self.valid(schema["if"], value, path)
            branches += [schema["if"], schema.get("then", True)] if held else [schema.get("else", True)]
        if isinstance(value, dict):
            branches += [s for name, s in schema.get("dependentSchemas", {}).items() if name in value]
        return [branch for branch in branches if self.valid(branch, value, path)]


def _size_rule(kind: type, noun: str, *, most: bool) -> Callable[..., Violation | None]:
    def rule(_: _Run, given: Any, value: Any, path: Path, __: dict[str, Any]) -> Violation | None:
        if isinstance(value, kind):
            size = len(value)  # type: ignore[arg-type]
            if size > given if most else size < given:
                return Violation(path, f"has {size} {noun}, {'more' if most else 'fewer'} than {given}")
        return None

    return rule


_RULES: dict[str, Callable[..., Violation | None]] = {
    "$ref": _Run._ref,
    "$dynamicRef": _Run._ref,
    "type": _Run._type,
    "enum": _Run._enum,
    "const": _Run._const,
    "allOf": _Run._all_of,
    "anyOf": _Run._any_of,
    "oneOf": _Run._one_of,
    "not": _Run._not,
    "if": _Run._if,
    "properties": _Run._properties,
    "patternProperties": _Run._pattern_properties,
    "additionalProperties": _Run._additional_properties,
    "propertyNames": _Run._property_names,
    "required": _Run._required,
    "dependencies": _Run._dependencies,
    "dependentRequired": _Run._dependencies,
    "dependentSchemas": _Run._dependencies,
    "items": _Run._items,
    "prefixItems": _Run._prefix_items,
    "additionalItems": _Run._additional_items,
    "contains": _Run._contains,
    "uniqueItems": _Run._unique_items,
    "pattern": _Run._pattern,
    "multipleOf": _Run._multiple_of,
    "minimum": _Run._minimum,
    "maximum": _Run._maximum,
    "exclusiveMinimum": _Run._exclusive_minimum,
    "exclusiveMaximum": _Run._exclusive_maximum,
    "unevaluatedProperties": _Run._unevaluated_properties,
    "unevaluatedItems": _Run._unevaluated_items,
    "minLength": _size_rule(str, "characters", most=False),
    "maxLength": _size_rule(str, "characters", most=True),
    "minItems": _size_rule(list, "items", most=False),
    "maxItems": _size_rule(list, "items", most=True),
    "minProperties": _size_rule(dict, "properties", most=False),
    "maxProperties": _size_rule(dict, "properties", most=True),
}


_UNFINISHED: dict[str, Callable[..., Violation | None]] = {"oneOf": _Run._any_of}
"""Of two branches that match so far one may still fail."""


def _has_type(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    if name == "integer":
        return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    kinds: dict[str, type | tuple[type, ...]] = {
        "string": str, "number": (int, float), "object": dict, "array": list, "null": type(None),
    }  # fmt: skip
    return name in kinds and isinstance(value, kinds[name])


def equal(left: Any, right: Any) -> bool:
    """JSON equality: numbers by value, true is not 1."""
    return bool(_key(left) == _key(right))


def _key(value: Any) -> Any:
    """Hashable, and equal exactly for equal JSON values."""
    if isinstance(value, bool) or value is None:
        return (type(value).__name__, value)
    if isinstance(value, dict):
        return ("object", frozenset((name, _key(item)) for name, item in value.items()))
    if isinstance(value, list):
        return ("array", tuple(_key(item) for item in value))
    return value
