"""A backend that computes nothing, and an engine over it: what is left is scheduler and cache."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fourfold.config import EngineConfig
from fourfold.engine.batch import Batch, StepResult
from fourfold.engine.loop import Engine
from fourfold.types import ModelInfo

VOCABULARY = 50_000


class NoBackend:
    """See Backend. Draws depend on the position in the answer alone."""

    vocab_size = VOCABULARY
    block_bytes = 1

    def __init__(self, block_size: int, num_blocks: int, max_batch_tokens: int) -> None:
        self.block_size, self.num_blocks, self.max_batch_tokens = block_size, num_blocks, max_batch_tokens
        self.computed_tokens = 0

    def run(self, batch: Batch) -> StepResult:
        self.computed_tokens += len(batch.tokens)
        rows = len(batch.samples)
        return StepResult(
            (batch.samples["counter"] % 50 + 1).astype(np.int32),
            np.full(rows, np.nan, np.float32),
            np.zeros(rows, np.int32),
            np.zeros((rows, 0), np.int32),
            np.zeros((rows, 0), np.float32),
            np.zeros(rows, np.uint8),
        )

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        pass

    def read_block(self, block: int, out: NDArray[np.uint8]) -> None:
        raise NotImplementedError("the counting engine has no tiers")

    def write_block(self, block: int, data: NDArray[np.uint8]) -> None:
        raise NotImplementedError("the counting engine has no tiers")

    def close(self) -> None:
        pass


def counting_engine(
    blocks: int, block_size: int, max_model_len: int, max_num_seqs: int, prefix_caching: bool = True
) -> tuple[Engine, NoBackend]:
    # Pacing goes by measured seconds; without it the counts are the same wherever this runs.
    config = EngineConfig(
        model="none", seed=1, max_num_seqs=max_num_seqs, prefix_caching=prefix_caching, max_itl_ratio=0
    )
    backend = NoBackend(block_size, blocks, config.max_num_batched_tokens)
    model = ModelInfo(
        name="none", path="", family="none", parameters=0, vocab_size=VOCABULARY, max_model_len=max_model_len,
        block_size=block_size, num_blocks=blocks, max_num_seqs=max_num_seqs, max_num_batched_tokens=1,
        weight_bytes=0,
    )  # fmt: skip
    return Engine(backend, model, config), backend
