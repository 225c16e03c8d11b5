"""Engines over the fake backend, and ways to run requests through them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fourfold.config import EngineConfig
from fourfold.engine.loop import Engine
from fourfold.engine.speculate.build import LoadedDraft
from fourfold.grammar.compile import TokenSource
from fourfold.types import Constraint, EngineEvent, EngineRequest, ModelInfo, SamplingParams

from .fake_backend import FakeBackend


def model_info(backend: FakeBackend, max_model_len: int = 256) -> ModelInfo:
    return ModelInfo(
        name="fake", path="", family="fake", parameters=0, vocab_size=backend.vocab_size,
        max_model_len=max_model_len,
        block_size=backend.block_size, num_blocks=backend.num_blocks, max_num_seqs=1,
        max_num_batched_tokens=1, weight_bytes=0,
    )  # fmt: skip


def make_engine(
    backend: FakeBackend | None = None,
    max_model_len: int = 256,
    kv_events: Any = None,
    load_tokens: Callable[[], TokenSource] | None = None,
    draft: LoadedDraft | None = None,
    **config: Any,
) -> Engine:
    backend = backend or FakeBackend()
    settings = EngineConfig(**{"seed": 1, **config})
    return Engine(backend, model_info(backend, max_model_len), settings, kv_events, load_tokens, draft)


def request(
    request_id: str, prompt: list[int], *, salt: str = "", tenant: str = "", user: str = "",
    weight: float = 1.0, priority: int = 0, arrival: float = 0.0, timeout: float | None = None,
    ttft_timeout: float | None = None, eos: tuple[int, ...] = (), allowed_vocab: int | None = None,
    constraint: Constraint | None = None,
    **sampling: Any,
) -> EngineRequest:  # fmt: skip
    return EngineRequest(
        request_id=request_id, prompt_ids=prompt, cache_salt=salt, tenant=tenant, user=user, weight=weight,
        priority=priority, arrival=arrival, timeout=timeout, ttft_timeout=ttft_timeout,
        eos_ids=eos, allowed_vocab=allowed_vocab, constraint=constraint,
        sampling=SamplingParams(**{"temperature": 0.0, "max_tokens": 8, **sampling}),
    )  # fmt: skip


def check(engine: Engine) -> None:
    """The ledger, the tree and every table agree."""
    engine.cache.check(engine.scheduler.tables())


def run(engine: Engine, *requests: EngineRequest, checked: bool = True) -> dict[str, list[EngineEvent]]:
    """Runs everything to its end. checked: the ledger after each step."""
    events: dict[str, list[EngineEvent]] = {}
    for item in requests:
        engine.add(item)
    for _ in range(10_000):
        if not engine.has_work:
            break
        for event in engine.step():
            events.setdefault(event.request_id, []).append(event)
        if checked:
            check(engine)
    assert not engine.has_work, "no end in sight"
    return events


def tokens(events: list[EngineEvent]) -> list[int]:
    return [token for event in events for token in event.token_ids]
