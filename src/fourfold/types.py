"""The vocabulary shared by every layer: what a request asks for and what comes back.

Everything here is a `msgspec.Struct`, so that it crosses the process boundary between the HTTP front
and the engine as MessagePack without a second set of classes. Nothing here imports another module of
the project but `errors`.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec

from fourfold.errors import InvalidRequestError

FinishReason = Literal["stop", "length", "abort", "error"]

MAX_LOGPROBS = 20
"""Most alternatives reported per token (the OpenAI limit for chat)."""

MAX_N = 128
"""Most completions of one prompt in one request."""


MAX_TIMEOUT = 86400
"""Seconds that a request may allow at most."""


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an answer must be, by one of these (vLLM's names; see docs/json-schema.md).

    json: a JSON Schema, as a value or JSON text.  regex: matched whole.  choice: one of these texts.
    grammar: Lark, or GBNF, which is told by its `::=`.  json_object: any JSON object.
    structural_tag: a value or JSON text.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to choose tokens, and when to stop. Field names and meanings are those of vLLM and OpenAI.

    temperature: 0 means greedy; values below 1e-5 are treated as greedy.
    top_k: 0 or -1 switches it off.  top_p, min_p, typical_p: 1, 0 and 1 switch them off.
    repetition_penalty: divides (multiplies, if negative) logits of tokens seen in prompt or output
        (Keskar et al. 2019, CTRL).  presence/frequency_penalty: subtract per token seen in the output.
    seed: per request; the drawn tokens do not depend on the neighbours in the batch.
    logprobs: None for none, 0 for the chosen token only, k for the k best as well.
    prompt_logprobs: the same for prompt tokens.
    max_tokens: None means "until the context is full".
    structured_outputs: what the answer must be; for the offline API, which makes a Constraint of it.
    stop: strings that end the answer; they are not part of it unless include_stop_str_in_output.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputsParams | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5

    def validate(self, vocab_size: int | None = None) -> None:
        """Raises InvalidRequestError naming the field, its value and its limits."""

        def check(ok: bool, field: str, limits: str) -> None:
            if not ok:
                raise InvalidRequestError(f"{field} must be {limits}, got {getattr(self, field)!r}", field)

        for field in (
            "temperature", "top_p", "min_p", "typical_p",
            "repetition_penalty", "presence_penalty", "frequency_penalty",
        ):  # fmt: skip
            check(math.isfinite(getattr(self, field)), field, "a finite number")
        check(1 <= self.n <= MAX_N, "n", f"between 1 and {MAX_N}")
        check(0 <= self.temperature <= 100, "temperature", "between 0 and 100")
        check(self.top_k >= -1, "top_k", "0 or -1 (off) or at least 1")
        check(0 < self.top_p <= 1, "top_p", "in (0, 1]")
        check(0 <= self.min_p <= 1, "min_p", "in [0, 1]")
        check(0 < self.typical_p <= 1, "typical_p", "in (0, 1]")
        check(0 < self.repetition_penalty <= 100, "repetition_penalty", "in (0, 100]")
        check(-2 <= self.presence_penalty <= 2, "presence_penalty", "in [-2, 2]")
        check(-2 <= self.frequency_penalty <= 2, "frequency_penalty", "in [-2, 2]")
        check(self.max_tokens is None or self.max_tokens >= 0, "max_tokens", "at least 0")
        check(self.min_tokens >= 0, "min_tokens", "at least 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})", "min_tokens"
            )
        check(self.seed is None or -(2**63) <= self.seed < 2**64, "seed", "a 64-bit integer")
        for field in ("logprobs", "prompt_logprobs"):
            value = getattr(self, field)
            check(value is None or 0 <= value <= MAX_LOGPROBS, field, f"between 0 and {MAX_LOGPROBS}")
        check(len(self.stop) <= 64 and all(self.stop), "stop", "at most 64 non-empty strings")
        check(all(len(s) <= 4096 for s in self.stop), "stop", "strings of at most 4096 characters")
        check(len(self.stop_token_ids) <= 256, "stop_token_ids", "at most 256 ids")
        check(len(self.logit_bias) <= 4096, "logit_bias", "at most 4096 entries")
        if vocab_size is not None:
            for token in (*self.logit_bias, *self.stop_token_ids):
                if not 0 <= token < vocab_size:
                    field = "logit_bias" if token in self.logit_bias else "stop_token_ids"
                    raise InvalidRequestError(
                        f"{field} names token {token}, but ids run from 0 to {vocab_size - 1}", field
                    )
        for token, bias in self.logit_bias.items():
            if not -100 <= bias <= 100:
                raise InvalidRequestError(
                    f"logit_bias of token {token} must be in [-100, 100], got {bias!r}", "logit_bias"
                )


class Constraint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What every answer must be; made by `grammar.sources`, which checks it.

    grammar: for the grammar compiler (llguidance's notation).
    schema: JSON text of a JSON Schema that the finished answer must satisfy as well, because the grammar
        allows more; None if the grammar says it all.
    unsaid: "#/path: keyword" of what only validation guarantees.
    param: field of the request that it came in.
    after: the value that the schema is of begins after this, where reasoning may come first (a control token
        is written <|id|>).
    counted: it limits how many tokens a part has, so that none can be tried and taken back.
    """

    grammar: str
    schema: str | None = None
    unsaid: tuple[str, ...] = ()
    param: str = "response_format"
    after: str = ""
    counted: bool = False

    @property
    def guarantee(self) -> str:
        """ "grammar" or "validation": by what an answer is valid."""
        return "grammar" if self.schema is None else "validation"


