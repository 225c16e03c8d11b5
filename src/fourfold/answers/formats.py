"""The formats of tool calls by family: where a call begins, how it is read, and how one can be forced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from fourfold.answers import pythonic, xml
from fourfold.answers.calls import MAX_NAME, Tools, call_objects, name_until, named_call
from fourfold.answers.parts import Out
from fourfold.answers.reader import Reader, Step, scan

Read = Callable[[Reader, Out, Tools, str], Step[bool]]
"""Reads what follows a tag (the last argument), which is written as content if it was no call."""


class Shape(msgspec.Struct, frozen=True):
    """How to write a call whose arguments are JSON, for a grammar: around all calls, between two of them, and
    around the name and the arguments of each. {id} stands for the number of the call."""

    before_name: str
    before_arguments: str
    after: str
    first: str = ""
    between: str = "\n"
    last: str = ""
    trigger: str = ""
    """What begins a call in free text; a beginning of first + before_name."""


class ToolFormat(msgspec.Struct, frozen=True):
    """One family's tool calls.

    tags: what begins a call, with what reads it.  silent: markup that means nothing by itself.
    bare: reads a call that begins the answer without a tag, and the characters it can begin with.
    shape: None if arguments are not JSON there.
    ids: what call ids look like: OpenAI's, or Mistral's nine letters and digits.
    """

    name: str
    tags: tuple[tuple[str, Read], ...]
    silent: tuple[str, ...] = ()
    bare: tuple[str, Read] | None = None
    shape: Shape | None = None
    arguments: Literal["json", "pythonic", "xml", "glm"] = "json"
    ids: Literal["openai", "mistral"] = "openai"

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that the parser must see even where they are control tokens."""
        seen = [tag for tag, _ in self.tags] + list(self.silent) + list(_MARKERS.get(self.name, ()))
        return tuple(dict.fromkeys(seen))

    def run(self, reader: Reader, out: Out, tools: Tools) -> Step[None]:
        """Reads an answer to its end."""
        if self.bare is not None:
            space = yield from reader.spaces()
            char = yield from reader.peek()
            if char and char in self.bare[0]:
                yield from self.bare[1](reader, out, tools, space)
            else:
                out.content(space)
        readers = dict(self.tags)
        tags = (*readers, *self.silent)
        while tag := (yield from scan(reader, tags, out.content)):
            if tag in self.silent:
                out.markup()
            else:
                yield from readers[tag](reader, out, tools, tag)


def _objects(*ends: str, separators: tuple[str, ...] = ()) -> Read:
    def read(reader: Reader, out: Out, tools: Tools, before: str) -> Step[bool]:
        if not (yield from call_objects(reader, out, tools, before, separators)):
            return False
        space = yield from reader.spaces()
        if not (yield from reader.one_of(ends)):
            out.content(space)
        return True

    return read


def _named(stops: tuple[str, ...], ends: tuple[str, ...]) -> Read:
    """NAME, one of `stops`, arguments, and perhaps one of `ends`."""

    def read(reader: Reader, out: Out, tools: Tools, before: str) -> Step[bool]:
        name, stop = yield from name_until(reader, stops)
        if not stop:
            out.content(before + name)
            return False
        return (yield from named_call(reader, out, tools, before + name + stop, name.strip(), ends))

    return read


def _mistral(reader: Reader, out: Out, tools: Tools, before: str) -> Step[bool]:
    """[TOOL_CALLS][{...}, ...] until v7; [TOOL_CALLS]name{...} and [TOOL_CALLS]name[ARGS]{...} from v11."""
    before += yield from reader.spaces()
    char = yield from reader.peek()
    if char and char in "[{":
        return (yield from call_objects(reader, out, tools, before, ()))
    name = ""
    while (char := (yield from reader.peek())) and char not in "[{" and len(name) <= MAX_NAME:
        name += yield from reader.take()
    before += name
    if (yield from reader.one_of(("[CALL_ID]",))):
        call_id, stop = yield from name_until(reader, ("[ARGS]",))
        before += "[CALL_ID]" + call_id + stop
    else:
        before += yield from reader.one_of(("[ARGS]",))
    return (yield from named_call(reader, out, tools, before, name.strip(), ()))


