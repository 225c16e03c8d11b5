"""The C++ CPU runtime as a `Backend`: lowers a Program to native ops and runs batches."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np
from msgspec.structs import astuple
from numpy.typing import NDArray

from fourfold import _native
from fourfold.build.divisions import Divisions
from fourfold.build.packed import KV_TYPE, PackedWeights
from fourfold.config import ActivationDtype, Isa, KVDtype
from fourfold.engine.batch import SAMPLE_DTYPE, Batch, StepResult
from fourfold.errors import LoadError
from fourfold.program.memory import MemoryPlan
from fourfold.program.ops import (
    Activation,
    Add,
    Attention,
    Embed,
    Gate,
    GatherRows,
    Linear,
    Logits,
    Norm,
    NormSpec,
    Op,
    Program,
    Rope,
    RopeSpec,
    Scale,
    Value,
    View,
)

_KINDS = ("embed", "norm", "linear", "rope", "attention", "gate", "add", "scale", "gather", "logits")
_KIND = {name: index for index, name in enumerate(_KINDS)}
"""native/program.h: OpKind."""
_ACT: Mapping[Activation | None, int] = {None: 0, "silu": 1, "gelu_tanh": 2, "gelu": 3}
"""native/rows.h: Act."""

_COMPUTE: Mapping[ActivationDtype, int] = {"int8": 0, "bfloat16": 1, "float32": 2}
"""native/rows.h: Compute."""


def best_isa(isa: Isa) -> str:
    """`isa`, or the best this machine has."""
    return _native.isas()[-1] if isa == "auto" else isa


def activations_on(isa: Isa, dtype: ActivationDtype) -> ActivationDtype:
    """What "auto" stands for: bf16 where there is a unit that multiplies tiles of it, else int8."""
    if dtype != "auto":
        return dtype
    return "bfloat16" if best_isa(isa) == "amx" else "int8"


class NativeLimits(msgspec.Struct, frozen=True):
    """Sizes fixed at load: tokens and sequences of one step, tokens of one sequence, KV blocks."""

    max_batch_tokens: int
    max_seqs: int
    max_context: int
    num_blocks: int


class NativeBackend:
    """Implements engine.batch.Backend. Not for use by two threads at once."""

    BLOCK_TOKENS = int(_native.BLOCK_TOKENS)

    def __init__(
        self,
        program: Program,
        plan: MemoryPlan,
        weights: PackedWeights,
        limits: NativeLimits,
        *,
        activation_dtype: ActivationDtype = "auto",
        kv_dtype: KVDtype = "bfloat16",
        threads: int = 1,
        isa: Isa = "auto",
        divisions: Divisions | None = None,
    ) -> None:
        """Raises LoadError if the Program asks for something the kernels do not have (the message says what).

        activation_dtype: "int8" multiplies integer weights with int8 activations and bf16 weights with bf16
        ones; "bfloat16" decodes integer weights to bf16; "float32" computes everything in fp32.
        divisions: how matmuls are cut, as measured; None: by rule.
        """
        dtype = activations_on(isa, activation_dtype)
        lowered = _Lowering(program, plan, weights, divisions or {}, outliers=dtype == "int8")
        try:
            self._runtime = _native.Runtime(
                lowered.native,
                vocab=program.vocab_size,
                hidden=program.hidden_size,
                integers=_COMPUTE[dtype],
                kv_type=KV_TYPE[kv_dtype],
                threads=threads,
                max_tokens=limits.max_batch_tokens,
                max_seqs=limits.max_seqs,
                max_context=limits.max_context,
                num_blocks=limits.num_blocks,
                isa=isa,
            )
        except (ValueError, RuntimeError, MemoryError) as error:
            # RuntimeError: the system starts no more threads.
            reason = "out of memory" if isinstance(error, MemoryError) else error
            raise LoadError(f"the native runtime cannot run this {program.family} model: {reason}") from error
        self._limits = limits
        self._vocab = program.vocab_size
        self._ops = program.ops

    @property
    def block_size(self) -> int:
        return self.BLOCK_TOKENS

    @property
    def num_blocks(self) -> int:
        return self._limits.num_blocks

    @property
    def vocab_size(self) -> int:
        return self._vocab

    @property
    def max_batch_tokens(self) -> int:
        return self._limits.max_batch_tokens

    def run(self, batch: Batch) -> StepResult:
        """Raises ValueError if the batch breaks its contract; then nothing was computed."""
        rows = len(batch.samples)
        width = max(0, *batch.samples["logprobs"].tolist()) if rows else 0
        result = StepResult(
            token=np.empty(rows, np.int32),
            logprob=np.empty(rows, np.float32),
            rank=np.empty(rows, np.int32),
            top_ids=np.empty((rows, width), np.int32),
            top_logprobs=np.empty((rows, width), np.float32),
            status=np.empty(rows, np.uint8),
            logits=np.empty((rows, self._vocab), np.float32) if batch.return_logits else None,
        )
        self._runtime.step(
            batch.tokens,
            batch.seq_tokens,
            batch.seq_context,
            batch.block_start,
            batch.blocks,
            batch.samples.view(np.uint8),
            batch.history,
            batch.bias_ids,
            batch.bias_values,
            batch.ban_ids,
            None if batch.masks is None else batch.masks.rows,
            result.token,
            result.logprob,
            result.rank,
            result.top_ids,
            result.top_logprobs,
            result.status,
            result.logits,
            None if batch.masks is None else batch.masks.ready,
        )
        return result

    def input_magnitudes(self, tokens: NDArray[np.int32]) -> dict[int, NDArray[np.float32]]:
        """Runs one sequence and returns, per index of a Linear or Logits op, the largest magnitude of each
        column of its input, [k] fp32. Needs a backend of activation dtype float32 that nothing else uses."""
        count = len(tokens)
        samples = np.zeros(count, SAMPLE_DTYPE)
        samples["row"] = np.arange(count)
        samples["logprobs"] = samples["mask"] = -1
        samples["allowed_vocab"] = self._vocab
        for off in ("top_p", "typical_p", "repetition_penalty"):
            samples[off] = 1
        blocks = np.arange(-(-count // self.block_size), dtype=np.int32)
        ints, floats = np.zeros(0, np.int32), np.zeros(0, np.float32)
        self._runtime.start_observing()
        self.run(
            Batch(
                tokens=tokens,
                seq_tokens=np.array([count], np.int32),
                seq_context=np.zeros(1, np.int32),
                block_start=np.array([0, len(blocks)], np.int32),
                blocks=blocks,
                samples=samples,
                history=ints,
                bias_ids=ints,
                bias_values=floats,
                ban_ids=ints,
            )
        )
        return {
            index: np.asarray(self._runtime.observed(index), np.float32)
            for index, op in enumerate(self._ops)
            if isinstance(op, Linear | Logits)
        }

    @property
    def block_bytes(self) -> int:
        return self._runtime.kv_block_bytes

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        self._runtime.copy_blocks(pairs)

    def read_block(self, block: int, out: NDArray[np.uint8]) -> None:
        """Raises ValueError if there is no such block or `out` has another size than block_bytes."""
        self._runtime.read_block(block, out)

    def write_block(self, block: int, data: NDArray[np.uint8]) -> None:
        """Raises ValueError as read_block does."""
        self._runtime.write_block(block, data)

    def close(self) -> None:
        """Stops the threads and frees the KV pool and the activations; the backend is unusable afterwards."""
        del self._runtime


class _Lowering:
    """Program ops to native ops, values to slots, weights to indices."""

    def __init__(
        self,
        program: Program,
        plan: MemoryPlan,
        weights: PackedWeights,
        divisions: Divisions,
        *,
        outliers: bool,
    ) -> None:
        self.native = _native.Program()
        self._plan = plan
        self._weights = weights
        self._outliers = outliers
        self._matrices: dict[str, int] = {}
        self._vectors: dict[str, int] = {}
        self._ropes: dict[RopeSpec, int] = {}
        for width, rows in zip(plan.slot_width, plan.slot_rows, strict=True):
            self.native.add_slot(width, rows == "logit_rows")
        for layer in program.kv:
            self.native.add_layer(layer.kv_heads, layer.head_dim)
        for index, op in enumerate(program.ops):
            self._lower(op)
            if index in divisions:
                self.native.set_divisions([astuple(each) for each in divisions[index]])

    def _matrix(self, name: str) -> int:
        packed = self._weights.matrices[name]
        index = self._matrices.get(packed.key)
        if index is None:
            index = self._matrices[packed.key] = self.native.add_matrix(
                packed.data,
                packed.n,
                packed.k,
                packed.elem,
                bits=packed.bits,
                group=packed.group,
                zero=packed.zero,
                has_offset=packed.has_offset,
                wide=packed.wide,
            )
        return index

    def _vector(self, name: str | None) -> int:
        if name is None:
            return -1
        index = self._vectors.get(name)
        if index is None:
            index = self._vectors[name] = self.native.add_vector(self._weights.vectors[name])
        return index

    def _rope(self, spec: RopeSpec | None) -> int:
        if spec is None:
            return -1
        index = self._ropes.get(spec)
        if index is None:
            table: NDArray[np.float32] = np.asarray(spec.inv_freq, np.float32)
            index = self._ropes[spec] = self.native.add_rope(table, spec.scale)
        return index

    def _norm(self, spec: NormSpec | None) -> tuple[int, int, float, float, bool]:
        if spec is None:
            return (-1, -1, 0.0, 0.0, False)
        return (
            self._vector(spec.weight),
            self._vector(spec.bias),
            spec.eps,
            spec.offset,
            spec.kind == "layer",
        )

    def _view(self, view: View | Value) -> tuple[int, int, int]:
        if isinstance(view, Value):
            return (self._plan.slot_of[view.id], 0, view.width)
        return (self._plan.slot_of[view.value.id], view.start, view.width)

    def _slot(self, value: Value | None) -> int:
        return -1 if value is None else self._plan.slot_of[value.id]

    def _segments(self, weights: tuple[str, ...], biases: tuple[str | None, ...]) -> list[tuple[int, int]]:
        return [(self._matrix(w), self._vector(b)) for w, b in zip(weights, biases, strict=True)]

    def _set_outliers(self, first_weight: str) -> None:
        found = self._weights.outliers.get(first_weight) if self._outliers else None
        if found is not None:
            self.native.set_outliers(found.channels.tolist(), list(found.columns))

    def _lower(self, op: Op) -> None:
        out = self._view(op.out)
        add = self.native.add_op
        match op:
            case Embed():
                add(_KIND["embed"], out=out, segments=[(self._matrix(op.weight), -1)], scale=op.scale)
            case Norm():
                add(
                    _KIND["norm"],
                    x=self._view(op.x),
                    out=out,
                    residual=self._slot(op.residual),
                    norm=self._norm(op.spec),
                    heads=op.heads,
                )
            case Linear():
                add(
                    _KIND["linear"],
                    x=self._view(op.x),
                    out=out,
                    residual=self._slot(op.residual),
                    segments=self._segments(op.weights, op.biases),
                    norm=self._norm(op.norm),
                    act=_ACT[op.gate],
                )
                self._set_outliers(op.weights[0])
            case Rope():
                add(
                    _KIND["rope"],
                    x=self._view(op.x),
                    out=out,
                    heads=op.heads,
                    head_dim=op.head_dim,
                    rope=self._rope(op.spec),
                )
            case Attention():
                for spec in (op.q_norm, op.k_norm):
                    if spec is not None and spec.kind != "rms":
                        raise LoadError(
                            f"layer {op.layer}: a {spec.kind} norm of attention heads is not supported"
                        )
                add(
                    _KIND["attention"],
                    x=self._view(op.q),
                    y=self._view(op.k),
                    z=self._view(op.v),
                    out=out,
                    norm=self._norm(op.q_norm),
                    k_norm=self._norm(op.k_norm),
                    scale=op.scale,
                    softcap=op.softcap or 0.0,
                    heads=op.heads,
                    kv_heads=op.kv_heads,
                    head_dim=op.head_dim,
                    window=op.window or 0,
                    layer=op.layer,
                    sinks=self._vector(op.sinks),
                    rope=self._rope(op.rope),
                )
            case Gate():
                add(_KIND["gate"], x=self._view(op.gate), y=self._view(op.up), out=out, act=_ACT[op.act])
            case Add():
                add(_KIND["add"], x=self._view(op.a), y=self._view(op.b), out=out)
            case Scale():
                add(_KIND["scale"], x=self._view(op.x), out=out, scale=op.factor)
            case GatherRows():
                add(_KIND["gather"], x=self._view(op.x), out=out)
            case Logits():
                add(
                    _KIND["logits"],
                    x=self._view(op.x),
                    out=out,
                    segments=self._segments((op.weight,), (op.bias,)),
                    norm=self._norm(op.norm),
                    scale=op.scale,
                    softcap=op.softcap or 0.0,
                )
                self._set_outliers(op.weight)
