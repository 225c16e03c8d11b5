"""The real engine inside the test's process: scheduler, cache and native runtime, driven step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fourfold.build.load import load_engine_backend
from fourfold.config import EngineConfig
from fourfold.engine.batch import Backend, Batch, StepResult
from fourfold.engine.loop import Engine
from fourfold.text.tokenizer import Tokenizer, load_tokenizer
from fourfold.types import EngineEvent, EngineRequest, SamplingParams
from fourfold.weights.open import open_checkpoint


class Watched:
    """A backend that shows its batches and results to `hook`, and may be told to give the logits as well."""

    def __init__(
        self, inner: Backend, hook: Callable[[Batch, StepResult], None] | None, logits: bool = False
    ) -> None:
        self._inner = inner
        self._hook = hook
        self._logits = logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def run(self, batch: Batch) -> StepResult:
        batch.return_logits = self._logits
        result = self._inner.run(batch)
        if self._hook is not None:
            self._hook(batch, result)
        return result


@contextmanager
def engine(
    model: Path,
    hook: Callable[[Batch, StepResult], None] | None = None,
    *,
    logits: bool = False,
    **config: Any,
) -> Iterator[Engine]:
    settings = EngineConfig(model=str(model), seed=1, **config)
    backend, info = load_engine_backend(settings, lambda *_: None)
    made = Engine(Watched(backend, hook, logits), info, settings)
    try:
        yield made
    finally:
        made.close()


def tokenizer_of(model: Path) -> Tokenizer:
    return load_tokenizer(open_checkpoint(model))


def request(name: str, prompt: Sequence[int], tokens: int, **sampling: Any) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        prompt_ids=list(prompt),
        sampling=SamplingParams(**{"temperature": 0, "max_tokens": tokens, "ignore_eos": True, **sampling}),
    )


def finish(
    engine: Engine,
    requests: Sequence[EngineRequest],
    *,
    arrive: Callable[[int], int] = lambda index: 0,
    at_step: Callable[[int], None] = lambda step: None,
) -> dict[str, list[EngineEvent]]:
    """Events of each request. Request `index` is added before step arrive(index); at_step may add or abort
    others. The ledger must balance after every step."""
    waiting = sorted(enumerate(requests), key=lambda pair: (arrive(pair[0]), pair[0]))
    open_ids = {each.request_id for each in requests}
    events: dict[str, list[EngineEvent]] = {name: [] for name in open_ids}
    step = 0
    while open_ids or engine.has_work:
        while waiting and arrive(waiting[0][0]) <= step:
            engine.add(waiting.pop(0)[1])
        at_step(step)
        for event in engine.step():
            events.setdefault(event.request_id, []).append(event)
            if event.finish_reason is not None:
                open_ids.discard(event.request_id)
        stats = engine.stats()
        assert stats.free_blocks + stats.cached_blocks + stats.live_blocks == stats.total_blocks
        step += 1
        assert step < 100_000
    assert engine.stats().live_blocks == 0
    return events


def tokens_of(events: dict[str, list[EngineEvent]]) -> dict[str, list[int]]:
    return {name: [t for event in found for t in event.token_ids] for name, found in events.items()}
