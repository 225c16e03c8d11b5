"""Runs the sequences of one HTTP request: submits them, merges what comes back, and leaves nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple, cast

import msgspec

from fourfold.answers.parts import Part
from fourfold.engine.client import EngineClient
from fourfold.errors import (
    DeadlineError,
    EngineDeadError,
    EngineFaultError,
    FourfoldError,
    InvalidRequestError,
)
from fourfold.server.errors import as_http
from fourfold.server.metrics import Metrics, SequenceTimer
from fourfold.server.reading import PartReader
from fourfold.server.traces import Record, trace_object
from fourfold.text.output import Delta, OutputProcessor
from fourfold.types import EngineEvent, EngineRequest, FinishReason, TokenLogprob

TRACE_SECONDS = 5.0
"""How long the end of an answer waits for its trace."""


class Job(msgspec.Struct, frozen=True):
    """One sequence to run. index: of its choice in the answer.  prompt: number of its prompt in the request.
    sibling: which of the n (or best_of) completions of that prompt.  parts: None if its answer is content and
    nothing else."""

    index: int
    prompt: int
    sibling: int
    request: EngineRequest
    output: OutputProcessor
    parts: PartReader | None = None


class Increment(NamedTuple):
    """What one event brought to one choice. prompt_logprobs: with the first one, if asked for.  parts: what
    the delta's text says, if it may be more than content.  called: whether the answer has called a tool."""

    choice: int
    delta: Delta
    prompt_logprobs: list[TokenLogprob | None] | None
    parts: list[Part] | None = None
    called: bool = False


_DETAILS = ("forced_tokens", "accepted_prediction_tokens", "rejected_prediction_tokens")


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    forced_tokens: int = 0
    """Of completion_tokens: those a constraint left no choice for."""
    accepted_prediction_tokens: int = 0
    """Of completion_tokens: those that were guessed right."""
    rejected_prediction_tokens: int = 0
    """Guesses that came to nothing; they are not in completion_tokens."""
    reasoning_tokens: int | None = None
    """Of completion_tokens: those of the reasoning. None if this model's reasoning is not told apart."""

    def as_dict(self) -> dict[str, object]:
        usage: dict[str, object] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        details = {name: getattr(self, name) for name in _DETAILS if getattr(self, name)}
        if self.reasoning_tokens is not None:
            details["reasoning_tokens"] = self.reasoning_tokens
        if details:
            usage["completion_tokens_details"] = details
        return usage


