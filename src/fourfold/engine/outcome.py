"""From a step's results to the events of one sequence: new tokens, logprobs, and whether it ended."""

from __future__ import annotations

import msgspec

from fourfold.engine.batch import Batch, StepResult
from fourfold.engine.batch_builder import Scheduled
from fourfold.engine.sequence import Sequence
from fourfold.errors import DeadlineError, FourfoldError, InvalidRequestError
from fourfold.grammar.guide import Guide
from fourfold.types import EngineEvent, EngineRequest, FinishReason, TokenLogprob


class Counters(msgspec.Struct):
    """What the scheduler counts; each only grows. See EngineStats."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    cached_prompt_tokens: int = 0
    preemptions: int = 0
    aborted: int = 0
    finished: int = 0
    failed: int = 0
    refused: int = 0
    timed_out: int = 0
    nan_requests: int = 0
    forced_tokens: int = 0
    rejected_answers: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0


def check_result(batch: Batch, result: StepResult) -> None:
    """Raises ValueError if a backend's arrays do not have one entry per logit row."""
    rows = len(batch.samples)
    for name in ("token", "logprob", "rank", "top_ids", "top_logprobs", "status"):
        if len(getattr(result, name)) != rows:
            raise ValueError(
                f"the backend gave {len(getattr(result, name))} entries of {name} for {rows} logit rows"
            )


def finish_event(seq: Sequence, reason: FinishReason, error: str | None = None) -> EngineEvent:
    """The last event of a sequence that did not end by itself."""
    return EngineEvent(request_id=seq.request.request_id, finish_reason=reason, error=error)


def refused_event(request: EngineRequest, error: FourfoldError) -> EngineEvent:
    """The only event of a request whose constraint turned out bad."""
    event = EngineEvent(request_id=request.request_id, finish_reason="error", error=str(error))
    event.timed_out = isinstance(error, DeadlineError)
    if isinstance(error, InvalidRequestError):
        event.refused_param = error.param or "response_format"
    return event


def token_event(
    seq: Sequence, item: Scheduled, drawn: list[int], result: StepResult, draw: int = 0
) -> EngineEvent | None:
    """Appends the drawn token to the sequence. None if this step only computed a part of the prompt.

    drawn: result.token as a list.  draw: which of the item's draws; those before it must have been taken.
    """
    if item.targets and draw == 0:
        _collect_prompt_logprobs(seq, item, result)
    if not item.samples:
        if seq.wants_tokens or seq.computed < seq.prompt_len:
            return None
        event = EngineEvent(request_id=seq.request.request_id, finish_reason="length")
    else:
        row = item.first_row + item.targets + draw
        token = drawn[row]
        seq.tokens.append(token)
        event = EngineEvent(request_id=seq.request.request_id, token_ids=[token])
        if token in seq.stop_ids:  # never drawn before min_tokens: the batch bans them until then
            event.finish_reason = "stop"
            event.stop_token = token
        elif seq.guide is not None and not _follow(seq, seq.guide, token, event):
            pass
        elif len(seq.tokens) >= seq.max_total:
            event.finish_reason = "length"
        k = seq.request.sampling.logprobs
        if k is not None:
            event.logprobs = [row_logprob(result, row, k, seq.request.allowed_vocab)]
    if not seq.delivered:
        event.cached_tokens = seq.cached_tokens
        event.queue_seconds = seq.recording.totals.queue_seconds or 0.0
        event.prompt_logprobs = seq.prompt_logprobs
    return event


def _follow(seq: Sequence, guide: Guide, token: int, event: EngineEvent) -> bool:
    """Tells the guide of the drawn token, and appends what must follow it. False if the answer ended.

    With logprobs nothing is appended: each token needs a row of its own then.
    """
    if token in seq.request.eos_ids:  # with ignore_eos: the constraint allowed it, so it is complete
        event.finish_reason = "stop"
        return False
    guide.accept(token)
    if seq.request.sampling.logprobs is None:
        for forced in guide.forced_tokens(seq.max_total - len(seq.tokens)):
            guide.accept(forced, forced=True)
            seq.tokens.append(forced)
            event.token_ids.append(forced)
            event.forced_tokens += 1
            if forced in seq.stop_ids:
                event.finish_reason = "stop"
                event.stop_token = forced
                return False
    if guide.finished:
        event.finish_reason = "stop"
        return False
    return True


def joined(first: EngineEvent, second: EngineEvent) -> EngineEvent:
    """Two events of one sequence in a row as one."""
    first.token_ids += second.token_ids
    first.forced_tokens += second.forced_tokens
    first.accepted_draft_tokens += second.accepted_draft_tokens
    first.rejected_draft_tokens += second.rejected_draft_tokens
    if first.logprobs is not None:
        first.logprobs += second.logprobs or ()
    first.finish_reason, first.stop_token, first.error = (
        second.finish_reason, second.stop_token, second.error,
    )  # fmt: skip
    return first


def hold(seq: Sequence, event: EngineEvent) -> EngineEvent | None:
    """Keeps `event` back until the answer is finished; then the whole answer as one event."""
    held = seq.held
    if held is None:
        held = seq.held = event
    else:
        joined(held, event)
    return held if held.finish_reason is not None else None


def row_logprob(result: StepResult, row: int, k: int, allowed_vocab: int | None = None) -> TokenLogprob:
    """The k best of one logit row beside the token itself. Fewer where the vocabulary is smaller than k, or
    where some of the best are ids without a token (at or above allowed_vocab), which nobody can name."""
    limit = 2**31 if allowed_vocab is None else allowed_vocab
    top = [
        (int(token), float(logprob))
        for token, logprob in zip(
            result.top_ids[row, :k].tolist(), result.top_logprobs[row, :k].tolist(), strict=True
        )
        if 0 <= token < limit
    ]
    return TokenLogprob(int(result.token[row]), float(result.logprob[row]), int(result.rank[row]), tuple(top))


def _collect_prompt_logprobs(seq: Sequence, item: Scheduled, result: StepResult) -> None:
    owed = seq.prompt_logprobs
    if owed is None:
        raise ValueError(f"request {seq.request.request_id} has target rows but asked for no prompt logprobs")
    k = seq.request.sampling.prompt_logprobs or 0
    allowed = seq.request.allowed_vocab
    owed.extend(row_logprob(result, item.first_row + i, k, allowed) for i in range(item.targets))
