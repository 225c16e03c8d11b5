"""Every kernel a model's step is made of, at its shapes and formats: time, and what it amounts to."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fourfold import _native
from fourfold.backends.micro import MicroRunner, as_linear, attention_micro, linear_micro
from fourfold.backends.native import activations_on, best_isa
from fourfold.bench.limits import Kind
from fourfold.bench.model_costs import KV_ELEMENT_BYTES
from fourfold.bench.stats import Runs
from fourfold.build.calibrate import OUTLIERS
from fourfold.build.pack import pack_matrix
from fourfold.build.packed import ELEM, Outliers, PackedMatrix
from fourfold.config import ActivationDtype, EngineConfig
from fourfold.engine.batch import SAMPLE_DTYPE
from fourfold.models.binding import Binding
from fourfold.models.registry import load_model_definition
from fourfold.program.costs import Span, keys_read, keys_seen
from fourfold.program.ops import Attention, Linear, Logits, Program
from fourfold.program.passes import optimize
from fourfold.progress import Progress, silent
from fourfold.weights.open import open_checkpoint
from fourfold.weights.source import WeightSource

COLD_BYTES = 192 << 20
"""Weights one run goes through: many times what caches hold."""
ENOUGH_OPERATIONS = 2e10
"""With many rows a run of this much takes long enough, and caches hardly matter: fewer copies will do."""
STREAM_ROWS = 4
"""Up to here memory is the limit; above, arithmetic is."""
ATTENTION_LAYERS = 8
ATTENTION_CASES = (
    ("decode", 1, 1, 2047),
    ("decode", 32, 1, 255),
    ("prefill", 1, 512, 0),
    ("prefill", 1, 512, 1536),
)
"""Name, sequences, new tokens of each, tokens each has already."""
SAMPLING_CASES: Mapping[str, Mapping[str, float]] = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 0.8},
    "top-k 40, top-p 0.95": {"temperature": 0.8, "top_k": 40, "top_p": 0.95},
    "top-p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "greedy, 5 logprobs": {"temperature": 0, "logprobs": 5},
}
SAMPLING_ROWS = 8
"""In the order of the native test functions' numbers."""


@dataclass(frozen=True, slots=True)
class KernelTime:
    """One kernel with one batch.

    count: how often a step of the model runs it.  rows: of the batch.  seconds: of one execution.
    bytes: weights, KV or logits it reads.  operations: multiply-adds, each counted twice.
    limit: what `speed` should come near to: "read" (bytes/s), or a rate of multiply-adds (operations/s); None
        for what works in the caches.
    threads: that compute it.
    """

    name: str
    count: int
    rows: int
    seconds: Runs
    bytes: float
    operations: float
    limit: Kind | None
    threads: int

    @property
    def speed(self) -> float:
        """Median bytes/s or operations/s."""
        return (self.bytes if self.limit in ("read", None) else self.operations) / self.seconds.median


def measure_kernels(
    path: Path,
    config: EngineConfig,
    threads: int,
    rows: Sequence[int],
    repeats: int,
    only: str = "",
    progress: Progress = silent,
) -> list[KernelTime]:
    """rows: batch sizes of the matmuls, in tokens.  only: what the names of kernels must contain.

    Raises LoadError if the file cannot be read or the kernels do not have what it needs.
    """
    source = open_checkpoint(path)
    definition = load_model_definition(source, config.max_model_len)
    program = optimize(definition.program)
    bench = _Bench(source, definition.bindings, program, config, threads, repeats)
    jobs = [job for job in bench.jobs(rows) if only in job.name]
    times = []
    for done, job in enumerate(jobs):
        progress("measuring kernels", done, len(jobs), "kernels")
        times.append(job.measure())
    return times


@dataclass(frozen=True, slots=True)
class _Job:
    """A kernel still to be measured, so that what is not wanted costs nothing."""

    name: str
    measure: Callable[[], KernelTime]


