"""A backend without a model that checks every promise of the Batch contract.

Each KV slot keeps the token written to it. A logit row reads its whole context back through its block table,
and the next token is a hash of what it read (and of everything else that may influence a draw). So if
scheduling, sharing, preemption or eviction ever lets a sequence read a wrong slot, its output differs from
the output it has alone."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable

import numpy as np

from fourfold.engine.batch import SAMPLE_DTYPE, Batch, StepResult

FREE = -1


class FakeBackend:
    def __init__(
        self, block_size: int = 4, num_blocks: int = 64, vocab_size: int = 97, max_batch_tokens: int = 512,
        poison: int | None = None, delay: float = 0.0, hook: Callable[[Batch], None] | None = None,
        check: bool = True,
    ) -> None:  # fmt: skip
        """poison: a row whose context ends with this token has non-finite logits. hook: gets every batch."""
        self.block_size, self.num_blocks = block_size, num_blocks
        self.vocab_size, self.max_batch_tokens = vocab_size, max_batch_tokens
        self.poison, self.delay, self.hook, self.check = poison, delay, hook, check
        self.kv = np.full((num_blocks, block_size), FREE, np.int32)
        self.computed_tokens = 0
        self.closed = False

    def run(self, batch: Batch) -> StepResult:
        if self.hook is not None:
            self.hook(batch)
        if self.delay:
            time.sleep(self.delay)
        if self.check:
            self._check(batch)
        self.computed_tokens += len(batch.tokens)
        tables, rows, at = [], {}, 0
        for s, (count, context) in enumerate(
            zip(batch.seq_tokens.tolist(), batch.seq_context.tolist(), strict=True)
        ):
            table = batch.blocks[batch.block_start[s] : batch.block_start[s + 1]]
            positions = np.arange(context, context + count)
            self.kv[table[positions // self.block_size], positions % self.block_size] = batch.tokens[
                at : at + count
            ]
            tables.append(table)
            rows.update({at + i: (s, context + i) for i in range(count)})
            at += count
        samples = batch.samples
        k = max([0, *samples["logprobs"].tolist()])
        n = len(samples)
        result = StepResult(
            np.zeros(n, np.int32), np.full(n, np.nan, np.float32), np.zeros(n, np.int32),
            np.full((n, k), -1, np.int32), np.full((n, k), -np.inf, np.float32), np.zeros(n, np.uint8),
        )  # fmt: skip
        for i in range(n):
            s, position = rows[int(samples["row"][i])]
            prefix = self.kv[tables[s]].reshape(-1)[: position + 1]
            assert (prefix != FREE).all(), "a context slot was never written"
            if self.poison is not None and prefix[-1] == self.poison:
                result.status[i] = 1
                continue
            self._row(batch, i, prefix, result)
        return result

    def _row(self, batch: Batch, i: int, prefix: np.ndarray, result: StepResult) -> None:
        record = batch.samples[i]
        target = int(record["target"])
        drawn = target if target >= 0 else self._draw(batch, record, prefix)
        if drawn is None:
            result.status[i] = 2
            return
        token = drawn
        result.token[i] = token
        k = int(record["logprobs"])
        if k >= 0:
            base = zlib.crc32(prefix.tobytes())
            result.logprob[i] = -((base + token) % 1000) / 100
            result.rank[i] = 1 + (base + token) % self.vocab_size
            result.top_ids[i, :k] = [(base + j) % self.vocab_size for j in range(k)]
            result.top_logprobs[i, :k] = [-j - 0.5 for j in range(k)]

    def _draw(self, batch: Batch, record: np.void, prefix: np.ndarray) -> int | None:
        h = zlib.crc32(prefix.tobytes())
        if record["temperature"] > 0:
            h = zlib.crc32(np.array([record["seed"], record["counter"]], np.uint64).tobytes(), h)
        start, middle, end = (int(record[f"history_{x}"]) for x in ("start", "prompt_end", "end"))
        if end > start:
            assert batch.history[start:end].tolist() == prefix.tolist(), "history is not prompt and output"
            h = zlib.crc32(np.array([middle - start, end - middle], np.int32).tobytes(), h)
        bias = slice(int(record["bias_start"]), int(record["bias_end"]))
        h = zlib.crc32(batch.bias_ids[bias].tobytes() + batch.bias_values[bias].tobytes(), h)
        banned = set(batch.ban_ids[record["ban_start"] : record["ban_end"]].tolist())
        vocab = int(record["allowed_vocab"])
        if record["mask"] >= 0:
            assert batch.masks is not None
            bits = np.unpackbits(batch.masks.wait()[record["mask"]].view(np.uint8), bitorder="little")
            banned.update(np.flatnonzero(bits == 0).tolist())
        return next((t for t in ((h + j) % vocab for j in range(vocab)) if t not in banned), None)

    def _check(self, batch: Batch) -> None:
        counts, contexts, starts = batch.seq_tokens, batch.seq_context, batch.block_start
        assert batch.samples.dtype == SAMPLE_DTYPE
        for array in (
            batch.tokens,
            counts,
            contexts,
            starts,
            batch.blocks,
            batch.history,
            batch.bias_ids,
            batch.ban_ids,
        ):
            assert array.dtype == np.int32
            assert array.ndim == 1
        assert 0 < len(batch.tokens) <= self.max_batch_tokens
        assert counts.sum() == len(batch.tokens)
        assert len(counts) == len(contexts) == len(starts) - 1
        assert (counts > 0).all()
        assert (contexts >= 0).all()
        assert starts[0] == 0
        assert starts[-1] == len(batch.blocks)
        assert (np.diff(starts) * self.block_size >= counts + contexts).all(), "too few blocks"
        assert ((batch.tokens >= 0) & (batch.tokens < self.vocab_size)).all()
        assert ((batch.blocks >= 0) & (batch.blocks < self.num_blocks)).all()
        rows = batch.samples["row"]
        assert (np.diff(rows) > 0).all()
        assert ((rows >= 0) & (rows < len(batch.tokens))).all()
        uses: dict[int, int] = {}
        for s in range(len(counts)):
            table = batch.blocks[starts[s] : starts[s + 1]].tolist()
            assert len(set(table)) == len(table)
            for block in table:
                uses[block] = uses.get(block, 0) + 1
        for s in range(len(counts)):
            first, last = contexts[s] // self.block_size, (contexts[s] + counts[s] - 1) // self.block_size
            for block in batch.blocks[starts[s] + first : starts[s] + last + 1].tolist():
                assert uses[block] == 1, f"block {block} is written while another sequence holds it"

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        for source, destination in pairs:
            self.kv[destination] = self.kv[source]

    @property
    def block_bytes(self) -> int:
        return 4 * self.block_size

    def read_block(self, block: int, out: np.ndarray) -> None:
        out[:] = self.kv[block].view(np.uint8)

    def write_block(self, block: int, data: np.ndarray) -> None:
        self.kv[block] = data.view(np.int32)

    def close(self) -> None:
        self.closed = True
