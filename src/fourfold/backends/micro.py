"""Programs of one op, many times over: kernels timed as the engine runs them, with threads and barriers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from fourfold import _native
from fourfold.backends.native import NativeBackend, NativeLimits
from fourfold.build.divisions import Divisions
from fourfold.build.packed import ELEM, Outliers, PackedMatrix, PackedWeights
from fourfold.config import EngineConfig
from fourfold.engine.batch import SAMPLE_DTYPE, Batch
from fourfold.program.graph import whole
from fourfold.program.memory import plan
from fourfold.program.ops import (
    Attention,
    Embed,
    GatherRows,
    KVSpec,
    Linear,
    Logits,
    NormSpec,
    Op,
    Program,
    Value,
    View,
    WeightSpec,
)

VOCAB = 32
"""Rows of the table that inputs come from, and the few logits every Program has to end with."""


@dataclass(frozen=True, slots=True)
class Micro:
    """A Program that repeats one op `copies` times, and its weights."""

    program: Program
    weights: PackedWeights
    copies: int


def as_linear(op: Linear | Logits) -> Linear:
    """A Logits op as the matmul it is, of token rows."""
    if isinstance(op, Linear):
        return op
    x, out = Value(op.x.id, op.x.width), Value(op.out.id, op.out.width)
    return Linear(whole(x), out, (op.weight,), (op.bias,), op.norm)


def linear_micro(
    op: Linear, matrices: Sequence[PackedMatrix], outliers: Outliers | None, copies: int
) -> Micro:
    """`copies` of the op, each with weights of its own: what one leaves in caches is of no use to the next.

    matrices: those of the op. A residual is added as in a model: to the sum so far, in place.
    """
    k, hidden = matrices[0].k, op.out.width
    x = Value(0, k)
    out = [Value(1 + i, hidden) for i in range(copies)]
    names = [tuple(f"{i}.{j}" for j in range(len(matrices))) for i in range(copies)]
    norm = None if op.norm is None else _norm(op.norm)
    linears = [
        replace(
            op,
            x=whole(x),
            out=out[i],
            weights=names[i],
            biases=tuple(None if b is None else f"bias{j}" for j, b in enumerate(op.biases)),
            norm=norm,
            residual=out[i - 1] if op.residual is not None and i else None,
        )
        for i in range(copies)
    ]
    packed = {
        name: replace(matrix, key=name, data=_copy(matrix.data))
        for row in names
        for name, matrix in zip(row, matrices, strict=True)
    }
    vectors = {f"bias{j}": np.zeros(m.n, np.float32) for j, m in enumerate(matrices)}
    vectors |= _norm_vectors(norm, k)
    kept = {} if outliers is None else {row[0]: outliers for row in names}
    return _micro(x, linears, out[-1], packed, vectors, (), copies, kept)


def attention_micro(ops: Sequence[Attention]) -> Micro:
    """The attention of several layers, alike but for the layer, each with a KV cache of its own."""
    first = ops[0]
    q, kv = first.heads * first.head_dim, first.kv_heads * first.head_dim
    x = Value(0, q + 2 * kv)
    out = [Value(1 + i, q) for i in range(len(ops))]
    q_norm = None if first.q_norm is None else _norm(first.q_norm)
    k_norm = None if first.k_norm is None else _norm(first.k_norm)
    attentions = [
        replace(
            op,
            q=View(x, 0, q),
            k=View(x, q, kv),
            v=View(x, q + kv, kv),
            out=out[i],
            layer=i,
            sinks=None if op.sinks is None else "sinks",
            q_norm=q_norm,
            k_norm=k_norm,
        )
        for i, op in enumerate(ops)
    ]
    vectors = {"sinks": np.zeros(first.heads, np.float32)}
    vectors |= _norm_vectors(q_norm, first.head_dim) | _norm_vectors(k_norm, first.head_dim)
    layers = tuple(KVSpec(i, op.kv_heads, op.head_dim, op.window) for i, op in enumerate(ops))
    return _micro(x, attentions, out[-1], {}, vectors, layers, len(ops), {})


def _norm(spec: NormSpec) -> NormSpec:
    return replace(spec, weight="norm", bias=None if spec.bias is None else "norm bias")


def _norm_vectors(spec: NormSpec | None, width: int) -> dict[str, NDArray[np.float32]]:
    if spec is None:
        return {}
    return {"norm": np.ones(width, np.float32), "norm bias": np.zeros(width, np.float32)}


def _micro(
    x: Value,
    ops: Sequence[Op],
    last: Value,
    matrices: dict[str, PackedMatrix],
    vectors: dict[str, NDArray[np.float32]],
    layers: tuple[KVSpec, ...],
    copies: int,
    outliers: dict[str, Outliers],
) -> Micro:
    gathered = Value(last.id + 1, last.width, "logit_rows")
    logits = Value(last.id + 2, VOCAB, "logit_rows")
    held = {**matrices, "table": _table("table", x.width), "head": _table("head", last.width)}
    program = Program(
        family="bench",
        ops=(Embed(x, "table"), *ops, GatherRows(last, gathered), Logits(gathered, logits, "head")),
        weights={name: WeightSpec(name, (m.n, m.k)) for name, m in held.items()},
        kv=layers,
        vocab_size=VOCAB,
        hidden_size=x.width,
        max_position=2**20,
    )
    return Micro(program, PackedWeights(held, vectors, outliers), copies)


def _table(name: str, width: int) -> PackedMatrix:
    values = np.random.default_rng(0).standard_normal((VOCAB, width), np.float32)
    data = _aligned(_native.packed_bytes(VOCAB, width, ELEM["F32"]))
    _native.pack_dense(values.view(np.uint8), width, ELEM["F32"], data)
    return PackedMatrix(name, data, VOCAB, width, ELEM["F32"])


def _copy(data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    out = _aligned(data.size)
    out[:] = data
    return out


def _aligned(size: int) -> NDArray[np.uint8]:
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size]


class MicroRunner:
    """Runs a Micro on sequences that grow. A context; its end stops the threads.

    sequences, length: how many, and how long each may become (tokens).  rows: most tokens of one run.
    divisions: of the ops, of which the first repeated one has index 1.
    """

    def __init__(
        self,
        micro: Micro,
        config: EngineConfig,
        threads: int,
        sequences: int,
        length: int,
        rows: int,
        divisions: Divisions | None = None,
    ) -> None:
        """Raises LoadError."""
        self._copies = micro.copies
        self._sequences = sequences
        self._per_sequence = -(-length // int(_native.BLOCK_TOKENS))
        limits = NativeLimits(rows, sequences, length, self._per_sequence * sequences)
        self._backend = NativeBackend(
            micro.program,
            plan(micro.program),
            micro.weights,
            limits,
            activation_dtype=config.activation_dtype,
            kv_dtype=config.kv_cache_dtype,
            threads=threads,
            isa=config.isa,
            divisions=divisions,
        )

    def __enter__(self) -> MicroRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self._backend.close()

    def run(self, new: int, cached: int = 0) -> float:
        """Computes `new` tokens of every sequence after `cached` ones; seconds per copy of the op."""
        batch = self._batch(list(range(self._sequences)), new, cached)
        started = time.perf_counter()
        self._backend.run(batch)
        return (time.perf_counter() - started) / self._copies

    def fill(self, length: int) -> None:
        """Writes the KV of all sequences, from the beginning. Untouched, it would be one page of zeros."""
        for sequence in range(self._sequences):
            for start in range(0, length, self._backend.max_batch_tokens):
                count = min(self._backend.max_batch_tokens, length - start)
                self._backend.run(self._batch([sequence], count, start))

    def _batch(self, sequences: list[int], new: int, cached: int) -> Batch:
        count = len(sequences)
        samples = np.zeros(1, SAMPLE_DTYPE)
        samples["row"] = count * new - 1
        samples["logprobs"] = samples["mask"] = samples["target"] = -1
        samples["allowed_vocab"] = VOCAB
        for off in ("top_p", "typical_p", "repetition_penalty"):
            samples[off] = 1
        blocks = np.arange(self._per_sequence, dtype=np.int32)
        ints = np.zeros(0, np.int32)
        return Batch(
            tokens=(np.arange(count * new) % VOCAB).astype(np.int32),
            seq_tokens=np.full(count, new, np.int32),
            seq_context=np.full(count, cached, np.int32),
            block_start=(np.arange(count + 1) * self._per_sequence).astype(np.int32),
            blocks=np.concatenate([blocks + s * self._per_sequence for s in sequences]),
            samples=samples,
            history=ints,
            bias_ids=ints,
            bias_values=np.zeros(0, np.float32),
            ban_ids=ints,
        )
