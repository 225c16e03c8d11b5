"""What the engine tells of one request: when it waited, what for, what was computed, reused, lost and sent.

Plain data that crosses processes as MessagePack; `engine.recorder` writes it.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from fourfold.types import EngineStats

EventName = Literal[
    "queued", "compile", "waiting", "held", "admitted", "cache_hit", "recomputed", "prefill", "decode",
    "preempted", "taken_back", "finished",
]  # fmt: skip
"""queued: in the engine's queue; `tokens` of prompt; reason: how many waited already.
compile: its constraint, from `at` to `until`; reason: "compiled" or "cached".
waiting: the scheduler came to it and could not take it; reason: what was missing.
held: it waits because a neighbour computes the next block of its prefix.
admitted: it has a place in the batch; `cached` of its `tokens` came from the cache.
cache_hit: `cached` further tokens came from the cache; reason: the tier.
recomputed: `tokens` that a lower tier has are computed, because that is faster; reason: the tier.
prefill: one chunk of `tokens` known tokens was computed in one step.
decode: `steps` steps in a row brought `tokens` tokens; `slowest` seconds lay between two of them at most.
preempted: its blocks went to others; `tokens` computed ones must come back; reason: why.
taken_back: validation refused the answer; `tokens` of it are drawn anew; reason: "validation".
finished: reason: the finish reason.
"""

REASONS = {
    "max_num_seqs": "as many requests are running as may run at a time",
    "kv_blocks": "too few KV blocks are free",
    "itl_target": "one more answer would slow the others down beyond the target",
    "behind": "others of its turn wait for room too",
    "fairness": "another tenant or user had fewer places than its share",
    "priority": "a request of better priority needed its place",
    "prefix_in_flight": "a neighbour computes its prefix, and waiting for that is cheaper",
    "validation": "validation refused the answer",
}
"""What the reasons of events mean; those not here are words."""

State = Literal["compiling", "waiting", "held", "prefill", "decode", "finished"]


class TimelineEvent(msgspec.Struct, kw_only=True, omit_defaults=True):
    """at, until: seconds since the request arrived. steps: how many steps in a row this stands for.

    forced: of `tokens`, those a constraint left no choice for. drafted, accepted: of speculation.
    """

    event: EventName
    at: float
    until: float | None = None
    steps: int = 1
    tokens: int = 0
    cached: int = 0
    forced: int = 0
    drafted: int = 0
    accepted: int = 0
    slowest: float = 0.0
    reason: str = ""


class Totals(msgspec.Struct, kw_only=True):
    """Exact also when events were dropped. Tokens of the whole life of a request.

    cached_tokens: of the prompt, found in the cache at the first admission (what `usage` says).
    reused_tokens: found in the cache when it came back after a preemption.
    computed_tokens: through the model, repeated ones too.
    generated_tokens: of the answer, without what was taken back.
    queue_seconds: arrival to first admission. prefill_seconds: from there to the first token.
    decode_seconds: first to last token. Each None before it is known.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    reused_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    forced_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    taken_back_tokens: int = 0
    steps: int = 0
    preemptions: int = 0
    queue_seconds: float | None = None
    prefill_seconds: float | None = None
    decode_seconds: float | None = None
    total_seconds: float | None = None
    """Arrival to end."""


class Timeline(msgspec.Struct, kw_only=True):
    """One sequence's life so far.

    arrived: wall clock, seconds since 1970.
    dropped: events that were left out, because there were too many; always of the middle.
    error: why it failed, if it did.
    """

    request_id: str
    arrived: float
    state: State
    totals: Totals
    events: list[TimelineEvent]
    dropped: int = 0
    finish_reason: str | None = None
    error: str | None = None


class LiveRequest(msgspec.Struct, kw_only=True):
    """A line of a live view. age: seconds since arrival. tokens_per_second: of the answer, since its first
    token."""

    request_id: str
    state: State
    age: float
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    generated_tokens: int
    preemptions: int
    tokens_per_second: float


class HotPrefix(msgspec.Struct, kw_only=True):
    """A prefix of the cache that was used often.

    tokens: its length.  head, tail: its first and last token ids, not overlapping.
    pinned: it cannot be evicted.  in_use: running requests share it.
    """

    salt: str
    tokens: int
    hits: int
    head: list[int]
    tail: list[int]
    pinned: bool = False
    in_use: bool = False


class TreeView(msgspec.Struct, kw_only=True):
    """The prefix cache. nodes: blocks in it, partly filled ones too.  domains: salts, each with a tree.

    complete: False if it was too large to look at all of it; tokens then count only what was seen.
    """

    nodes: int
    tokens: int
    domains: int
    pinned_tokens: int
    hottest: list[HotPrefix]
    complete: bool = True


class EngineView(msgspec.Struct, kw_only=True):
    """One moment of an engine, between two steps.

    requests: open ones, the first MAX_VIEW_REQUESTS.  open_requests: how many there are.
    tree: None without a prefix cache.
    """

    stats: EngineStats
    requests: list[LiveRequest]
    open_requests: int
    tree: TreeView | None


MAX_VIEW_REQUESTS = 512
