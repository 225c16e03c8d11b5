"""Arguments that are not JSON, for a grammar: f(a=1) of the pythonic family, and the tags of Qwen3-Coder and
GLM, where a text stands without quotes. What the parsers (`pythonic`, `xml`) make of them is JSON that the
tool's schema allows.

Only declared parameters are written, required ones first in Python and in the schema's order in tags.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from fourfold.answers.xml import types_of

Node = dict[str, Any]
Kind = Literal["pythonic", "xml", "glm"]
Text = Callable[[str], list[Node]]
"""A text as parts of a structural tag, its control tokens as tokens."""

_ANNOTATIONS = frozenset({"title", "description", "default", "examples", "$comment", "deprecated"})
_DEFINITIONS = frozenset({"$defs", "definitions", "$schema"})
_OBJECT = frozenset({"type", "properties", "required", "additionalProperties"})
_LENGTHS = frozenset({"minLength", "maxLength"})
_MAX_LENGTH = 4_096
_NAME = {
    "pythonic": re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,255}"),
    "xml": re.compile(r"[^<>\s][^<>\n]{0,254}"),
    "glm": re.compile(r"[^<>\s][^<>\n]{0,254}"),
}
_TOOL_NAME = {"pythonic": re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*"), "xml": re.compile(r"[^<>\s]+")}
_ATOM = r"(?:\[[A-Za-z0-9 _.,:@/+-]+\]|[A-Za-z0-9 _:@/,-]|\\d|\\[.+()-])(?:\{\d{1,3}(?:,\d{0,3})?\}|[+*?])?"
_SIMPLE_PATTERN = re.compile(rf"\^((?:{_ATOM})*)\$")
"""Anchored at both ends, of parts that mean the same in every dialect."""
_WORDS = {"boolean": ("True", "False"), "null": ("None",)}


class CannotSpellError(Exception):
    """These rules have no grammar for a schema. The message says which keyword is at fault."""


class _Tags(msgspec.Struct, frozen=True):
    """line: between a value and what stands around it; a line break there is not of the value."""

    before_name: str
    before_value: str
    line: str
    end: str


_XML = _Tags("<parameter=", ">\n", "\n", "</parameter>")
_GLM = _Tags("<arg_key>", "</arg_key>\n<arg_value>", "", "</arg_value>")


def spelled_call(
    kind: Kind, name: str, schema: Mapping[str, Any] | bool, text: Text, *, strict: bool
) -> list[Node]:
    """A whole call without what stands around it: f(...), <function=f>...</function>, or f and its pairs.

    Raises CannotSpellError.
    """
    if not _TOOL_NAME.get(kind, _TOOL_NAME["xml"]).fullmatch(name):
        raise CannotSpellError(f"the name {name!r}")
    parameters = _parameters(schema if isinstance(schema, Mapping) else {})
    for each in parameters:
        if not _NAME[kind].fullmatch(each.name):
            raise CannotSpellError(f"the parameter name {each.name[:60]!r}")
    if kind == "pythonic":
        return [*text(name + "("), *_python_arguments(parameters, strict), *text(")")]
    tags = _XML if kind == "xml" else _GLM
    inside: list[Node] = []
    for each in parameters:
        pair = [*text(tags.before_name + each.name), *_tagged(each.schema, tags, text, strict), *text("\n")]
        inside += pair if each.required else [{"type": "optional", "content": _sequence(pair)}]
    if kind == "glm":
        return [*text(name + "\n"), *inside]
    return [*text(f"<function={name}>\n"), *inside, *text("</function>")]


class _Parameter(msgspec.Struct, frozen=True):
    """schema: with the definitions it may refer to."""

    name: str
    schema: Any
    required: bool


def _parameters(schema: Mapping[str, Any]) -> list[_Parameter]:
    extra = schema.keys() - _OBJECT - _ANNOTATIONS - _DEFINITIONS
    if extra:
        raise CannotSpellError(f"{min(extra)} beside properties")
    properties = schema.get("properties", {})
    required = schema.get("required", [])
    if not isinstance(required, list):
        raise CannotSpellError("required that is no list")
    if '"$ref": "#/properties' in json.dumps(properties):
        raise CannotSpellError("a reference to properties")
    missing = [name for name in required if name not in properties]
    others = schema.get("additionalProperties", True)
    if missing and others is False:
        raise CannotSpellError(f"the required property {missing[0]!r}, which is not allowed")
    definitions = {key: schema[key] for key in ("$defs", "definitions", "$schema") if key in schema}
    found = []
    for name, inner in {**properties, **dict.fromkeys(missing, others)}.items():
        if inner is False:
            continue
        whole = {**definitions, **inner} if isinstance(inner, Mapping) else {}
        found.append(_Parameter(name, whole, name in required))
    return found


def _python_arguments(parameters: Sequence[_Parameter], strict: bool) -> list[Node]:
    ordered = sorted(parameters, key=lambda each: not each.required)
    written = [
        [{"type": "const_string", "value": f"{each.name}="}, _literal(each.schema, strict)]
        for each in ordered
    ]
    comma = {"type": "const_string", "value": ", "}

    def after(first: int) -> list[Node]:
        """What may follow another argument."""
        nodes: list[Node] = []
        for each, parts in zip(ordered[first:], written[first:], strict=True):
            more = [comma, *parts]
            nodes += more if each.required else [{"type": "optional", "content": _sequence(more)}]
        return nodes

    if not ordered:
        return []
    if ordered[0].required:
        return [*written[0], *after(1)]
    begun = [_sequence([*parts, *after(index + 1)]) for index, parts in enumerate(written)]
    return [{"type": "optional", "content": _or(begun)}]


def _literal(schema: Any, strict: bool) -> Node:
    """A Python literal. Within arrays and objects the words are JSON's, which are read as well."""
    words = [word for kind in sorted(types_of(schema)) for word in _WORDS.get(kind, ())]
    if words and types_of(schema) <= _WORDS.keys() and _says_types_only(schema):
        return _or([{"type": "const_string", "value": word} for word in words])
    return {"type": "json_schema", "json_schema": schema, "strict": strict}