class EngineRequest(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One sequence for the engine to continue. `n > 1` is expanded by the client into n of these.

    prompt_ids: token ids, at least one.
    eos_ids: ids that end the answer unless sampling.ignore_eos (of config, generation config and tokenizer).
    allowed_vocab: ids at or above it have no token and are never sampled (Qwen pads its logits).
    cache_salt: who may share KV with this request; derived from the API key, narrowed by the body.
    tenant: who shares the engine fairly with others, by weight; derived from the API key.
    user: the same among those of one tenant; from the body.
    priority: of one tenant's requests, lower runs first.
    arrival: time.monotonic() seconds of the process that made it; 0 if it does not say.
    timeout: seconds after arrival in which the whole answer must come; None for no limit.
    ttft_timeout: the same for its first token.
    constraint: what the answer must be.
    prediction_ids: what the client expects the answer to be; only makes it faster.
    """

    request_id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    eos_ids: tuple[int, ...] = ()
    allowed_vocab: int | None = None
    cache_salt: str = ""
    tenant: str = ""
    user: str = ""
    weight: float = 1.0
    priority: int = 0
    arrival: float = 0.0
    timeout: float | None = None
    ttft_timeout: float | None = None
    constraint: Constraint | None = None
    prediction_ids: list[int] = []


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of one token under the model's own distribution (before temperature and penalties).

    rank: 1 for the most likely token.  top: (token id, logprob) of the k best, best first.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class EngineEvent(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What one step brought for one request.

    token_ids: the new tokens, in order; an EOS or stop token is included as the last one.
    logprobs: one entry per new token, if asked for.
    prompt_logprobs: sent once, with the first event: None for the first prompt token, then one per token.
    finish_reason / stop_token: set on the last event; stop_token is the id that ended the answer, if one did.
    error: message, when finish_reason is "error".  refused_param: the field of the request that is at
        fault, if the request is.
    timed_out: with an error: it was not answered in the time it allows.
    forced_tokens: how many of token_ids the constraint left no choice for and no step of their own computed.
    cached_tokens: prompt tokens whose KV was reused (first event).
    accepted_draft_tokens / rejected_draft_tokens: guesses at the answer that were right, and those that were
        not; the latter are not among token_ids.
    queue_seconds: from its arrival until it had a place in the batch (first event).
    """

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    error: str | None = None
    refused_param: str | None = None
    timed_out: bool = False
    forced_tokens: int = 0
    cached_tokens: int = 0
    accepted_draft_tokens: int = 0
    rejected_draft_tokens: int = 0
    queue_seconds: float = 0.0


class ModelInfo(msgspec.Struct, kw_only=True):
    """What the front must know of the loaded model; sent by the engine when it is ready."""

    name: str
    path: str
    family: str
    parameters: int
    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    weight_bytes: int
    kv_identity: str = ""
    """What the bytes of a KV block depend on beside its tokens: equal identities, equal bytes."""
    description: dict[str, str] = {}


class PinInfo(msgspec.Struct, kw_only=True):
    """A pinned prefix; tokens: how many of it are pinned, in full blocks."""

    name: str
    tokens: int
    blocks: int


class TierStats(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """KV blocks below the pool; all zero where there is no such tier.

    saved: copied from the pool to host memory.  restored: the other way.  skipped: left out, because a queue
    or the host memory was full.  forgone: left out, because computing them again is faster.
    save_seconds, restore_seconds, disk_read_seconds: of copying one block, as measured lately.
    disk_bad_files: torn, altered or foreign ones, which are ignored.
    """

    host_blocks: int = 0
    host_capacity: int = 0
    saved_blocks: int = 0
    skipped_blocks: int = 0
    restored_blocks: int = 0
    forgone_blocks: int = 0
    save_seconds: float = 0.0
    restore_seconds: float = 0.0
    disk_read_seconds: float = 0.0
    queued_writes: int = 0
    queued_prefetches: int = 0
    disk_blocks: int = 0
    disk_bytes: int = 0
    disk_read_blocks: int = 0
    disk_written_blocks: int = 0
    disk_evicted_blocks: int = 0
    disk_bad_files: int = 0
    disk_write_errors: int = 0


class EngineStats(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A snapshot of the engine, cheap enough to send a few times per second. Counters only ever grow."""

    step: int = 0
    running: int = 0
    waiting: int = 0
    free_blocks: int = 0
    cached_blocks: int = 0
    live_blocks: int = 0
    in_transfer_blocks: int = 0
    total_blocks: int = 0
    tree_blocks: int = 0
    """In the prefix tree, cached or live."""
    evicted_blocks: int = 0
    copied_tokens: int = 0
    """Not recomputed thanks to copies of partly shared blocks."""
    pinned_blocks: int = 0
    """Of the live ones, those of pinned prefixes."""
    tiers: TierStats = TierStats()
    prompt_tokens: int = 0
    generation_tokens: int = 0
    cached_prompt_tokens: int = 0
    preemptions: int = 0
    aborted: int = 0
    finished: int = 0
    refused: int = 0
    """Requests that could not have been answered in the time they allow."""
    timed_out: int = 0
    """Requests that were taken and not answered in the time they allow."""
    nan_requests: int = 0
    forced_tokens: int = 0
    prefill_tokens: int = 0
    """Tokens computed that were known before: of prompts, and again after preemptions."""
    cached_tokens_by_tier: dict[str, int] = {}
    recomputed_tokens_by_tier: dict[str, int] = {}
    """Found in the cache, also after preemptions."""
    preemptions_by_reason: dict[str, int] = {}
    draft_tokens: int = 0
    """Tokens guessed by speculation."""
    accepted_draft_tokens: int = 0
    """Of those, the ones that were drawn, too."""
    rejected_answers: int = 0
    """Answers that validation refused and that were taken back to a choice."""
    last_progress: float = 0.0
    """time.monotonic() of the last step that computed something, or of start."""
    step_seconds: float = 0.0
    """Wall seconds spent in steps."""
    backend_seconds: float = 0.0
    """Wall seconds of those spent inside the backend."""
    rss_bytes: int = 0
