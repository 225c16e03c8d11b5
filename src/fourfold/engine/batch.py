"""What the scheduler hands to a backend for one step, and what comes back. Arrays only: no request objects.

The scheduler owns these objects; a backend reads a Batch during `run` and keeps nothing of it.
"""

from __future__ import annotations

from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from fourfold.engine.masks import Masks

SAMPLE_DTYPE = np.dtype(
    [
        ("seed", "<u8"),
        ("counter", "<u8"),  # index of the token in its request: a draw depends on (seed, counter) only
        ("row", "<i4"),  # row of Batch.tokens whose hidden state is read
        ("target", "<i4"),  # >= 0: do not sample, report this token's logprob (prompt logprobs)
        ("temperature", "<f4"),  # 0: greedy
        ("top_k", "<i4"),  # 0: off
        ("top_p", "<f4"),  # 1: off
        ("min_p", "<f4"),  # 0: off
        ("typical_p", "<f4"),  # 1: off
        ("repetition_penalty", "<f4"),  # 1: off
        ("presence_penalty", "<f4"),  # 0: off
        ("frequency_penalty", "<f4"),  # 0: off
        ("logprobs", "<i4"),  # -1: none, 0: chosen token only, k: k best too
        ("allowed_vocab", "<i4"),  # ids at or above are never sampled
        ("history_start", "<i4"),  # Batch.history[start:prompt_end] prompt ids, [prompt_end:end] output ids;
        ("history_prompt_end", "<i4"),  # empty unless a penalty is on
        ("history_end", "<i4"),
        ("bias_start", "<i4"),  # Batch.bias_ids / bias_values [start:end]
        ("bias_end", "<i4"),
        ("ban_start", "<i4"),  # Batch.ban_ids[start:end] get -inf (min_tokens)
        ("ban_end", "<i4"),
        ("mask", "<i4"),  # row of Batch.masks.rows, or -1
    ],
    align=True,
)
"""One record per logit row. The native sampler reads the same layout (native/sample.h)."""


class Batch(msgspec.Struct):
    """T tokens of S sequences, in order of sequences; R logit rows in ascending order of `row`.

    tokens: int32 [T].
    seq_tokens: int32 [S], tokens of each sequence in this step (sum T).
    seq_context: int32 [S], tokens of each sequence already in the KV cache; its tokens here have positions
        seq_context .. seq_context + seq_tokens - 1.
    block_start: int32 [S + 1]; block ids of sequence s are blocks[block_start[s] : block_start[s + 1]],
        enough for seq_context + seq_tokens tokens.
    blocks: int32.
    samples: SAMPLE_DTYPE [R].
    history, bias_ids, bias_values, ban_ids: what the records of `samples` point into.
    masks: what the records' `mask` names rows of, computed while the backend runs; or None.
    return_logits: also return the fp32 logits of every logit row (tests, offline scoring).
    """

    tokens: NDArray[np.int32]
    seq_tokens: NDArray[np.int32]
    seq_context: NDArray[np.int32]
    block_start: NDArray[np.int32]
    blocks: NDArray[np.int32]
    samples: NDArray[np.void]
    history: NDArray[np.int32]
    bias_ids: NDArray[np.int32]
    bias_values: NDArray[np.float32]
    ban_ids: NDArray[np.int32]
    masks: Masks | None = None
    return_logits: bool = False


class StepResult(msgspec.Struct):
    """One entry per logit row.

    token: int32 [R], the sampled id (or the target).
    logprob: float32 [R] of that token under softmax(logits), before temperature and penalties; NaN if not
        asked for.
    rank: int32 [R], 1 = most likely; 0 if not asked for.
    top_ids int32, top_logprobs float32: [R, K], K = largest logprobs asked for in the batch; unused places
        are -1 and -inf.
    status: uint8 [R]: 0 fine, 1 the row's logits were not all finite (nothing was sampled), 2 masks and
        bans left no token.
    logits: float32 [R, vocab] if the batch asked for them.
    """

    token: NDArray[np.int32]
    logprob: NDArray[np.float32]
    rank: NDArray[np.int32]
    top_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]
    status: NDArray[np.uint8]
    logits: NDArray[np.float32] | None = None


class Backend(Protocol):
    """Runs batches. The only thing the engine knows of how a model is computed."""

    @property
    def block_size(self) -> int:
        """Tokens per KV block."""
        ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_batch_tokens(self) -> int:
        """Largest T of one batch."""
        ...

    def run(self, batch: Batch) -> StepResult: ...

    @property
    def block_bytes(self) -> int:
        """Bytes of one KV block, all layers."""
        ...

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copies whole KV blocks (source, destination), all layers, one after the other."""
        ...

    def read_block(self, block: int, out: NDArray[np.uint8]) -> None:
        """Copies a KV block's content to `out`, uint8 [block_bytes]; its layout is the backend's affair."""
        ...

    def write_block(self, block: int, data: NDArray[np.uint8]) -> None:
        """Fills a KV block with what `read_block` gave."""
        ...

    def close(self) -> None: ...