def _tagged(schema: Any, tags: _Tags, text: Text, strict: bool) -> list[Node]:
    """What follows a parameter's name, up to the end of its value's tag."""
    kinds = types_of(schema)
    before, after = text(tags.before_value), text(tags.line + tags.end)
    if _says_types_only(schema) and (not kinds or "string" in kinds):
        # Whatever it is, the parser makes one of these types of it.
        return [*before, {"type": "any_text"}, *text(tags.end)]
    if kinds == {"string"}:
        return [*before, *_limited_text(schema, tags, after, strict)]
    if "string" in kinds:
        raise CannotSpellError("a string that is limited beside other types")
    return [*before, {"type": "json_schema", "json_schema": schema, "strict": strict}, *after]


def _limited_text(schema: Mapping[str, Any], tags: _Tags, after: list[Node], strict: bool) -> list[Node]:
    said = schema.keys() - _ANNOTATIONS - _DEFINITIONS - {"type"}
    if said in ({"enum"}, {"const"}):
        values = [schema["const"]] if "const" in said else schema["enum"]
        texts = [value for value in values if isinstance(value, str)]
        if not texts or any(not one or tags.end in one or one != one.strip() for one in texts):
            raise CannotSpellError("an enum of texts that cannot stand between tags")
        return [_or([{"type": "const_string", "value": one} for one in texts]), *after]
    if not strict:
        said -= {"format"}
    if said <= _LENGTHS:
        least, most = int(schema.get("minLength", 0)), schema.get("maxLength")
        if max(least, most or 0) > _MAX_LENGTH:
            raise CannotSpellError(f"a length above {_MAX_LENGTH}")
        pattern = f"(.|\\n){{{least},{'' if most is None else int(most)}}}"
    elif said == {"pattern"} and (found := _SIMPLE_PATTERN.fullmatch(schema["pattern"])):
        pattern = found[1].replace("\\d", "[0-9]").replace("/", "\\/")
    else:
        raise CannotSpellError(f"a text limited by {', '.join(sorted(said))}")
    return _ended_text(pattern, tags, after)


def _ended_text(pattern: str, tags: _Tags, after: list[Node]) -> list[Node]:
    """A text that `pattern` matches and the end of its tag, in one: the text has no such end within, nor line
    breaks that the parser would take for markup."""
    value = f"/({pattern})/"
    if not tags.line:
        value = f"({value} & ~/\\n(.|\\n)*/ & ~/(.|\\n)*\\n/)"
    if after[-1]["type"] == "token":
        line = f" {json.dumps(tags.line)}" if tags.line else ""
        return [{"type": "grammar", "grammar": f"start: V\nV: {value}{line}"}, after[-1]]
    stop, inside = json.dumps(tags.line + tags.end), re.escape(tags.end).replace("/", "\\/")
    rules = f"start: value\nvalue[lazy]: V\nV: ({value} {stop}) & ~/(.|\\n)*{inside}(.|\\n)+/"
    return [{"type": "grammar", "grammar": rules}]


def _says_types_only(schema: Any) -> bool:
    """Whether a value is valid if it is of one of the types that `types_of` finds."""
    if not isinstance(schema, Mapping):
        return schema is True
    said = schema.keys() - _ANNOTATIONS - _DEFINITIONS
    if said == {"anyOf"}:
        return all(_says_types_only(branch) and types_of(branch) for branch in schema["anyOf"])
    return said <= {"type"}


def _sequence(nodes: list[Node]) -> Node:
    return nodes[0] if len(nodes) == 1 else {"type": "sequence", "elements": nodes}


def _or(nodes: list[Node]) -> Node:
    return nodes[0] if len(nodes) == 1 else {"type": "or", "elements": nodes}
