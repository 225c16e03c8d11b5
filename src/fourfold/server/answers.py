"""What one chat request's answers may hold (reasoning, calls), and the constraint that follows from it."""

from __future__ import annotations

import json
from functools import cached_property
from typing import Any

from fourfold.answers import harmony
from fourfold.answers.answer import AnswerFormat, Expected
from fourfold.answers.detect import format_of
from fourfold.answers.forcing import Forcible, Node, forcible_format, optional, required
from fourfold.errors import InvalidRequestError
from fourfold.grammar.thinking import Terminal, Thinking, after_thinking
from fourfold.server.checker import Checker
from fourfold.server.constraints import asked_of
from fourfold.server.settings import ServerSettings
from fourfold.server.tools import Tooling
from fourfold.server.wire import ChatBody
from fourfold.text.tokenizer import Tokenizer
from fourfold.types import Constraint

EFFORT_BUDGETS: dict[str, int | None] = {
    "minimal": 256,
    "low": 1024,
    "medium": 8192,
    "high": None,
    "xhigh": None,
}
"""Tokens of reasoning that each reasoning_effort allows a model whose template does not read it itself."""
MAX_BUDGET = 2**31 - 1


class Formats:
    """The formats of answers of one model's templates, and the tokens its markup is made of."""

    def __init__(self, tokenizer: Tokenizer, settings: ServerSettings) -> None:
        self._tokenizer = tokenizer
        self._overrides = (settings.tool_call_parser, settings.reasoning_parser)

    def of(self, template: str) -> AnswerFormat:
        return format_of(template, *self._overrides)

    @cached_property
    def _control(self) -> dict[str, int]:
        return {self._tokenizer.token_text(id): id for id in self._tokenizer.special_ids}

    def control_token(self, text: str) -> int | None:
        """Id of the control token with that text."""
        return self._control.get(text)

    def terminal(self, text: str) -> Terminal:
        """`text` as one token if it is one, of whatever kind."""
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        return ids[0] if len(ids) == 1 else text

    def ends_reasoning(self, format: AnswerFormat) -> bool:
        """Whether one token ends the reasoning."""
        reasoning = format.reasoning
        return format.harmony or (reasoning is not None and isinstance(self.terminal(reasoning.end), int))

    def shown(self, format: AnswerFormat) -> frozenset[int]:
        """Control tokens that the parser must see."""
        return frozenset(self._control[text] for text in format.markers if text in self._control)


def reasoning_variables(body: ChatBody, template: str, format: AnswerFormat) -> dict[str, Any]:
    """What the request says of reasoning, for the template. Raises InvalidRequestError."""
    effort, variables = body.reasoning_effort, dict(body.chat_template_kwargs or {})
    if effort is not None:
        if effort not in ("none", *EFFORT_BUDGETS):
            known = ", ".join(("none", *EFFORT_BUDGETS))
            raise InvalidRequestError(
                f"reasoning_effort must be one of {known}, got {effort!r}", "reasoning_effort"
            )
        if effort != "none" and not _reasons(format):
            raise InvalidRequestError(
                f"reasoning_effort is {effort!r}, but this model does not reason before it answers; "
                "leave it out",
                "reasoning_effort",
            )
        if effort != "none" and "reasoning_effort" in template:
            # gpt-oss knows three.
            known_there = {"minimal": "low", "xhigh": "high"}.get(effort, effort)
            variables.setdefault("reasoning_effort", known_there)
    switch = (body.thinking or {}).get("type")
    if switch not in (None, "enabled", "disabled", "auto", "adaptive"):
        raise InvalidRequestError(
            f"thinking.type must be enabled or disabled, got {str(switch)[:60]!r}", "thinking"
        )
    if effort == "none" or switch in ("enabled", "disabled"):
        for name in ("enable_thinking", "thinking"):
            variables.setdefault(name, effort != "none" and switch != "disabled")
    return variables


def _reasons(format: AnswerFormat) -> bool:
    return format.harmony or format.reasoning is not None


def thinking_budget(body: ChatBody, template: str, *, exact: bool) -> int | None:
    """Most tokens of reasoning; None for any number. exact: whether a budget can be kept; an effort is only a
    hint, and does without. Raises InvalidRequestError."""
    given: dict[str, Any] = {
        name: getattr(body, name)
        for name in ("thinking_budget", "thinking_token_budget", "reasoning_budget")
        if getattr(body, name) is not None
    }
    if (body.thinking or {}).get("budget_tokens") is not None:
        given["thinking.budget_tokens"] = (body.thinking or {})["budget_tokens"]
    if len(given) > 1:
        raise InvalidRequestError(f"{' and '.join(given)} are one thing; give one", next(iter(given)))
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int) or not -1 <= value <= MAX_BUDGET:
            raise InvalidRequestError(
                f"{name} must be a number of tokens, or -1 for any, got {str(value)[:60]!r}",
                name.partition(".")[0],
            )
        return None if value == -1 else value
    if not exact or body.reasoning_effort is None:
        return None
    reads_it = "reasoning_effort" in template
    if body.reasoning_effort == "none":
        return 0 if reads_it else None
    return None if reads_it else EFFORT_BUDGETS[body.reasoning_effort]


