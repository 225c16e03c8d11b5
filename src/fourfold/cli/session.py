"""Loading a model for commands that answer in this process."""

from __future__ import annotations

import dataclasses

from fourfold.config import EngineConfig
from fourfold.llm import LLM
from fourfold.progress import ReportedProgress


def load(config: EngineConfig) -> LLM:
    """The model of `config`, with progress on standard error while it is fetched and loaded."""
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    model = fields.pop("model")
    with ReportedProgress() as progress:
        return LLM(model, progress=progress, **fields)
