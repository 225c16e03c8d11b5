"""The format of gpt-oss: messages with a channel, and calls as messages to a recipient.

https://cookbook.openai.com/articles/openai-harmony
"""

from __future__ import annotations

import re

from fourfold.answers.calls import Tools, streamed_arguments
from fourfold.answers.parts import Out
from fourfold.answers.reader import Reader, Step, scan

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKERS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)

_ENDS = (END, CALL, RETURN, START, CHANNEL)
_RECIPIENT = re.compile(r"to=([^\s<]+)")


def run(reader: Reader, out: Out, tools: Tools) -> Step[None]:
    """Reads an answer that follows <|start|>assistant."""
    header = ""
    first = yield from reader.peek()
    if first and first not in "< ":
        # No header at all: a text.
        tag = yield from scan(reader, _ENDS, out.content)
        header = tag if tag in (START, CHANNEL) else ""
    while True:
        pieces = [header]
        tag = yield from scan(reader, (MESSAGE, END, CALL, RETURN), pieces.append)
        header = "".join(pieces)
        if tag != MESSAGE:
            if header.strip() and CHANNEL not in header and START not in header:
                out.content(header)
            if not tag:
                return
            header = ""
            continue
        tag = yield from _body(reader, out, tools, header)
        if not tag:
            return
        header = tag if tag in (START, CHANNEL) else ""


def _body(reader: Reader, out: Out, tools: Tools, header: str) -> Step[str]:
    """Reads a message's text; returns the tag that ended it."""
    recipient = _RECIPIENT.search(header)
    channel = header.partition(CHANNEL)[2].split()
    out.paragraph()
    name = "" if recipient is None else recipient[1].removeprefix("functions.")
    if name in tools:
        out.call(name)
        yield from reader.spaces()
        if (yield from reader.peek()) in ("", "<"):
            out.arguments("{}")
        else:
            yield from streamed_arguments(reader, out)
        out.end_call()
        return (yield from scan(reader, _ENDS, out.content))
    if channel and channel[0].startswith("analysis"):
        out.in_reasoning = True
        tag = yield from scan(reader, _ENDS, out.reasoning)
        out.in_reasoning = False
        return tag
    return (yield from scan(reader, _ENDS, out.content))