def expected_answer(
    formats: Formats, format: AnswerFormat, body: ChatBody, tooling: Tooling, prompt: str
) -> Expected:
    """prompt: what the answer follows."""
    if body.separate_reasoning is False or body.reasoning_format == "none":
        format = AnswerFormat(format.tools, None, format.harmony)
    if tooling.tools and (tooling.forced or asked_of(body) is not None):
        format = forcible_format(format, _forcible(tooling), formats.control_token)
    reasoning = format.reasoning
    opened = False
    if reasoning is not None:
        end = prompt.rstrip()
        opened = end.endswith(reasoning.begin) or (reasoning.always and not end.endswith(reasoning.end))
        if body.continue_final_message:
            turn = prompt[-len(str(body.messages[-1].get("content") or "")) :]
            opened = opened or turn.rfind(reasoning.begin) > turn.rfind(reasoning.end)
    return Expected(
        format,
        {tool.name: tool.schema for tool in tooling.tools},
        opened,
        most_calls=None if tooling.parallel else 1,
    )


async def answer_constraint(
    formats: Formats,
    checker: Checker,
    body: ChatBody,
    tooling: Tooling,
    expected: Expected,
    given: Constraint | None,
    budget: int | None,
) -> tuple[Constraint | None, Constraint | None]:
    """given: what the request asks of its answers otherwise.

    Returns the constraint on what follows the reasoning, and that on the whole. Raises InvalidRequestError.
    """
    final = given
    node = _calls_node(formats, body, tooling, expected, given)
    if node is not None:
        asked = {"type": "structural_tag", "format": node}
        field = "functions" if tooling.legacy else "tools"
        final = await checker.make("structural_tag", asked, field)
    thinking = _thinking(formats, expected, budget, free=final is None, is_call=node is not None)
    return final, final if thinking is None else after_thinking(final, thinking)


def _calls_node(
    formats: Formats, body: ChatBody, tooling: Tooling, expected: Expected, given: Constraint | None
) -> Node | None:
    tools = _forcible(tooling)
    parallel, token_of = tooling.parallel, formats.control_token
    if tooling.forced:
        return required(expected.format, tools, parallel, token_of)
    if not tools or not (tooling.strict or given is not None):
        return None
    if given is not None:
        content = _answer_node(body)
        if content is None:
            raise InvalidRequestError(
                f"{given.param} and tools together need a JSON schema, or tool_choice none or required",
                given.param,
            )
        calls = required(expected.format, tools, parallel, token_of)
        if expected.format.harmony:
            head = {"type": "const_string", "value": "final"}
            ends = [_token(formats, harmony.CHANNEL), head, _token(formats, harmony.MESSAGE)]
            content = {"type": "sequence", "elements": [*ends, content]}
        return {"type": "or", "elements": [calls, content]}
    # None where no grammar says the arguments as this model writes them: the openai client's helpers make
    # every tool strict, so such requests are served, and the response says that nothing is guaranteed.
    return optional(expected.format, tools, parallel, token_of)


def _forcible(tooling: Tooling) -> list[Forcible]:
    return [Forcible(tool.name, tool.schema, tool.strict) for tool in tooling.tools]


def _answer_node(body: ChatBody) -> Node | None:
    """The request's own constraint as part of a structural tag."""
    asked = asked_of(body)
    if asked is None or asked[1] not in ("json", "json_object"):
        return None
    if isinstance(asked[2], str) and asked[1] == "json":
        asked = (*asked[:2], json.loads(asked[2]))  # it was compiled already, so it is JSON
    return {
        "type": "json_schema",
        "json_schema": {"type": "object"} if asked[1] == "json_object" else asked[2],
    }


def _token(formats: Formats, text: str) -> Node:
    id = formats.control_token(text)
    return {"type": "const_string", "value": text} if id is None else {"type": "token", "token": id}


def _thinking(
    formats: Formats, expected: Expected, budget: int | None, *, free: bool, is_call: bool
) -> Thinking | None:
    format = expected.format
    tokens = tuple(sorted(formats.shown(format)))
    if format.harmony:
        names = (harmony.CHANNEL, "analysis", harmony.MESSAGE)
        ends = (harmony.END, harmony.START, "assistant")
        final = (harmony.CHANNEL,) if free else () if is_call else (harmony.CHANNEL, "final", harmony.MESSAGE)
        begin, end, head = (
            tuple(formats.control_token(text) or text for text in texts) for texts in (names, ends, final)
        )
        return Thinking(begin, end, False, "analysis" * free, budget=budget, head=head, tokens=tokens)
    reasoning = format.reasoning
    if reasoning is None:
        return None
    begins, ended = formats.terminal(reasoning.begin), formats.terminal(reasoning.end)
    return Thinking(
        (begins,),
        (ended,),
        expected.opened,
        begin_text=reasoning.begin,
        end_text=reasoning.end,
        empty="\n\n",
        budget=budget,
        tokens=tuple(id for id in tokens if id not in (begins, ended)),
    )