def _kimi(reader: Reader, out: Out, tools: Tools, before: str) -> Step[bool]:
    """functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>"""
    name, stop = yield from name_until(reader, ("<|tool_call_argument_begin|>",))
    short = name.strip().removeprefix("functions.").rpartition(":")[0] or name.strip()
    return (yield from named_call(reader, out, tools, before + name + stop, short, ("<|tool_call_end|>",)))


def _deepseek(reader: Reader, out: Out, tools: Tools, before: str) -> Step[bool]:
    """V3 and R1: function, separator, NAME, a fenced block of JSON; V3.1: NAME, separator, JSON."""
    name, stop = yield from name_until(reader, ("<｜tool▁sep｜>",))
    before += name + stop
    if stop and name.strip() == "function":
        name, stop = yield from name_until(reader, ("```",))
        before += name + stop + (yield from reader.one_of(("json",)))
    ends = ("```<｜tool▁call▁end｜>", "```\n<｜tool▁call▁end｜>", "<｜tool▁call▁end｜>")
    if not stop:
        out.content(before)
        return False
    return (yield from named_call(reader, out, tools, before, name.strip(), ends))


def _gemma_block(reader: Reader, out: Out, tools: Tools, before: str) -> Step[bool]:
    return (yield from pythonic.call_lines(reader, out, tools, before, "```"))


def _gemma_start(reader: Reader, out: Out, tools: Tools, before: str) -> Step[bool]:
    if (yield from reader.peek()) == "[":
        return (yield from pythonic.call_list(reader, out, tools, before))
    return (yield from _LLAMA_OBJECTS(reader, out, tools, before))


def _python_tag(reader: Reader, out: Out, tools: Tools, before: str) -> Step[bool]:
    space = yield from reader.spaces()
    if (yield from reader.peek()) == "{":
        return (yield from _LLAMA_OBJECTS(reader, out, tools, before + space))
    return (yield from pythonic.call(reader, out, tools, before + space))


def _qwen(reader: Reader, out: Out, tools: Tools, before: str) -> Step[bool]:
    good = yield from xml.qwen_call(reader, out, tools, before)
    if good:
        space = yield from reader.spaces()
        if not (yield from reader.one_of(("</tool_call>",))):
            out.content(space)
    return good


def _qwen_wrapped(reader: Reader, out: Out, tools: Tools, before: str) -> Step[bool]:
    """<tool_call>, then a function; other models of the family write JSON there."""
    before += yield from reader.spaces()
    if (yield from reader.one_of(("<function=",))):
        return (yield from _qwen(reader, out, tools, before + "<function="))
    return (yield from _HERMES(reader, out, tools, before))


_HERMES = _objects("</tool_call>")
_LLAMA_OBJECTS = _objects(separators=(";",))
_FUNCTION_TAG = ("<function=", _named((">",), ("</function>",)))
_JSON_ARRAY_SHAPE = {"before_name": '{"name": "', "before_arguments": '", "arguments": ', "after": "}"}

