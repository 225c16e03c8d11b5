"""Backend factories for engine processes in tests. The model's name says what shall go wrong."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import numpy as np

from fourfold.config import EngineConfig
from fourfold.engine.batch import Batch
from fourfold.errors import LoadError
from fourfold.types import ModelInfo

from .fake_backend import FakeBackend
from .helpers import model_info

KILL_TOKEN = 66
"""A prompt that starts with this token ends the process, as a crash in native code would."""


def _kill_on_token(batch: Batch) -> None:
    firsts = batch.tokens[np.cumsum(batch.seq_tokens) - batch.seq_tokens]
    if ((firsts == KILL_TOKEN) & (batch.seq_context == 0)).any():
        os.kill(os.getpid(), signal.SIGKILL)


def make(config: EngineConfig, progress: Callable[[str, float], None]) -> tuple[FakeBackend, ModelInfo]:
    progress("weights", 0.5)
    if config.model == "broken":
        raise LoadError("broken.gguf: tensor 'x' is truncated")
    if config.model == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    if config.model == "bug":
        raise RuntimeError("surprise")
    delay = {"slow": 0.02, "fake": 0.001}.get(config.model, 0.0)
    hook = _kill_on_token
    if config.model == "stuck":
        hook = lambda batch: time.sleep(3600)  # noqa: E731
    backend = FakeBackend(num_blocks=config.num_kv_blocks or 256, delay=delay, hook=hook)
    return backend, model_info(backend, 512)
