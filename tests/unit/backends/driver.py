"""Packing a definition for the native backend, and feeding sequences to it in any cut and company."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fourfold import _native
from fourfold.backends.native import NativeBackend, NativeLimits
from fourfold.build.calibrate import calibration_tokens, find_outliers
from fourfold.build.make import WeightNames, load_or_build
from fourfold.build.packed import Outliers, PackedWeights
from fourfold.engine.batch import SAMPLE_DTYPE, Batch, StepResult
from fourfold.models.registry import Definition
from fourfold.program.memory import plan
from fourfold.program.ops import Program
from fourfold.program.passes import optimize
from fourfold.quant.registry import get_format
from fourfold.weights.source import RawTensor, WeightSource

Floats = NDArray[np.float32]
BLOCK: int = _native.BLOCK_TOKENS
LIMITS = NativeLimits(max_batch_tokens=160, max_seqs=8, max_context=128, num_blocks=16)


class Quantized:
    """A checkpoint with its matrices rewritten: formats in turn, BF16 where a row is no whole block."""

    def __init__(self, source: WeightSource, formats: tuple[str, ...], poison: Mapping[str, int]) -> None:
        """poison: tensor name → row that is NaN (in BF16)."""
        self._source = source
        self.path: Path = source.path
        self.kind: Literal["gguf", "hf"] = source.kind
        self.metadata: Mapping[str, Any] = source.metadata
        self._tensors: dict[str, RawTensor] = {}
        for index, name in enumerate(source.names()):
            raw = source.tensor(name)
            if len(raw.shape) == 2:
                target = get_format(formats[index % len(formats)])
                if raw.shape[1] % target.block or name in poison:
                    target = get_format("BF16")
                values = get_format(raw.format).decode(raw.data, raw.shape)
                data = np.ascontiguousarray(target.encode(values)).view(np.uint8)
                if name in poison:
                    data.reshape(raw.shape[0], -1).view(np.uint16)[poison[name]] = 0x7FC0
                raw = RawTensor(name, raw.shape, target.name, data.reshape(-1))
            self._tensors[name] = raw

    def names(self) -> Iterable[str]:
        return self._tensors

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def tensor(self, name: str) -> RawTensor:
        return self._tensors[name]


def weight_names(definition: Definition) -> WeightNames:
    shapes = {name: spec.shape for name, spec in definition.program.weights.items()}
    return WeightNames(
        {name: definition.bindings[name] for name, shape in shapes.items() if len(shape) == 2},
        {name: definition.bindings[name] for name, shape in shapes.items() if len(shape) != 2},
    )


def pack(definition: Definition, source: WeightSource, *, exact: bool) -> PackedWeights:
    """As loading does it: with outlier columns unless exact."""
    program = optimize(definition.program)

    def calibrate(packed: PackedWeights) -> Mapping[str, Outliers]:
        tokens = calibration_tokens(program.vocab_size, LIMITS.max_context)
        backend = Model(program, packed, {"activation_dtype": "float32", "kv_dtype": "float32"}).backend()
        return find_outliers(program, packed, backend.input_magnitudes(tokens))

    with tempfile.TemporaryDirectory() as folder:
        return load_or_build(
            Path(folder) / "a",
            source,
            weight_names(definition),
            exact=exact,
            calibrate=None if exact else calibrate,
            progress=lambda what, share: None,
        )[0]


@dataclass
class Model:
    """A program and its packed weights; `backend` makes one to run it."""

    program: Program
    weights: PackedWeights
    options: dict[str, Any] = field(default_factory=dict)

    def backend(self, limits: NativeLimits = LIMITS, **options: Any) -> NativeBackend:
        return NativeBackend(
            self.program, plan(self.program), self.weights, limits, **{**self.options, **options}
        )

    def unfused(self, definition: Definition) -> Model:
        return replace(self, program=definition.program)


def records(rows: Iterable[int], vocab: int) -> NDArray[np.void]:
    """Greedy samples of these rows."""
    wanted = list(rows)
    out = np.zeros(len(wanted), SAMPLE_DTYPE)
    out["row"], out["target"], out["allowed_vocab"], out["mask"] = wanted, -1, vocab, -1
    out["top_p"] = out["typical_p"] = out["repetition_penalty"] = 1
    return out


def batch_of(
    parts: list[tuple[list[int], int, list[int]]], rows: Iterable[int], vocab: int, **fields: Any
) -> Batch:
    """parts: (tokens, tokens already computed, block ids) of each sequence."""
    none = np.zeros(0, np.int32)
    values: dict[str, Any] = {
        "tokens": np.array([t for tokens, _, _ in parts for t in tokens], np.int32),
        "seq_tokens": np.array([len(tokens) for tokens, _, _ in parts], np.int32),
        "seq_context": np.array([context for _, context, _ in parts], np.int32),
        "block_start": np.cumsum([0, *(len(blocks) for _, _, blocks in parts)], dtype=np.int32),
        "blocks": np.array([b for _, _, blocks in parts for b in blocks], np.int32),
        "samples": records(rows, vocab),
        "history": none,
        "bias_ids": none,
        "bias_values": np.zeros(0, np.float32),
        "ban_ids": none,
        "return_logits": True,
    }
    return Batch(**{**values, **fields})


@dataclass
class Run:
    """Sequences in progress on one backend; every row's logits are kept."""

    backend: NativeBackend
    free: list[int] = field(default_factory=list)
    tables: dict[str, list[int]] = field(default_factory=dict)
    done: dict[str, int] = field(default_factory=dict)
    logits: dict[str, list[Floats]] = field(default_factory=dict)
    status: dict[str, list[NDArray[np.uint8]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        order = np.random.default_rng(self.backend.num_blocks).permutation(self.backend.num_blocks)
        self.free = [int(b) for b in order]

    def step(self, work: Mapping[str, list[int]]) -> StepResult:
        """Appends tokens to sequences."""
        parts = []
        for name, tokens in work.items():
            done, table = self.done.get(name, 0), self.tables.setdefault(name, [])
            while len(table) * BLOCK < done + len(tokens):
                table.append(self.free.pop())
            parts.append((tokens, done, table))
            self.done[name] = done + len(tokens)
        total = sum(len(tokens) for tokens in work.values())
        result = self.backend.run(batch_of(parts, range(total), self.backend.vocab_size))
        assert result.logits is not None
        start = 0
        for name, tokens in work.items():
            end = start + len(tokens)
            self.logits.setdefault(name, []).append(result.logits[start:end])
            self.status.setdefault(name, []).append(result.status[start:end])
            start = end
        return result

    def of(self, name: str) -> Floats:
        """[tokens, vocab]"""
        return np.concatenate(self.logits[name])

    def status_of(self, name: str) -> list[int]:
        return [int(s) for s in np.concatenate(self.status[name])]

    def drop(self, name: str) -> None:
        """Its blocks may be used again, old contents in them."""
        self.free.extend(self.tables.pop(name))
        for kept in (self.done, self.logits, self.status):
            kept.pop(name, None)


def in_chunks(backend: NativeBackend, tokens: list[int], size: int) -> Floats:
    """Logits of every token, `size` tokens a step."""
    run = Run(backend)
    for start in range(0, len(tokens), size):
        run.step({"a": tokens[start : start + size]})
    return run.of("a")
