# ruff: noqa: E501
"""Outputs as models of each family write them, with what they say: what is expected comes from the scene that
was written down, never from a parser.

Formats as the families' model cards and chat templates describe them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fourfold.answers.answer import AnswerFormat
from fourfold.answers.detect import format_of

TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "units": {"type": "string"}},
    },
    "add": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    "search-docs": {
        "type": "object",
        "properties": {
            "query": {"type": "string"},
            "filters": {"type": "object"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "exact": {"type": "boolean"},
        },
    },
    "now": {"type": "object", "properties": {}},
}

Call = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Scene:
    """calls: (name, arguments)."""

    calls: tuple[Call, ...] = ()
    before: str = ""
    reasoning: str = ""


SCENES = (
    Scene((("get_weather", {"city": "Paris", "days": 3}),)),
    Scene((("get_weather", {"city": "São Paulo", "units": "°C"}),), before="Let me look that up."),
    Scene((("add", {"a": 1, "b": -2.5}), ("add", {"a": 1e21, "b": 0}))),
    Scene((("now", {}),), before="What time is it? 🕰️"),
    Scene((("search-docs", {"query": 'say "hi" & <b>bye</b>\nnew line\ttab', "exact": True}),)),
    Scene((("search-docs", {"query": "x", "filters": {"year": {"from": 1999}, "ok": None}, "tags": ["a", "b"]}),)),
    Scene((("search-docs", {"query": "C:\\temp\\new", "tags": []}), ("now", {})), reasoning="Two calls, then."),
    Scene((("get_weather", {"city": "東京", "days": 7}),), "東京の天気を調べます。", "The user wants Tokyo."),
    Scene((("get_weather", {"city": "a{b}[c](d),=;"}),), reasoning="Hm: < </thin [TOOL {\n\n- and so on"),
    Scene(before="There is nothing to call. 2 < 3, a[0] = {x}; `code`."),
    Scene(before="Just thinking aloud.", reasoning="First.\n\nSecond: {\"name\": 1}"),
    Scene(before="Emoji 👩‍👩‍👧‍👦 and text\n\n1. one\n2. two"),
    Scene(reasoning="Only thoughts"),
)  # fmt: skip


def compact(arguments: Any) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def tagged(
    begin: str, end: str, key: str = "arguments", between: str = "\n"
) -> Callable[[tuple[Call, ...]], str]:
    def write(calls: tuple[Call, ...]) -> str:
        objects = [f'{{"name": "{name}", "{key}": {compact(arguments)}}}' for name, arguments in calls]
        return between.join(begin + each + end for each in objects)

    return write


def array(begin: str, end: str) -> Callable[[tuple[Call, ...]], str]:
    def write(calls: tuple[Call, ...]) -> str:
        objects = [{"name": name, "arguments": arguments} for name, arguments in calls]
        return begin + json.dumps(objects, ensure_ascii=False) + end

    return write


def named(form: str, first: str = "", last: str = "") -> Callable[[tuple[Call, ...]], str]:
    def write(calls: tuple[Call, ...]) -> str:
        return (
            first
            + "".join(form.replace("NAME", name).replace("ARGS", compact(a)) for name, a in calls)
            + last
        )

    return write


def python_call(call: Call) -> str:
    return f"{call[0]}({', '.join(f'{key}={value!r}' for key, value in call[1].items())})"


def python_list(calls: tuple[Call, ...]) -> str:
    return "[" + ", ".join(map(python_call, calls)) + "]"


def tool_code(calls: tuple[Call, ...]) -> str:
    return "```tool_code\n" + "\n".join(f"print({python_call(call)})" for call in calls) + "\n```"


def bare(value: Any) -> str:
    return value if isinstance(value, str) else compact(value)


def qwen_xml(calls: tuple[Call, ...]) -> str:
    return "\n".join(
        f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={key}>\n{bare(value)}\n</parameter>\n" for key, value in arguments.items())
        + "</function>\n</tool_call>"
        for name, arguments in calls
    )


def glm(calls: tuple[Call, ...]) -> str:
    return "\n".join(
        f"<tool_call>{name}\n"
        + "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{bare(value)}</arg_value>\n"
            for key, value in arguments.items()
        )
        + "</tool_call>"
        for name, arguments in calls
    )


@dataclass(frozen=True)
class Family:
    """text_with_calls: whether text and calls come in one answer."""

    tools: str
    write: Callable[[tuple[Call, ...]], str]
    reasoning: str = "think"
    think: tuple[str, str] = ("<think>\n", "\n</think>\n\n")
    text_with_calls: bool = True

    @property
    def format(self) -> AnswerFormat:
        return format_of("", self.tools, self.reasoning)

    def output(self, scene: Scene) -> str:
        begin, end = self.think
        text = begin + scene.reasoning + end if scene.reasoning else ""
        text += scene.before
        if scene.before and scene.calls:
            text += "\n\n"
        return text + (self.write(scene.calls) if scene.calls else "")

    def fits(self, scene: Scene) -> bool:
        return self.text_with_calls or not (scene.before and scene.calls)


THINK_TOKENS = ("[THINK]", "[/THINK]")
FAMILIES: dict[str, Family] = {
    "qwen": Family("hermes", tagged("<tool_call>\n", "\n</tool_call>")),
    "hermes": Family("hermes", tagged("<tool_call>", "</tool_call>")),
    "smollm": Family("hermes", array("<tool_call>", "</tool_call>")),
    "llama3": Family("llama3_json", tagged("", "", "parameters", "; "), text_with_calls=False),
    "llama3 tag": Family(
        "llama3_json", lambda calls: "<|python_tag|>" + tagged("", "", "parameters", "; ")(calls)
    ),
    "llama3 custom": Family("llama3_json", named("<function=NAME>ARGS</function>")),
    "mistral": Family("mistral", array("[TOOL_CALLS] ", ""), "mistral", THINK_TOKENS),
    "mistral 3": Family("mistral", named("[TOOL_CALLS]NAMEARGS"), "mistral", THINK_TOKENS),
    "deepseek": Family(
        "deepseek_v3",
        named(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nARGS\n```<｜tool▁call▁end｜>\n",
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
        ),
    ),
    "deepseek 3.1": Family(
        "deepseek_v31",
        named(
            "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGS<｜tool▁call▁end｜>",
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
        ),
    ),
    "kimi": Family(
        "kimi_k2",
        named(
            "<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>ARGS<|tool_call_end|>",
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
        ),
        "kimi",
        ("◁think▷", "◁/think▷"),
    ),
    "granite": Family(
        "granite",
        array("<|tool_call|>", ""),
        "granite",
        ("Here is my thought process:\n", "\nHere is my response:\n"),
    ),
    "phi4": Family("phi4_mini_json", array("<|tool_call|>", "<|/tool_call|>")),
    "jamba": Family("jamba", array("<tool_calls>", "</tool_calls>")),
    "llama4": Family("llama4_pythonic", python_list, text_with_calls=False),
    "gemma": Family("gemma", tool_code),
    "gemma json": Family("gemma", tagged("```json\n", "\n```", "parameters")),
    "qwen coder": Family("qwen3_coder", qwen_xml),
    "glm": Family("glm45", glm),
}  # fmt: skip
FAMILIES["mistral 11"] = Family(
    "mistral",
    lambda calls: "".join(f"[TOOL_CALLS]{name}[ARGS]{compact(arguments)}" for name, arguments in calls),
    "mistral",
    THINK_TOKENS,
)


def harmony(scene: Scene) -> str:
    messages = []
    if scene.reasoning:
        messages.append(f"<|channel|>analysis<|message|>{scene.reasoning}")
    if scene.before:
        channel = "commentary" if scene.calls else "final"
        messages.append(f"<|channel|>{channel}<|message|>{scene.before}")
    messages += [
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{compact(arguments)}"
        for name, arguments in scene.calls
    ]
    return "<|end|><|start|>assistant".join(messages)


@dataclass(frozen=True)
class Recorded:
    """One output. opened: its reasoning began in the prompt.  calls: names with arguments as JSON text says
    them, or as the text itself where that is no JSON."""

    name: str
    format: AnswerFormat
    text: str
    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, Any], ...] = ()
    opened: bool = False
    stops: tuple[str, ...] = field(default=())


def _scenes() -> list[Recorded]:
    found = []
    for name, family in FAMILIES.items():
        for index, scene in enumerate(SCENES):
            if family.fits(scene):
                found.append(
                    Recorded(
                        f"{name} {index}",
                        family.format,
                        family.output(scene),
                        scene.before,
                        scene.reasoning,
                        scene.calls,
                    )
                )
    for index, scene in enumerate(SCENES):
        if scene.calls or scene.before:
            format = format_of("", "openai")
            found.append(
                Recorded(
                    f"gpt-oss {index}", format, harmony(scene), scene.before, scene.reasoning, scene.calls
                )
            )
    return found


HERMES = format_of("", "hermes", "qwen3")
LLAMA = format_of("", "llama3_json")
OSS = format_of("", "openai")
ODD = [
    # In the prompt: <think>
    Recorded("r1 opened", HERMES, "Let me think.\n</think>\n\nIt is 4.", "It is 4.", "Let me think.", opened=True),
    Recorded("r1 twice", HERMES, "<think>\nHm.\n</think>\nYes", "Yes", "Hm.", opened=True),
    Recorded("cut in thought", HERMES, "<think>\nI was say", "", "I was say"),
    Recorded("cut in the tag", HERMES, "<think>\nI was </thi", "", "I was </thi"),
    Recorded("always reasons", format_of("", "hermes", "deepseek_r1"), "So.</think>4", "4", "So.", opened=True),
    Recorded("no reasoning", HERMES, "<thing> is no tag", "<thing> is no tag"),
    Recorded("thought later", HERMES, "See: <think>x</think>", "See: <think>x</think>"),
    # B61: arguments before the name.
    Recorded(
        "arguments first", HERMES, '<tool_call>{"arguments": {"a": 1, "b": [2]}, "name": "add"}</tool_call>',
        calls=(("add", {"a": 1, "b": [2]}),),
    ),
    Recorded("arguments first, text", LLAMA, '{"parameters": {"a": {}}, "name": "add"}', calls=(("add", {"a": {}}),)),
    Recorded("no arguments", HERMES, '<tool_call>{"name": "now"}</tool_call>', calls=(("now", {}),)),
    Recorded("null arguments", HERMES, '<tool_call>{"name": "now", "arguments": null}</tool_call>', calls=(("now", {}),)),
    Recorded(
        "arguments as text", HERMES, '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>',
        calls=(("add", {"a": 1}),),
    ),
    Recorded("more keys", HERMES, '<tool_call>{"id": 7, "type": "function", "name": "now", "arguments": {}, "x": [{}]}</tool_call>', calls=(("now", {}),)),
    Recorded("no closing tag", HERMES, '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n', calls=(("add", {"a": 1}),)),
    Recorded("text after", HERMES, '<tool_call>{"name": "now"}</tool_call>\nDone.', "Done.", calls=(("now", {}),)),
    Recorded("python quotes", HERMES, "<tool_call>{'name': 'add', 'arguments': {'a': True, 'b': None}}</tool_call>", calls=(("add", {"a": True, "b": None}),)),
    Recorded("trailing commas", HERMES, '<tool_call>{"name": "add", "arguments": {"a": [1, 2,], },}</tool_call>', calls=(("add", {"a": [1, 2]}),)),
    Recorded("raw newline", HERMES, '<tool_call>{"name": "get_weather", "arguments": {"city": "a\nb"}}</tool_call>', calls=(("get_weather", {"city": "a\nb"}),)),
    Recorded("bad escape", HERMES, '<tool_call>{"name": "get_weather", "arguments": {"city": "\\d\\\'"}}</tool_call>', calls=(("get_weather", {"city": "\\d'"}),)),
    Recorded("surrogates", HERMES, '<tool_call>{"name": "get_weather", "arguments": {"city": "\\ud83d\\ude00"}}</tool_call>', calls=(("get_weather", {"city": "😀"}),)),
    Recorded("name escaped", HERMES, '<tool_call>{"name": "\\u0061dd", "arguments": {}}</tool_call>', calls=(("add", {}),)),
    # Malformed: what is no call is content, to the letter.
    *(
        Recorded(f"malformed {index}", HERMES, text, text)
        for index, text in enumerate((
            "<tool_call>", "<tool_call>\n", "<tool_call></tool_call>", "<tool_call>not json</tool_call>",
            '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>', '<tool_call>{"name": 5}</tool_call>',
            '<tool_call>{"arguments": {"a": 1}}</tool_call>', '<tool_call>{"name": "add"', "<tool_cal",
            '<tool_call>{"arguments": {"a": 1}, "name"', '<tool_call>[]</tool_call> x', "<tool_call>[1]",
            '<tool_call>{"name": "add"; "arguments": {}}</tool_call>', "a <tool_call>\n\nb", "  spaces  \n",
            '{"name": "add", "arguments": {}}',
        ))
    ),
    Recorded("no comma", HERMES, '<tool_call>{"name": "add" "arguments": {}}</tool_call>', calls=(("add", {}),)),
    Recorded("broken inside", HERMES, '<tool_call>{"name": "add", "arguments": {"a": 1 "b": 2}}</tool_call>', '"b": 2}}</tool_call>', calls=(("add", '{"a": 1 '),)),
    Recorded("cut inside", HERMES, '<tool_call>{"name": "add", "arguments": {"a": [1, "x', calls=(("add", '{"a": [1, "x'),)),
    Recorded("a bad one, then a good one", HERMES, '<tool_call>oops <tool_call>{"name": "now"}</tool_call>', "<tool_call>oops", calls=(("now", {}),)),
    Recorded("json answer", LLAMA, '{"city": "Rome"}\n', '{"city": "Rome"}\n'),
    Recorded("undeclared", LLAMA, ' {"name": "nobody", "parameters": {}} x', ' {"name": "nobody", "parameters": {}} x'),
    Recorded("json later", LLAMA, 'As {"name": "add", "parameters": {}}', 'As {"name": "add", "parameters": {}}'),
    Recorded("python tag", LLAMA, '<|python_tag|>now.call()', "<|python_tag|>now.call()"),
    Recorded("python call", LLAMA, '<|python_tag|>get_weather(city="Oslo")', calls=(("get_weather", {"city": "Oslo"}),)),
    Recorded("citation", format_of("", "pythonic"), "[1] says so", "[1] says so"),
    Recorded("positions", format_of("", "pythonic"), "[get_weather('Nice', 2)]", calls=(("get_weather", {"city": "Nice", "days": 2}),)),
    Recorded("python cut", format_of("", "pythonic"), '[add(a=1, b=', calls=(("add", '{"a": 1, "b": '),)),
    Recorded("python tuple", format_of("", "pythonic"), "[add(a=(1, 2), b={'x': [None]})]", calls=(("add", {"a": [1, 2], "b": {"x": [None]}}),)),
    Recorded("gemma code", format_of("", "gemma"), "```python\nprint(1)\n```", "```python\nprint(1)\n```"),
    Recorded("gemma other code", format_of("", "gemma"), "```json\n[1]\n```", "```json\n[1]\n```"),
    Recorded("deepseek undeclared", format_of("", "deepseek_v31"), "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}"),
    Recorded("xml undeclared", format_of("", "qwen3_coder"), "<tool_call>\n<function=f>\n", "<tool_call>\n<function=f>\n"),
    Recorded("xml cut", format_of("", "qwen3_coder"), "<tool_call>\n<function=get_weather>\n<parameter=city>\nPa", calls=(("get_weather", '{"city": "Pa'),)),
    Recorded("mistral id", format_of("", "mistral"), "[TOOL_CALLS]add[CALL_ID]abc123XYZ[ARGS]{}", calls=(("add", {}),)),
    Recorded("oss no header", OSS, "Hello there", "Hello there"),
    Recorded("oss role recipient", OSS, " to=functions.add<|channel|>commentary json<|message|>{\"a\": 1}", calls=(("add", {"a": 1}),)),
    Recorded("oss undeclared", OSS, "<|channel|>commentary to=functions.f<|message|>{}", "{}"),
    Recorded("oss cut header", OSS, "<|channel|>analysis<|message|>a<|end|><|start|>assist", reasoning="a"),
    Recorded("oss two thoughts", OSS, "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b", reasoning="a\nb"),
]  # fmt: skip

RECORDED = _scenes() + ODD
