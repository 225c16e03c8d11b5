"""Which format a model writes, told by its chat template, or by a name as vLLM and SGLang have them."""

from __future__ import annotations

from functools import lru_cache

from fourfold.answers.answer import AnswerFormat
from fourfold.answers.formats import FORMATS, HERMES, ToolFormat
from fourfold.answers.reasoning import REASONING, ReasoningFormat
from fourfold.errors import ConfigError

_HARMONY = "harmony"

_TOOL_MARKS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<｜tool▁calls▁begin｜>", "```json"), "deepseek"),
    (("<｜tool▁calls▁begin｜>",), "deepseek_v31"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("[TOOL_CALLS]", "[ARGS]"), "mistral_v11"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<arg_key>",), "glm45"),
    (("<function=", "<parameter="), "qwen3_coder"),
    (("<tool_calls>",), "jamba"),
    (("<|/tool_call|>",), "phi4"),
    (("<|tool_call|>",), "granite"),
    (("<tool_call>",), "hermes"),
    (("<|python_start|>",), "pythonic"),
    (("func_name1(params_name1",), "pythonic"),
    (("[func_name",), "pythonic"),
    (("<|python_tag|>",), "llama3"),
    (("Environment: ipython",), "llama3"),
    (('"parameters": dictionary of argument name',), "llama3"),
    (("<start_of_turn>",), "gemma"),
)
"""The first entry of which a template has all texts says its format."""

_TOOL_NAMES = {
    "llama3_json": "llama3",
    "llama4_json": "llama3",
    "llama4_pythonic": "pythonic",
    "llama": "llama3",
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen3_xml": "qwen3_coder",
    "glm47": "glm45",
    "deepseek_v3": "deepseek",
    "deepseekv3": "deepseek",
    "deepseekv31": "deepseek_v31",
    "deepseek_v32": "deepseek_v31",
    "granite-20b-fc": "granite",
    "phi4_mini_json": "phi4",
    "openai": _HARMONY,
    "gpt-oss": _HARMONY,
    "gpt_oss": _HARMONY,
}
_REASONING_NAMES = {
    "deepseek-r1": "deepseek_r1",
    "deepseek_v3": "think",
    "qwen3": "think",
    "glm45": "think",
    "olmo3": "think",
    "step3": "think",
    "minimax_m2": "think",
    "magistral": "mistral",
    "openai_gptoss": _HARMONY,
    "gpt-oss": _HARMONY,
    "gpt_oss": _HARMONY,
}

OFF = "none"


@lru_cache(64)
def format_of(
    template: str, tool_parser: str | None = None, reasoning_parser: str | None = None
) -> AnswerFormat:
    """The format of a model with that chat template ("" for none).

    tool_parser, reasoning_parser: names that override what the template says; "none" switches one off.
    Raises ConfigError for an unknown name.
    """
    tools = _named(tool_parser, _TOOL_NAMES, {**FORMATS, _HARMONY: None}, "tool call parser")
    reasoning = _named(reasoning_parser, _REASONING_NAMES, {**REASONING, _HARMONY: None}, "reasoning parser")
    harmony = all(text in template for text in ("<|channel|>", "<|message|>", "<|start|>"))
    if _HARMONY in (tools, reasoning) or (harmony and tools is None and reasoning is None):
        return AnswerFormat(harmony=True)
    return AnswerFormat(
        _tools(template) if tools is None else FORMATS.get(tools),
        _reasoning(template) if reasoning is None else REASONING.get(reasoning),
    )


def tool_parsers() -> list[str]:
    """Names that a user may give."""
    return sorted({*FORMATS, *_TOOL_NAMES, _HARMONY, OFF})


def reasoning_parsers() -> list[str]:
    return sorted({*REASONING, *_REASONING_NAMES, _HARMONY, OFF})


def _tools(template: str) -> ToolFormat:
    for marks, name in _TOOL_MARKS:
        if all(mark in template for mark in marks):
            return FORMATS[name]
    return HERMES


def _reasoning(template: str) -> ReasoningFormat | None:
    return next((each for each in REASONING.values() if each.end in template and not each.always), None)


def _named(given: str | None, aliases: dict[str, str], known: dict[str, object], what: str) -> str | None:
    if given is None:
        return None
    name = aliases.get(given.lower(), given.lower())
    if name != OFF and name not in known:
        names = ", ".join(sorted({*known, *aliases, OFF}))
        raise ConfigError(f"unknown {what} {given!r}; known are {names}")
    return name
