"""The streaming hot path: increments of all choices in, one write's worth of server-sent events out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import msgspec

from fourfold.answers.parts import Part
from fourfold.server.generate import Generation, Increment
from fourfold.server.stream import DONE
from fourfold.text.output import TokenInfo
from fourfold.types import TokenLogprob

encode = msgspec.json.encode


class Choice(msgspec.Struct):
    """What one sequence has given so far, or since its last chunk."""

    text: str = ""
    content: bool = True
    """Whether the text is content and nothing else; otherwise `parts` say what it is."""
    parts: list[Part] = msgspec.field(default_factory=list)
    logprobs: list[TokenInfo] = msgspec.field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None

    def take(self, increment: Increment) -> None:
        delta = increment.delta
        self.text += delta.text
        if increment.parts is not None:
            self.content = False
            self.parts += increment.parts
        self.logprobs += delta.logprobs or ()
        if increment.prompt_logprobs is not None:
            self.prompt_logprobs = increment.prompt_logprobs
        if delta.done:
            called = increment.called and delta.finish_reason == "stop"
            self.finish_reason = "tool_calls" if called else delta.finish_reason
            self.stop_reason = delta.stop_reason


class UsageWanted(msgspec.Struct, frozen=True):
    """at_end: one last chunk with empty choices.  in_every: in every chunk as well."""

    at_end: bool
    in_every: bool


async def collect(generation: Generation, count: int) -> list[Choice]:
    """Runs all `count` choices to their end."""
    choices = [Choice() for _ in range(count)]
    async with aclosing(generation.increments()) as batches:
        async for batch in batches:
            for increment in batch:
                choices[increment.choice].take(increment)
    return choices


async def events(
    generation: Generation,
    count: int,
    head: bytes,
    wanted: UsageWanted,
    content: Callable[[int, Choice], bytes | None],
) -> AsyncGenerator[bytes]:
    """Encoded events, one item per batch of increments, [DONE] the last.

    head: what every chunk's JSON begins with, from the brace up to but without the comma before "choices".
    content: the part of a choice that its endpoint knows, from after `"index":i,` up to but without the
    comma before
        "finish_reason"; None if there is nothing to say yet: the choice then waits, and is given again with
        what came next. Chunks with nothing in them are never sent.
    """
    start = b"data: " + head
    before = [start + b',"choices":[{"index":%d,' % index for index in range(count)]
    waiting = [Choice() for _ in range(count)]
    async with aclosing(generation.increments()) as batches:
        async for batch in batches:
            out: list[bytes] = []
            for increment in batch:
                index = increment.choice
                choice = waiting[index]
                choice.take(increment)
                inner = content(index, choice)
                if inner is None:
                    continue
                out += (before[index], inner, _tail(choice))
                if wanted.in_every:
                    out += (b',"usage":', encode(generation.usage.as_dict()))
                out.append(b"}\n\n")
                waiting[index] = Choice()
            if out:
                yield b"".join(out)
    end = await generation.trace_field()
    if wanted.at_end:
        end = {"usage": generation.usage.as_dict(), **end}
    yield (start + b',"choices":[],' + encode(end)[1:] + b"\n\n" if end else b"") + DONE


def _tail(choice: Choice) -> bytes:
    if choice.finish_reason is None:
        return b',"finish_reason":null}]'
    reasons = encode({"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason})
    return b"," + reasons[1:-1] + b"}]"
