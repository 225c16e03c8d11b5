"""Answers that begin with reasoning: a constraint holds for what follows it, and a budget ends it."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from fourfold.errors import InvalidRequestError
from fourfold.types import Constraint

Terminal = str | int
"""A text, or the id of a token."""


class Thinking(msgspec.Struct, frozen=True):
    """How a model reasons before it answers.

    begin, end: what stands around the reasoning.  opened: `begin` is the end of the prompt.
    begin_text, end_text: how they read where they could also be spelled with other tokens; "" where not.
    empty: what stands between them when there is no reasoning.
    budget: most tokens of reasoning; `end` is forced then. None for any number.
    head: what an answer begins with, after the reasoning or without it.
    tokens: control tokens that an answer without a constraint may hold.
    """

    begin: tuple[Terminal, ...]
    end: tuple[Terminal, ...]
    opened: bool
    begin_text: str = ""
    end_text: str = ""
    empty: str = ""
    budget: int | None = None
    head: tuple[Terminal, ...] = ()
    tokens: tuple[int, ...] = ()


def after_thinking(constraint: Constraint | None, thinking: Thinking) -> Constraint | None:
    """The constraint on the whole answer, reasoning included. None if anything goes.

    Raises InvalidRequestError if there is a budget and the end of the reasoning is not one token.
    """
    if constraint is None and thinking.budget is None:
        return None
    first = thinking.end[0]
    spelled = _lark((thinking.begin_text,))
    rules = [r"TEXT: /(?s:.*)/", "FIRST: TEXT" + _without(spelled and r"/\s*/ " + spelled)]
    end = _lark(thinking.end)
    if thinking.budget == 0:
        body = "" if thinking.opened else f"{_lark(thinking.begin)} {_lark((thinking.empty,))}"
    elif isinstance(first, str):
        if thinking.budget is not None:
            raise InvalidRequestError(
                f"this model ends its reasoning with {first!r}, which is no single token of its vocabulary, "
                "so that a budget cannot be kept; leave thinking_budget out",
                "thinking_budget",
            )
        rules.append(f"thought[lazy]: TEXT {_lark((first,))}")
        body, end = "thought", _lark(thinking.end[1:])
    else:
        limit = "" if thinking.budget is None else f"[max_tokens={thinking.budget}]"
        spelled = _lark((thinking.end_text,))
        rules += [f"thought{limit}: THOUGHT", f"THOUGHT: TEXT{_without(spelled and f'TEXT {spelled}')}"]
        body = "thought"
    if not thinking.opened and thinking.budget != 0:
        body = f"{_lark(thinking.begin)} {body}"
    reasoned = f"{body} {end}"
    if not thinking.opened and thinking.budget != 0:
        reasoned = f"({reasoned})?"
    rules.append(f"start: {reasoned} {_lark(thinking.head)} answer")
    grammars: list[dict[str, Any]] = []
    if constraint is None:
        tokens = ",".join(map(str, thinking.tokens))
        first_text = "TEXT" if thinking.opened or thinking.budget == 0 else "FIRST"
        rules.append(f"answer: {first_text} (<[{tokens}]> TEXT)*" if tokens else f"answer: {first_text}")
        constraint = Constraint(grammar="", param="thinking_budget")
    else:
        grammars = _grammars(constraint.grammar)
        name = grammars[0].setdefault("name", "constrained_answer")
        rules += [f"answer: GAP? @{name}" if not thinking.head else f"answer: @{name}", r"GAP: /\n{1,2}/"]
    whole = [{"name": "thinking", "lark_grammar": "\n".join(rules)}, *grammars]
    return msgspec.structs.replace(
        constraint,
        grammar=json.dumps({"grammars": whole}),
        after="".join(map(_shown, thinking.end)),
        counted=bool(thinking.budget),
    )


def _grammars(text: str) -> list[dict[str, Any]]:
    if text.lstrip().startswith("{"):
        grammars: list[dict[str, Any]] = json.loads(text)["grammars"]
        return grammars
    return [{"lark_grammar": text}]


def _without(beginning: str) -> str:
    return f" & ~({beginning} TEXT)" if beginning else ""


def _lark(terminals: tuple[Terminal, ...]) -> str:
    return " ".join(
        f"<[{each}]>" if isinstance(each, int) else json.dumps(each, ensure_ascii=False)
        for each in terminals
        if each != ""
    )


def _shown(terminal: Terminal) -> str:
    """A terminal as a Guide sees it in its text."""
    return terminal if isinstance(terminal, str) else f"<|{terminal}|>"
