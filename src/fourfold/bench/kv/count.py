"""Prompt tokens that were not recomputed, beside a cache that never forgets; KV blocks with and without
sharing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fourfold.bench.kv.backend import counting_engine
from fourfold.bench.kv.workloads import Ask, Workload
from fourfold.engine.loop import Engine
from fourfold.types import EngineEvent, EngineRequest, SamplingParams


@dataclass(frozen=True, slots=True)
class Counted:
    """prompt_tokens: of all requests.  cached_tokens: of these, not computed.  ideal_tokens: what an infinite
    cache would not have computed, of requests that come one after the other; one token of a prompt always is.
    shared_blocks: in use, when the requests together held most: held_blocks, which would be in use without
    sharing.
    """

    name: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    ideal_tokens: int
    computed_tokens: int
    held_blocks: int
    shared_blocks: int
    pool_blocks: int

    @property
    def hit_share(self) -> float:
        return self.cached_tokens / self.prompt_tokens

    @property
    def ideal_share(self) -> float:
        return self.ideal_tokens / self.prompt_tokens

    @property
    def saved_share(self) -> float:
        """Of the blocks that would be in use without sharing."""
        return 1 - self.shared_blocks / self.held_blocks

    def record(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in self.__slots__}
        shares = {name: getattr(self, name) for name in ("hit_share", "ideal_share", "saved_share")}
        return {**fields, **shares}


class InfiniteCache:
    """A trie over tokens: the longest beginning of a prompt that was ever seen."""

    def __init__(self) -> None:
        self._root: dict[int, Any] = {}

    def known(self, tokens: list[int]) -> int:
        node = self._root
        for count, token in enumerate(tokens):
            found = node.get(token)
            if found is None:
                return count
            node = found
        return len(tokens)

    def add(self, tokens: list[int]) -> None:
        node = self._root
        for token in tokens:
            node = node.setdefault(token, {})


def count(
    workload: Workload,
    blocks: int,
    block_size: int,
    max_model_len: int,
    progress: Callable[[int], None] = lambda _: None,
) -> Counted:
    """Runs the workload. progress: told how many requests are done.

    Raises InvalidRequestError for a request that does not fit."""
    engine, backend = counting_engine(blocks, block_size, max_model_len, max_num_seqs=64)
    ideal = InfiniteCache()
    requests = total = cached = best = held = shared = 0
    for asks in workload.rounds():
        answers: dict[str, list[int]] = {}
        for ask in asks:
            name = str(requests)
            requests += 1
            total += len(ask.prompt)
            best += min(ideal.known(ask.prompt), len(ask.prompt) - 1)
            ideal.add(ask.prompt)
            answers[name] = []
            engine.add(make_request(name, ask))
        while engine.has_work:
            for event in engine.step():
                answers[event.request_id].extend(event.token_ids)
                cached += event.cached_tokens
                _must_be_fine(event)
            now = sum(len(table.blocks) for table in engine.scheduler.tables())
            if now > held:
                held, shared = now, engine.cache.ledger.live
        for ask, answer in zip(asks, answers.values(), strict=True):
            ideal.add(ask.prompt + answer)
        workload.answered(list(answers.values()))
        progress(requests)
    engine.close()
    return Counted(
        workload.name, requests, total, cached, best, backend.computed_tokens, held, shared, blocks
    )


def drain(engine: Engine) -> None:
    """Runs the engine until nothing is left. Raises RuntimeError for an answer that failed."""
    while engine.has_work:
        for event in engine.step():
            _must_be_fine(event)


def _must_be_fine(event: EngineEvent) -> None:
    if event.finish_reason not in (None, "length"):
        raise RuntimeError(f"request {event.request_id} ended with {event.finish_reason}: {event.error}")


def make_request(name: str, ask: Ask) -> EngineRequest:
    sampling = SamplingParams(temperature=0.0, max_tokens=ask.max_tokens, ignore_eos=True)
    return EngineRequest(request_id=name, prompt_ids=ask.prompt, sampling=sampling)
