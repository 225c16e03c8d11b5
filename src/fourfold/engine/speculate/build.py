"""From the configuration to a speculator."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from fourfold.config import EngineConfig, SpeculationConfig
from fourfold.engine.batch import Backend
from fourfold.engine.speculate.draft_model import DraftModel
from fourfold.engine.speculate.governor import Governor
from fourfold.engine.speculate.lookup import Lookup
from fourfold.engine.speculate.proposer import Proposer
from fourfold.engine.speculate.speculator import Speculator
from fourfold.types import ModelInfo

Factory = Callable[[EngineConfig, Callable[[str, float], None]], tuple[Backend, ModelInfo]]


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedDraft:
    """The draft model. max_len: its longest sequence in tokens."""

    backend: Backend
    max_len: int


def load_draft(
    config: EngineConfig, model: ModelInfo, factory: Factory, progress: Callable[[str, float], None]
) -> LoadedDraft | None:
    """None if the configuration names no draft model. Raises what `factory` raises."""
    if config.speculation is None or config.speculation.model is None:
        return None
    settings = dataclasses.replace(
        config,
        model=config.speculation.model,
        max_model_len=None,
        kv_cache_bytes=None,
        num_kv_blocks=model.num_blocks,
        speculation=None,
    )
    backend, info = factory(settings, lambda stage, done: progress(f"draft model: {stage}", done))
    return LoadedDraft(backend, info.max_model_len)


def make_speculator(
    settings: SpeculationConfig | None, vocab_size: int, draft: LoadedDraft | None
) -> Speculator:
    """Predictions and earlier answers under the same constraint are always looked at: requests bring those.

    Raises ConfigError."""
    settings = settings or SpeculationConfig(method=None)
    proposers: list[Proposer] = [
        Lookup(settings.prompt_lookup_min, settings.prompt_lookup_max, own=settings.method == "ngram")
    ]
    if draft is not None:
        proposers.append(DraftModel(draft.backend, vocab_size, draft.max_len))
    return Speculator(
        proposers,
        Governor(settings.num_speculative_tokens),
        settings.disable_by_batch_size,
        everywhere=settings.method is not None,
    )
