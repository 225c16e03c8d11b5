"""Calls whose parameters are tags: Qwen3-Coder's <function=f><parameter=a>1</parameter></function> and GLM's
f<arg_key>a</arg_key><arg_value>1</arg_value>. Values are bare text; the tool's schema says what they are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fourfold.answers.calls import Tools, name_until
from fourfold.answers.literal import quoted
from fourfold.answers.parts import Out
from fourfold.answers.reader import Reader, Step, scan


def qwen_call(reader: Reader, out: Out, tools: Tools, before: str) -> Step[bool]:
    """Reads what follows <function= ; False if that is no declared tool, and then it is content."""
    name, stop = yield from name_until(reader, (">",))
    if not stop or name not in tools:
        out.content(before + name + stop)
        return False
    out.call(name)
    parameters = _Parameters(out, tools[name])
    while True:
        yield from reader.spaces()
        tag = yield from reader.one_of(("<parameter=", "</function>"))
        if tag != "<parameter=":
            break
        key, stop = yield from name_until(reader, (">",))
        if not stop:
            break
        if not (yield from parameters.read(reader, key, ("</parameter>",))):
            out.end_call()  # broken off, and so are its arguments
            return True
    parameters.end()
    return True


def glm_call(reader: Reader, out: Out, tools: Tools, before: str) -> Step[bool]:
    """Reads what follows <tool_call> ; False if that is no declared tool, and then it is content."""
    name, stop = yield from name_until(reader, ("<arg_key>", "</tool_call>", "\n"))
    if name.strip() not in tools:
        out.content(before + name + stop)
        return False
    out.call(name.strip())
    parameters = _Parameters(out, tools[name.strip()])
    while stop != "</tool_call>":
        if stop != "<arg_key>":
            yield from reader.spaces()
            stop = yield from reader.one_of(("<arg_key>", "</tool_call>"))
            if stop != "<arg_key>":
                break
        key, stop = yield from name_until(reader, ("</arg_key>",))
        yield from reader.spaces()
        if not (stop and (yield from reader.literal("<arg_value>"))):
            break
        if not (yield from parameters.read(reader, key, ("</arg_value>",))):
            out.end_call()
            return True
        stop = ""
    parameters.end()
    return True


class _Parameters:
    """Writes parameters as one JSON object."""

    def __init__(self, out: Out, schema: Mapping[str, Any]) -> None:
        self._out = out
        properties = schema.get("properties")
        self._properties = properties if isinstance(properties, Mapping) else {}
        self._names: set[str] = set()
        out.arguments("{")

    def read(self, reader: Reader, name: str, end: tuple[str, ...]) -> Step[bool]:
        """Texts are written as they come, other values when they are whole. One line break at either end
        belongs to the markup; of a name given twice the first counts."""
        if name in self._names:
            return bool((yield from scan(reader, end, _nowhere)))
        self._out.arguments((", " if self._names else "") + f'"{quoted(name)}": ')
        self._names.add(name)
        kinds = types_of(self._properties.get(name))
        yield from reader.one_of(("\n",))
        if kinds == {"string"}:
            return (yield from self._text(reader, end))
        pieces: list[str] = []
        ended = bool((yield from scan(reader, end, pieces.append)))
        self._out.arguments(as_json("".join(pieces).strip("\n"), kinds))
        return ended

    def _text(self, reader: Reader, end: tuple[str, ...]) -> Step[bool]:
        self._out.arguments('"')
        held = ""

        def write(text: str) -> None:
            nonlocal held
            text = held + text
            held = "\n" if text.endswith("\n") else ""
            self._out.arguments(quoted(text[: len(text) - len(held)]))

        ended = bool((yield from scan(reader, end, write)))
        if ended:
            self._out.arguments('"')
        return ended

    def end(self) -> None:
        self._out.arguments("}")
        self._out.end_call()


def types_of(schema: Any) -> set[str]:
    """JSON types that a schema of a parameter allows, as far as it says so plainly."""
    if not isinstance(schema, Mapping):
        return set()
    kind = schema.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return {each for each in kind if isinstance(each, str)}
    found: set[str] = set()
    for keyword in ("anyOf", "oneOf"):
        for each in schema.get(keyword) or ():
            found |= types_of(each)
    values = schema.get("enum")
    if not found and isinstance(values, list) and all(isinstance(each, str) for each in values):
        return {"string"}
    return found


def as_json(text: str, kinds: set[str]) -> str:
    """Bare text as JSON: what it says if that is of the right kind, otherwise as a text."""
    word = {"True": "true", "False": "false", "None": "null"}.get(text.strip(), text)
    try:
        parsed = json.loads(word, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    kind = _kind(parsed)
    if not kinds or kind in kinds or (kind == "integer" and "number" in kinds):
        return word.strip()
    return json.dumps(text, ensure_ascii=False) if "string" in kinds else word.strip()


def _kind(parsed: Any) -> str:
    if isinstance(parsed, bool):
        return "boolean"
    names = {
        dict: "object",
        list: "array",
        str: "string",
        int: "integer",
        float: "number",
        type(None): "null",
    }
    return names[type(parsed)]


def _refuse(word: str) -> None:
    raise ValueError(word)


def _nowhere(_: str) -> None:
    pass