class Generation:
    """The sequences of one HTTP request.

    Iterating gives lists of increments: all that has come in since the last one, at least one. The first
    failure of any sequence ends the iteration with its error. However the iteration ends (exhausted, failed,
    closed early, cancelled), every sequence that is not finished is aborted in the engine before it returns.

    window: how many of the sequences are in the engine at a time, so that one request with many prompts
    neither overflows the waiting queue by itself nor keeps others out of the batch for longer than it has to.
    """

    def __init__(
        self,
        client: EngineClient,
        jobs: Sequence[Job],
        metrics: Metrics,
        window: int,
        *,
        record: Record | None = None,
        return_trace: bool = False,
    ) -> None:
        """record: what is remembered of this request; told how its sequences end."""
        self._record = record
        self._return_trace = return_trace
        self._client = client
        self._jobs = jobs
        self._metrics = metrics
        self._window = window
        # One prompt counts once, however many answers it gets.
        self.usage = Usage(prompt_tokens=sum(len(j.request.prompt_ids) for j in jobs if j.sibling == 0))
        if any(job.parts is not None and job.parts.reasons for job in jobs):
            self.usage.reasoning_tokens = 0

    @property
    def id(self) -> str:
        """What the response's id ends with."""
        return self._jobs[0].request.request_id.rpartition("-")[0]

    async def trace_field(self) -> dict[str, Any]:
        """{"trace": ...} of what is in the engine's record, if that was asked for. A trace that cannot be had
        is no reason to lose the answer, so it says why instead."""
        if not self._return_trace or self._record is None:
            return {}
        try:
            timelines = await asyncio.wait_for(
                self._client.timelines(self._record.sequence_ids), TRACE_SECONDS
            )
        except (EngineDeadError, TimeoutError) as error:
            why = str(error) or f"the engine did not answer within {TRACE_SECONDS:g} s"
            return {"trace": {"error": why}}
        return {"trace": trace_object(self._record, timelines)}

    def increments(self) -> AsyncGenerator[list[Increment]]:
        return self._run(self._jobs[0]) if len(self._jobs) == 1 else self._merged()

    async def _merged(self) -> AsyncGenerator[list[Increment]]:
        queue: asyncio.Queue[list[Increment] | Exception | None] = asyncio.Queue()
        window = asyncio.Semaphore(self._window)

        async def pump(job: Job) -> None:
            try:
                async with window, aclosing(self._run(job)) as batches:
                    async for batch in batches:
                        queue.put_nowait(batch)
            except Exception as error:
                queue.put_nowait(error)
            queue.put_nowait(None)

        tasks = [asyncio.create_task(pump(job)) for job in self._jobs]
        running = len(tasks)
        try:
            while running:
                items = [await queue.get()]
                while not queue.empty():
                    items.append(queue.get_nowait())
                batch: list[Increment] = []
                failure: Exception | None = None
                for item in items:
                    if item is None:
                        running -= 1
                    elif isinstance(item, Exception):
                        failure = failure or item
                    else:
                        batch += item
                if batch:
                    yield batch
                if failure is not None:
                    raise failure
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, job: Job) -> AsyncGenerator[list[Increment]]:
        timer = SequenceTimer(self._metrics, job.request.arrival, len(job.request.prompt_ids))
        reason: FinishReason = "abort"
        try:
            async with aclosing(_closable(self._client.submit(job.request))) as events:
                async for event in events:
                    if event.finish_reason is not None:
                        _raise_failure(event)
                    if event.token_ids:
                        timer.queued(event.queue_seconds)
                        timer.tokens(len(event.token_ids))
                    if job.sibling == 0:
                        self.usage.cached_tokens += event.cached_tokens
                    parts: list[Part] | None = None
                    if job.parts is None:
                        delta = job.output.feed(event.token_ids, event.logprobs, event.finish_reason)
                    else:
                        reasoned = job.parts.reasoning_tokens
                        delta, parts = job.parts.feed(event)
                        if self.usage.reasoning_tokens is not None:
                            self.usage.reasoning_tokens += job.parts.reasoning_tokens - reasoned
                    # What came in one event after a stop string is not part of the answer.
                    self.usage.completion_tokens += len(delta.token_ids)
                    self.usage.forced_tokens += event.forced_tokens
                    self.usage.accepted_prediction_tokens += event.accepted_draft_tokens
                    self.usage.rejected_prediction_tokens += event.rejected_draft_tokens
                    if delta.done:
                        reason = delta.finish_reason or "stop"
                    called = job.parts is not None and job.parts.called
                    yield [Increment(job.index, delta, event.prompt_logprobs, parts, called)]
                    if delta.done:
                        return
            raise EngineFaultError("the engine ended an answer without saying why; send the request again")
        except Exception as error:
            reason = "error"
            if timer.generated == 0:
                self._metrics.refused[_reason_of(error)] += 1
            raise
        finally:
            if self._record is not None:
                self._record.ended[job.index] = reason
            timer.end(reason)


def _reason_of(error: Exception) -> str:
    """A word for a metric."""
    if not isinstance(error, FourfoldError):
        return "internal_error"
    http = as_http(error)
    return http.code or http.kind


def _raise_failure(event: EngineEvent) -> None:
    if event.refused_param is not None:
        raise InvalidRequestError(event.error or "the constraint was refused", event.refused_param)
    if event.timed_out:
        raise DeadlineError(event.error or "the request was not answered in time", passed=True)
    if event.finish_reason == "error":
        raise EngineFaultError(event.error or "the engine failed on this request")
    if event.finish_reason == "abort":
        raise EngineDeadError("the engine dropped this request; send it again")


def _closable(events: AsyncIterator[EngineEvent]) -> AsyncGenerator[EngineEvent]:
    """EngineClient promises an iterator with `aclose`."""
    return cast("AsyncGenerator[EngineEvent]", events)