@dataclass(frozen=True, slots=True)
class _Bench:
    source: WeightSource
    bindings: Mapping[str, Binding]
    program: Program
    config: EngineConfig
    threads: int
    repeats: int

    def jobs(self, rows: Sequence[int]) -> list[_Job]:
        """Matmuls, attention, sampling; ops that do the same work on different weights are one."""
        jobs = []
        for ops, head in self._linears():
            name = f"matmul {'head ' * head}{self._shape(ops[0])}"
            packed: list[_Packed] = []
            for count in rows:
                jobs.append(_Job(name, partial(self._time_linear, name, ops[0], len(ops), count, packed)))
        for layers in self._attentions():
            for kind, sequences, new, cached in ATTENTION_CASES:
                name = f"attention {kind} at {cached}, {_attention_shape(layers[0])}"
                if sequences > 1:
                    name += f", {sequences} sequences"
                measure = partial(self._time_attention, name, layers, sequences, new, cached)
                jobs.append(_Job(name, measure))
        for kind, fields in SAMPLING_CASES.items():
            name = f"sampling {kind}"
            jobs.append(_Job(name, partial(self._time_sampling, name, fields)))
        return jobs

    def _linears(self) -> list[tuple[list[Linear], bool]]:
        """Ops alike, and whether they are the head."""
        alike: dict[object, list[Linear]] = {}
        heads = []
        for op in self.program.ops:
            if isinstance(op, Linear):
                formats = tuple(self._format(name) for name in op.weights)
                alike.setdefault((formats, op.gate, op.norm is None, op.residual is None), []).append(op)
            elif isinstance(op, Logits):
                heads.append(as_linear(op))
        return [(ops, False) for ops in alike.values()] + [([op], True) for op in heads]

    def _format(self, name: str) -> tuple[str, tuple[int, ...]]:
        return self.source.tensor(self.bindings[name].source).format, self.program.weights[name].shape

    def _shape(self, op: Linear) -> str:
        formats = "+".join(dict.fromkeys(self._format(name)[0] for name in op.weights))
        rows = "+".join(str(self._format(name)[1][0]) for name in op.weights)
        extras = ["norm"] * (op.norm is not None) + [op.gate or ""] + ["residual"] * (op.residual is not None)
        return " ".join([formats, f"{op.x.width}→{rows}", *filter(None, extras)])

    def _time_linear(self, name: str, op: Linear, count: int, rows: int, packed: list[_Packed]) -> KernelTime:
        """packed: filled by the first of several calls for the same op."""
        dtype = activations_on(self.config.isa, self.config.activation_dtype)
        exact = dtype == "float32"
        if not packed:
            matrices = [pack_matrix(self.source, self.bindings[name], exact=exact) for name in op.weights]
            packed.append(_Packed(matrices, _outliers(matrices) if dtype == "int8" else None))
        weights = packed[0]
        operations = 2 * rows * sum(m.n * m.k for m in weights.matrices)
        copies = max(2, math.ceil(COLD_BYTES / weights.nbytes))
        if rows > STREAM_ROWS:
            copies = min(copies, max(2, math.ceil(ENOUGH_OPERATIONS / operations)))
        micro = linear_micro(op, weights.matrices, weights.outliers, copies)
        with MicroRunner(micro, self.config, self.threads, 1, rows, rows) as runner:
            seconds = self._repeat(lambda: runner.run(rows))
        limit: Kind = "read" if rows <= STREAM_ROWS else _peak(weights.matrices, dtype)
        return KernelTime(name, count, rows, seconds, weights.nbytes, operations, limit, self.threads)

    def _attentions(self) -> list[list[Attention]]:
        alike: dict[object, list[Attention]] = {}
        for op in self.program.ops:
            if isinstance(op, Attention):
                alike.setdefault((_attention_shape(op), op.sinks is None), []).append(op)
        return list(alike.values())

    def _time_attention(
        self, name: str, layers: list[Attention], sequences: int, new: int, cached: int
    ) -> KernelTime:
        op = layers[0]
        rows = sequences * new
        micro = attention_micro(layers[:ATTENTION_LAYERS])
        with MicroRunner(micro, self.config, self.threads, sequences, cached + new, max(512, rows)) as runner:
            runner.fill(cached)
            seconds = self._repeat(lambda: runner.run(new, cached))
        span = Span(new, cached)
        element = KV_ELEMENT_BYTES[self.config.kv_cache_dtype]
        read = 2 * keys_read(span, op.window) * op.kv_heads * op.head_dim * element * sequences
        operations = 4 * keys_seen(span, op.window) * op.heads * op.head_dim * sequences
        exact = self.config.activation_dtype == "float32" or self.config.kv_cache_dtype == "float32"
        limit: Kind = "read" if new == 1 else ("fp32" if exact else "bf16")
        return KernelTime(name, len(layers), rows, seconds, read, operations, limit, self.threads)

    def _time_sampling(self, name: str, fields: Mapping[str, float]) -> KernelTime:
        """A row of logits is one thread's work, so this is the time of one thread."""
        vocab = self.program.vocab_size
        logits = np.random.default_rng(0).standard_normal((SAMPLING_ROWS, vocab), np.float32) * np.float32(3)
        isa = _native.TEST_ISAS.index(best_isa(self.config.isa))
        records = np.zeros(SAMPLING_ROWS, SAMPLE_DTYPE)
        records["row"] = np.arange(SAMPLING_ROWS)
        records["logprobs"] = records["mask"] = records["target"] = -1
        records["allowed_vocab"] = vocab
        for off in ("top_p", "typical_p", "repetition_penalty"):
            records[off] = 1
        for field, value in fields.items():
            records[field] = value
        seconds = self._repeat(lambda: _sample(isa, logits.copy(), records) / SAMPLING_ROWS)
        return KernelTime(name, 1, 1, seconds, vocab * 4, 0.0, None, 1)

    def _repeat(self, run: Callable[[], float]) -> Runs:
        run()
        return Runs(tuple(run() for _ in range(self.repeats)))


