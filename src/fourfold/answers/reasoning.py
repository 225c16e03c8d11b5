"""Reasoning that stands between tags before the answer proper."""

from __future__ import annotations

import msgspec

from fourfold.answers.parts import Out
from fourfold.answers.reader import Reader, Step, scan


class ReasoningFormat(msgspec.Struct, frozen=True):
    """begin, end: the tags. Templates of some models write `begin` themselves.

    always: answers begin with reasoning even where nobody wrote `begin`.
    """

    name: str
    begin: str
    end: str
    always: bool = False

    def run(self, reader: Reader, out: Out, opened: bool) -> Step[bool]:
        """Reads reasoning, if the answer begins with it. opened: it was begun in the prompt. True if it was
        read to its end; False if there is none."""
        if opened:
            out.in_reasoning = True
        space = yield from reader.spaces()
        begun = yield from reader.one_of((self.begin,))
        if not (begun or opened):
            out.content(space)
            return False
        out.markup()
        out.in_reasoning = True
        tag = yield from scan(reader, (self.end,), out.reasoning)
        out.in_reasoning = False
        out.markup()
        return bool(tag)


REASONING: dict[str, ReasoningFormat] = {
    each.name: each
    for each in (
        ReasoningFormat("think", "<think>", "</think>"),
        ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
        ReasoningFormat("seed_oss", "<seed:think>", "</seed:think>"),
        ReasoningFormat("kimi", "◁think▷", "◁/think▷"),
        ReasoningFormat("thought", "<thought>", "</thought>"),
        ReasoningFormat("deepseek_r1", "<think>", "</think>", always=True),
        ReasoningFormat("granite", "Here is my thought process:", "Here is my response:"),
    )
}
