"""Who goes first, who must wait, who is refused. Pure functions; the scheduler does the moves."""

from __future__ import annotations

import msgspec

from fourfold.errors import InvalidRequestError
from fourfold.types import MAX_TIMEOUT, EngineRequest

Rank = tuple[int, float, int]
"""(priority, arrival, ordinal): the smaller runs first and is preempted last. Never equal for two."""

MAX_HELD = 8
"""Waiting sequences passed over in one step because a neighbour is computing their next block."""


class Limits(msgspec.Struct, frozen=True):
    """Bounds of one engine. Lengths in tokens, prompt and answer together.

    block_size: tokens per KV block.  num_blocks: the pool.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_waiting: int
    block_size: int
    num_blocks: int
    vocab_size: int

    @property
    def max_len(self) -> int:
        """The enforced length: what the model allows and what the whole pool holds."""
        return min(self.max_model_len, self.num_blocks * self.block_size)

    @property
    def max_seqs(self) -> int:
        """At most one per token of budget, so that every running sequence can advance in every step."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)


def rank_of(request: EngineRequest, ordinal: int) -> Rank:
    return (request.priority, request.arrival, ordinal)


def check_request(request: EngineRequest, limits: Limits) -> None:
    """Raises InvalidRequestError for what can never be served, naming the value and the limit."""
    for name in ("timeout", "ttft_timeout"):
        seconds = getattr(request, name)
        if seconds is not None and not 0 < seconds <= MAX_TIMEOUT:
            raise InvalidRequestError(
                f"{name} must be above 0 and at most {MAX_TIMEOUT} seconds, got {seconds!r}", name
            )
    request.sampling.validate(limits.vocab_size)
    prompt, sampling = request.prompt_ids, request.sampling
    if not prompt:
        raise InvalidRequestError("the prompt is empty: at least 1 token is needed", "prompt")
    for token in (min(prompt), max(prompt)):
        if not 0 <= token < limits.vocab_size:
            raise InvalidRequestError(
                f"the prompt holds token id {token}, but ids run from 0 to {limits.vocab_size - 1}", "prompt"
            )
    guessed = request.prediction_ids
    if guessed and not 0 <= min(guessed) <= max(guessed) < limits.vocab_size:
        raise InvalidRequestError(
            f"the prediction holds a token id outside 0 to {limits.vocab_size - 1}", "prediction"
        )
    wanted = min(1, sampling.max_tokens) if sampling.max_tokens is not None else 1
    if len(prompt) + wanted > limits.max_len:
        reason = "the model's context" if limits.max_len == limits.max_model_len else "the KV cache"
        raise InvalidRequestError(
            f"the prompt has {len(prompt)} tokens and {wanted} more must fit, but the limit is "
            f"{limits.max_len} tokens ({reason}); shorten the prompt or raise the limit",
            "prompt",
            "context_length_exceeded",
        )
    if sampling.max_tokens is not None and sampling.max_tokens > limits.max_len:
        raise InvalidRequestError(
            f"max_tokens is {sampling.max_tokens}, but the whole context has {limits.max_len} tokens; "
            "leave it out to fill the context",
            "max_tokens",
        )


def retry_after(queued_tokens: int, tokens_per_second: float) -> float:
    """Seconds until about a quarter of the queue is gone at the measured speed; between 1 and 60."""
    if tokens_per_second <= 0:
        return 1.0
    return min(60.0, max(1.0, queued_tokens / tokens_per_second / 4))
