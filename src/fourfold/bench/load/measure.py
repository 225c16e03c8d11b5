"""Sending one request and noting when its tokens came."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from fourfold.bench.load.http import Server, request
from fourfold.bench.load.sse import EventParser

ERROR_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request ready to be sent. prompt_tokens: if known without asking the server."""

    path: str
    body: dict[str, Any]
    prompt_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """One request's times, in seconds of a monotonic clock, and what the server said.

    sent: when it was sent.  arrivals: when each event with tokens came.  ended: when the answer was complete.
    output_tokens: as the server counts, or else the number of events.  error: why it failed, or None.
    """

    sent: float
    arrivals: tuple[float, ...]
    ended: float
    output_tokens: int
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    text: str = ""
    error: str | None = None

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def ttft(self) -> float:
        """Time to first token."""
        return self.arrivals[0] - self.sent

    @property
    def e2e(self) -> float:
        """From sending to the last byte."""
        return self.ended - self.sent

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None for answers of one token."""
        if self.output_tokens < 2:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.output_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Times between events (inter-token latencies, if the server sends each token by itself)."""
        return [b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None
    prompt_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Timings(msgspec.Struct):
    """What llama-server says."""

    cache_n: int | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    timings: _Timings | None = None
    error: Any = None


async def send(
    server: Server,
    prepared: Prepared,
    timeout: float | None = None,
    clock: Callable[[], float] = time.perf_counter,
    enough: asyncio.Event | None = None,
) -> Answer:
    """Sends a streaming request. Never raises for what the server or the network does: see Answer.error.

    enough: once it is set, the connection is closed, and what came until then is the answer."""
    reader = _Reader(clock)
    body = msgspec.json.encode(prepared.body)
    sent = clock()
    error: str | None = None
    try:
        async with asyncio.timeout(timeout):
            sending = asyncio.ensure_future(request(server, "POST", prepared.path, body, reader.feed))
            status = await _unless(sending, enough)
        if status is None:
            reader.cut()
        elif status != 200:
            error = f"HTTP {status}: {reader.raw.decode(errors='replace')[:ERROR_CHARACTERS]}"
    except TimeoutError:
        error = f"no complete answer within {timeout:g} s"
    except (OSError, ValueError, msgspec.DecodeError) as failure:
        error = str(failure) or type(failure).__name__
    return reader.answer(sent, clock(), error, prepared.prompt_tokens)


async def _unless(sending: asyncio.Future[int], enough: asyncio.Event | None) -> int | None:
    """The status; None if there was enough before."""
    if enough is None:
        return await sending
    waiting = asyncio.ensure_future(enough.wait())
    try:
        await asyncio.wait((sending, waiting), return_when=asyncio.FIRST_COMPLETED)
        return sending.result() if sending.done() else None
    finally:
        for each in (sending, waiting):
            each.cancel()
        await asyncio.gather(sending, waiting, return_exceptions=True)


class _Reader:
    """Reads a stream of chunks while it comes."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.raw = bytearray()  # the beginning of the body, to be shown if it is an error
        self._clock = clock
        self._events = EventParser()
        self._decoder = msgspec.json.Decoder(_Chunk)
        self._arrivals: list[float] = []
        self._text: list[str] = []
        self._usage: _Usage | None = None
        self._timings: _Timings | None = None
        self._finish: str | None = None
        self._error: str | None = None
        self._done = False

    def cut(self) -> None:
        """The rest of the stream is not wanted."""
        self._done = True

    def feed(self, data: bytes) -> None:
        if len(self.raw) < ERROR_CHARACTERS:
            self.raw += data[:ERROR_CHARACTERS]
        for event in self._events.feed(data):
            if event == b"[DONE]":
                self._done = True
            else:
                self._take(self._decoder.decode(event))

    def _take(self, chunk: _Chunk) -> None:
        if chunk.error is not None:
            self._error = msgspec.json.encode(chunk.error).decode()[:ERROR_CHARACTERS]
        if chunk.usage is not None:
            self._usage = chunk.usage
        if chunk.timings is not None:
            self._timings = chunk.timings
        for choice in chunk.choices:
            if choice.finish_reason is not None:
                self._finish = choice.finish_reason
            text, counts = _content(choice)
            if counts:
                self._arrivals.append(self._clock())
                self._text.append(text)

    def answer(self, sent: float, ended: float, error: str | None, prompt_tokens: int | None) -> Answer:
        usage = self._usage or _Usage()
        details = usage.prompt_tokens_details
        cached = details.cached_tokens if details else None
        if cached is None and self._timings is not None:
            cached = self._timings.cache_n
        error = error or self._error
        if error is None and not self._done:
            error = "the stream ended without [DONE]"
        if error is None and not self._arrivals:
            error = "the answer had no tokens"
        return Answer(
            sent=sent,
            arrivals=tuple(self._arrivals),
            ended=ended,
            output_tokens=usage.completion_tokens or len(self._arrivals),
            prompt_tokens=usage.prompt_tokens if usage.prompt_tokens is not None else prompt_tokens,
            cached_tokens=cached,
            finish_reason=self._finish,
            text="".join(self._text),
            error=error,
        )


def _content(choice: _Choice) -> tuple[str, bool]:
    """The text of a chunk, and whether it stands for a token. A completion's chunk may be a token without
    text (part of a character); a chat's chunk without text only names the role, or ends the answer."""
    if choice.delta is not None:
        text = choice.delta.content or ""
        thought = choice.delta.reasoning_content or choice.delta.reasoning
        return text, bool(text or thought or choice.delta.tool_calls)
    text = choice.text or ""
    return text, choice.text is not None and bool(text or choice.finish_reason is None)