@dataclass(frozen=True, slots=True)
class _Packed:
    matrices: list[PackedMatrix]
    outliers: Outliers | None

    @property
    def nbytes(self) -> int:
        columns = self.outliers.columns if self.outliers else ()
        return sum(m.data.nbytes for m in self.matrices) + sum(each.nbytes for each in columns)


def _attention_shape(op: Attention) -> str:
    parts = [f"{op.heads}/{op.kv_heads} heads of {op.head_dim}"]
    parts += [f"window {op.window}"] * bool(op.window) + ["norm"] * bool(op.q_norm)
    return ", ".join([*parts, *["soft cap"] * bool(op.softcap)])


def _peak(matrices: Sequence[PackedMatrix], dtype: ActivationDtype) -> Kind:
    if dtype == "float32":
        return "fp32"
    elems = {m.elem for m in matrices}
    if elems == {ELEM["ints"]}:
        return "int8" if dtype == "int8" else "bf16"
    return "bf16" if elems == {ELEM["BF16"]} else "fp32"


def _outliers(matrices: Sequence[PackedMatrix]) -> Outliers | None:
    """As many columns kept apart as a calibrated model has; which ones makes no difference to the time."""
    k = matrices[0].k
    if any(m.elem != ELEM["ints"] for m in matrices):
        return None
    channels = np.linspace(0, k - 1, min(OUTLIERS, k // 16)).astype(np.int32)
    columns = []
    for m in matrices:
        out = np.empty(-(-m.n // 16) * len(channels) * 16, np.uint16)
        _native.extract_columns(
            m.data, m.n, m.k, m.bits, m.group, m.zero, m.has_offset, m.wide, channels, out
        )
        columns.append(out)
    return Outliers(channels, tuple(columns))


def _sample(isa: int, logits: NDArray[np.float32], records: NDArray[np.void]) -> float:
    """Seconds to choose a token of every row."""
    rows = len(logits)
    width = max(int(records["logprobs"].max()), 0)
    ints, floats = np.zeros(0, np.int32), np.zeros(0, np.float32)
    token, logprob, rank = np.empty(rows, np.int32), np.empty(rows, np.float32), np.empty(rows, np.int32)
    top_ids, top_logprobs = np.empty((rows, width), np.int32), np.empty((rows, width), np.float32)
    status = np.empty(rows, np.uint8)
    started = time.perf_counter()
    _native.test_sampling(
        isa, logits, records.view(np.uint8), ints, ints, floats, ints, None,
        token, logprob, rank, top_ids, top_logprobs, status,
    )  # fmt: skip
    return time.perf_counter() - started