_MARKERS = {
    "mistral": ("[ARGS]", "[CALL_ID]"),
    "deepseek": ("<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    "kimi_k2": ("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    "hermes": ("</tool_call>",),
    "qwen3_coder": ("</tool_call>", "</function>", "<parameter=", "</parameter>"),
    "glm45": ("</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "phi4": ("<|/tool_call|>",),
    "jamba": ("</tool_calls>",),
}
"""More control tokens within calls."""

HERMES = ToolFormat(
    "hermes",
    tags=(("<tool_call>", _HERMES),),
    shape=Shape(
        '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", trigger="<tool_call>"
    ),
)  # fmt: skip

FORMATS: dict[str, ToolFormat] = {
    each.name: each
    for each in (
        HERMES,
        ToolFormat(
            "llama3",
            tags=(("<|python_tag|>", _python_tag), _FUNCTION_TAG),
            bare=("{", _LLAMA_OBJECTS),
            shape=Shape('{"name": "', '", "parameters": ', "}", between="; "),
        ),
        ToolFormat(
            "mistral",
            tags=(("[TOOL_CALLS]", _mistral),),
            shape=Shape(
                **_JSON_ARRAY_SHAPE, first="[TOOL_CALLS][", between=", ", last="]", trigger="[TOOL_CALLS]"
            ),
            ids="mistral",
        ),
        ToolFormat(
            "mistral_v11",
            tags=(("[TOOL_CALLS]", _mistral),),
            shape=Shape("[TOOL_CALLS]", "[ARGS]", "", between="", trigger="[TOOL_CALLS]"),
            ids="mistral",
        ),
        ToolFormat(
            "deepseek",
            tags=(("<｜tool▁call▁begin｜>", _deepseek),),
            silent=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
            shape=Shape(
                "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
                "\n```json\n",
                "\n```<｜tool▁call▁end｜>",
                first="<｜tool▁calls▁begin｜>",
                last="<｜tool▁calls▁end｜>",
                trigger="<｜tool▁calls▁begin｜>",
            ),
        ),
        ToolFormat(
            "deepseek_v31",
            tags=(("<｜tool▁call▁begin｜>", _deepseek),),
            silent=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
            shape=Shape(
                "<｜tool▁call▁begin｜>",
                "<｜tool▁sep｜>",
                "<｜tool▁call▁end｜>",
                first="<｜tool▁calls▁begin｜>",
                between="",
                last="<｜tool▁calls▁end｜>",
                trigger="<｜tool▁calls▁begin｜>",
            ),
        ),
        ToolFormat(
            "kimi_k2",
            tags=(("<|tool_call_begin|>", _kimi),),
            silent=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            shape=Shape(
                "<|tool_call_begin|>functions.",
                ":0<|tool_call_argument_begin|>",
                "<|tool_call_end|>",
                first="<|tool_calls_section_begin|>",
                between="",
                last="<|tool_calls_section_end|>",
                trigger="<|tool_calls_section_begin|>",
            ),
        ),
        ToolFormat(
            "granite",
            tags=(("<|tool_call|>", _objects()), ("<tool_call>", _HERMES)),
            shape=Shape(
                **_JSON_ARRAY_SHAPE, first="<|tool_call|>[", between=", ", last="]", trigger="<|tool_call|>"
            ),
        ),
        ToolFormat(
            "phi4",
            tags=(("<|tool_call|>", _objects("<|/tool_call|>")), ("functools", _objects())),
            shape=Shape(
                **_JSON_ARRAY_SHAPE,
                first="<|tool_call|>[",
                between=", ",
                last="]<|/tool_call|>",
                trigger="<|tool_call|>",
            ),
        ),
        ToolFormat(
            "jamba",
            tags=(("<tool_calls>", _objects("</tool_calls>")),),
            shape=Shape(
                **_JSON_ARRAY_SHAPE,
                first="<tool_calls>[\n  ",
                between=",\n  ",
                last="\n]</tool_calls>",
                trigger="<tool_calls>",
            ),
        ),
        ToolFormat(
            "pythonic",
            tags=(("<|python_start|>", pythonic.call_list), ("<|python_tag|>", _python_tag)),
            silent=("<|python_end|>",),
            bare=("[", pythonic.call_list),
            arguments="pythonic",
        ),
        ToolFormat(
            "gemma",
            tags=(
                ("```tool_code", _gemma_block),
                ("```json", _objects("```")),
                ("<tool_call>", _HERMES),
                ("```tool_call", _objects("```")),
            ),
            bare=("[{", _gemma_start),
            shape=Shape(
                '```json\n{"name": "', '", "parameters": ', "}\n```", trigger="```json"
            ),
        ),
        ToolFormat(
            "qwen3_coder",
            tags=(("<tool_call>", _qwen_wrapped), ("<function=", _qwen)),
            arguments="xml",
        ),
        ToolFormat("glm45", tags=(("<tool_call>", xml.glm_call),), arguments="glm"),
    )
}  # fmt: skip
