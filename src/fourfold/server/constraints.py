"""What the answer must be, as OpenAI, vLLM, SGLang and llama.cpp name it: from a body to one Constraint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fourfold.errors import InvalidRequestError
from fourfold.server.checker import Checker
from fourfold.server.wire import GenerationBody
from fourfold.types import Constraint

if TYPE_CHECKING:
    from fourfold.grammar.sources import Kind

    Asked = tuple[str, Kind, Any]
    """(field, kind, content) of one constraint in a body."""

_FIELDS: dict[str, Kind] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "lark",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "lark",
    "grammar": "gbnf",
    "structural_tag": "structural_tag",
}
"""Fields of vLLM (guided_*), SGLang and llama.cpp. An empty text or list switches one off."""

_WITHOUT_EFFECT = frozenset(
    {
        "backend",
        "disable_additional_properties",
        "disable_any_whitespace",
        "disable_fallback",
        "whitespace_pattern",
    }
)
"""Of vLLM's structured_outputs: what chooses between its compilers and layouts."""


async def constraint_of(body: GenerationBody, checker: Checker) -> Constraint | None:
    """None if the answer may be anything. Raises InvalidRequestError."""
    found = asked_of(body)
    if found is None:
        return None
    field, kind, content = found
    return await checker.make(kind, content, field)


def asked_of(body: GenerationBody) -> Asked | None:
    """The one constraint in a body. Raises InvalidRequestError if there are several."""
    asked = [*_of_response_format(body), *_of_structured_outputs(body)]
    for field, kind in _FIELDS.items():
        content = getattr(body, field)
        if content is not None and content != "" and content != []:
            asked.append((field, kind, content))
    if not asked:
        return None
    if len(asked) > 1:
        names = " and ".join(field for field, _, _ in asked)
        raise InvalidRequestError(f"{names} constrain the same answer; give one of them", asked[1][0])
    return asked[0]


def guarantee_headers(constraint: Constraint | None, *, hoped: bool = False) -> dict[str, str]:
    """X-Fourfold-Guarantee: by what the answer is valid, "grammar" or "validation"; "none" if one was asked
    for and there is none (`hoped`)."""
    if constraint is None:
        return {"X-Fourfold-Guarantee": "none"} if hoped else {}
    return {"X-Fourfold-Guarantee": constraint.guarantee}


def guarantee_body(constraint: Constraint | None, *, hoped: bool = False) -> dict[str, Any]:
    """The same for a body, with the places in the schema that only validation guarantees."""
    if constraint is None:
        return {"structured_output": {"guarantee": "none", "validated": []}} if hoped else {}
    return {"structured_output": {"guarantee": constraint.guarantee, "validated": list(constraint.unsaid)}}


def _of_response_format(body: GenerationBody) -> list[Asked]:
    given = body.response_format
    if given is None or given.get("type") in (None, "text"):
        return []
    field = "response_format"
    kind = given["type"]
    if kind == "json_object":
        # llama.cpp and others put a schema here.
        schema = given.get("schema")
        return [(field, "json_object", "") if schema is None else (field, "json", schema)]
    if kind == "json_schema":
        wrapper = given.get("json_schema")
        schema = wrapper.get("schema") if isinstance(wrapper, dict) else None
        if schema is None:
            raise InvalidRequestError("response_format.json_schema.schema is required", field)
        return [(field, "json", schema)]
    if kind == "structural_tag":
        return [(field, "structural_tag", given)]
    raise InvalidRequestError(
        "response_format.type must be text, json_object, json_schema or structural_tag, got "
        f"{str(kind)[:60]!r}",
        field,
    )


def _of_structured_outputs(body: GenerationBody) -> list[Asked]:
    if not body.structured_outputs:
        return []
    from fourfold.grammar.sources import STRUCTURED_KINDS

    asked: list[Asked] = []
    for name, content in body.structured_outputs.items():
        field = f"structured_outputs.{name}"
        if content is None or content is False or name in _WITHOUT_EFFECT:
            continue
        if name not in STRUCTURED_KINDS:
            raise InvalidRequestError(
                f"{field} is not supported; give one of {', '.join(STRUCTURED_KINDS)}", "structured_outputs"
            )
        asked.append((field, STRUCTURED_KINDS[name], "" if name == "json_object" else content))
    return asked
