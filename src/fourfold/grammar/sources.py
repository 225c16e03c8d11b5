"""What users send as constraints, checked and made into Constraints.

Pure functions of their input; they may take tens of milliseconds, so a server runs them in a thread.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any, Literal

import msgspec

from fourfold.errors import InvalidRequestError
from fourfold.grammar.schema.adopt import adopt
from fourfold.grammar.schema.check import MAX_BYTES, check_depth, check_schema
from fourfold.grammar.schema.patterns import check_pattern
from fourfold.grammar.schema.relax import relax
from fourfold.grammar.tags import structural_constraint
from fourfold.types import Constraint, StructuredOutputsParams

Kind = Literal["json", "json_object", "regex", "choice", "lark", "gbnf", "structural_tag"]

STRUCTURED_KINDS: dict[str, Kind] = {
    "json": "json",
    "regex": "regex",
    "choice": "choice",
    "grammar": "lark",
    "json_object": "json_object",
    "structural_tag": "structural_tag",
}
"""Fields of StructuredOutputsParams, and of the body's structured_outputs."""

MAX_CHOICES = 10_000

JSON_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""One space after commas and colons and none elsewhere: as most models write, with no way to run on."""


def make_constraint(kind: Kind, content: Any, param: str) -> Constraint:
    """content: a schema (value or JSON text) for "json", nothing for "json_object", a list of texts for
    "choice", what `tags` takes (value or JSON text) for "structural_tag", and text for the others. Raises
    InvalidRequestError naming `param`, what is wrong, and where."""
    text = text_of(content, param)
    try:
        return msgspec.structs.replace(_make(kind, text), param=param)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{param}: {error}", param, error.code or "invalid_constraint") from error


def text_of(content: Any, param: str) -> str:
    """What a source says, as text: what is no text already is written as JSON, in which it means the same.

    Raises InvalidRequestError if there is too much of it.
    """
    text = content if isinstance(content, str) else _encode(content, param)
    if len(text) > MAX_BYTES:
        raise InvalidRequestError(
            f"{param}: it has {len(text)} characters, the limit is {MAX_BYTES}", param, "invalid_constraint"
        )
    return text


def constraint_of_params(params: StructuredOutputsParams) -> Constraint:
    """Raises InvalidRequestError, also if it does not say exactly one thing."""
    given = {name: getattr(params, name) for name in STRUCTURED_KINDS}
    said = {name: content for name, content in given.items() if content not in (None, False)}
    if len(said) != 1:
        raise InvalidRequestError(
            f"structured_outputs must say one of {', '.join(STRUCTURED_KINDS)}; got "
            f"{', '.join(said) or 'none'}",
            "structured_outputs",
        )
    ((name, content),) = said.items()
    kind = STRUCTURED_KINDS[name]
    return make_constraint(kind, "" if kind == "json_object" else content, f"structured_outputs.{name}")


def _encode(content: Any, param: str) -> str:
    try:
        return msgspec.json.encode(content).decode()
    except (RecursionError, ValueError) as error:
        raise InvalidRequestError(
            f"{param}: it cannot be written as JSON: {error}", param, "invalid_constraint"
        ) from error


@lru_cache(256)
def _make(kind: Kind, text: str) -> Constraint:
    if kind == "json_object":
        return _json({"type": "object"})
    if kind == "json":
        return _json(_decode(text))
    if kind == "regex":
        check_pattern(text)
        return _checked(_matcher().grammar_from_regex(text))
    if kind == "choice":
        return _choice(_decode(text))
    if kind == "structural_tag":
        made = structural_constraint(_decode(text), _make)
        return msgspec.structs.replace(_checked(made.grammar), unsaid=made.unsaid)
    return _checked(_from_gbnf(text) if kind == "gbnf" else _as_lark(text))


def _decode(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"it is not valid JSON: {error or 'nested too deeply'}") from error


def _json(schema: Any) -> Constraint:
    check_depth(schema)
    adopted = adopt(schema)
    check_schema(adopted)
    relaxed = relax(adopted, _json_complaint)
    return Constraint(
        grammar=_json_grammar(relaxed.schema),
        schema=json.dumps(schema) if relaxed.notes else None,
        unsaid=tuple(relaxed.notes),
    )


def _json_complaint(schema: Any) -> str:
    try:
        return _complaint(_json_grammar(schema))
    except ValueError as error:  # rewriting made it nest too deep
        return str(error)


def _json_grammar(schema: Any) -> str:
    # The layout goes in with the schema: the compiler reads it from there.
    given = schema if isinstance(schema, dict) else ({} if schema else {"not": {}})
    return str(_matcher().grammar_from_json_schema(json.dumps(given), overrides=JSON_LAYOUT))


def _choice(choices: Any) -> Constraint:
    if not (isinstance(choices, list) and choices and all(isinstance(one, str) and one for one in choices)):
        raise InvalidRequestError("it must be a list of at least one text, none of them empty")
    if len(choices) > MAX_CHOICES:
        raise InvalidRequestError(f"it has {len(choices)} choices, the limit is {MAX_CHOICES}")
    return _checked("start: " + " | ".join(map(_lark_string, dict.fromkeys(choices))))


def _lark_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _from_gbnf(text: str) -> str:
    """llama.cpp's notation, in Lark's."""
    from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

    try:
        return str(gbnf_to_lark(text))
    except (GbnfToLarkError, ValueError, KeyError, IndexError, RecursionError) as error:
        raise InvalidRequestError(f"the GBNF grammar cannot be read: {error}") from error


def _as_lark(text: str) -> str:
    """EBNF as vLLM and SGLang take it: Lark, or GBNF, which is told by its `::=`."""
    from llguidance.gbnf_to_lark import is_lark_syntax

    return text if is_lark_syntax(text) else _from_gbnf(text)


def _checked(grammar: str) -> Constraint:
    complaint = _complaint(grammar)
    if complaint:
        raise InvalidRequestError(f"the grammar cannot be compiled: {complaint[:2000]}")
    return Constraint(grammar=grammar)


def _complaint(grammar: str) -> str:
    from fourfold.grammar.compile import parser_limits

    return str(_matcher().validate_grammar(grammar, limits=parser_limits()))


def _matcher() -> Any:
    from llguidance import LLMatcher

    return LLMatcher
