"""What one step of a model moves and computes: the divisor of every "share of the machine's limit"."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from fourfold.build.pack import pack_matrix
from fourfold.config import EngineConfig, KVDtype
from fourfold.models.registry import Definition, load_model_definition
from fourfold.program.costs import Cost, Span, op_cost
from fourfold.program.ops import Linear, Logits, Program
from fourfold.program.passes import optimize
from fourfold.quant.registry import get_format
from fourfold.weights.open import open_checkpoint
from fourfold.weights.source import WeightSource

SAMPLE_ROWS = 64
"""Rows packed to see how many bytes a matrix takes per element."""
KV_ELEMENT_BYTES: Mapping[KVDtype, int] = {"float32": 4, "bfloat16": 2, "int8": 1, "fp8": 1}
"""Without the scales of int8 and fp8: a few per cent."""


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """A model's Program with the bytes of its weights.

    file_bytes, packed_bytes: weight name → bytes per element, in the checkpoint and as the kernels read it.
    kv_element_bytes: of one element of the KV cache.
    """

    program: Program
    file_bytes: dict[str, float]
    packed_bytes: dict[str, float]
    kv_element_bytes: int

    def decode_bytes(self, depth: int, sequences: int = 1) -> float:
        """Read for one token of each sequence after `depth` ones: packed weights once, all of their KV."""
        cost = self._cost([Span(1, depth)] * sequences, self.packed_bytes.__getitem__)
        return cost.weight_bytes + cost.kv_bytes

    def decode_file_bytes(self) -> float:
        """Weights read for one token, as large as the checkpoint has them: the same for every engine."""
        return self._cost([Span(1)], self.file_bytes.__getitem__).weight_bytes

    def prefill_operations(self, tokens: int) -> int:
        """Of all matmuls over a prompt, the head for its last token only; attention is not counted."""
        ops = [op for op in self.program.ops if isinstance(op, Linear | Logits)]
        return sum(op_cost(op, self.program, [Span(tokens)]).flops for op in ops)

    def kv_bytes_per_token(self) -> int:
        return sum(2 * each.kv_heads * each.head_dim * self.kv_element_bytes for each in self.program.kv)

    def _cost(self, spans: list[Span], weight_bytes: Callable[[str], float]) -> Cost:
        costs = (
            op_cost(op, self.program, spans, weight_bytes=weight_bytes, kv_bytes=self.kv_element_bytes)
            for op in self.program.ops
        )
        return sum(costs, Cost())


def model_costs(path: Path, config: EngineConfig) -> ModelCosts:
    """Reads the checkpoint's header and a few rows of each matrix. Raises LoadError."""
    source = open_checkpoint(path)
    definition = load_model_definition(source, config.max_model_len)
    exact = config.activation_dtype == "float32"
    return ModelCosts(
        optimize(definition.program),
        {name: _file_bytes(source, definition, name) for name in definition.program.weights},
        {name: _packed_bytes(source, definition, name, exact=exact) for name in definition.program.weights},
        KV_ELEMENT_BYTES[config.kv_cache_dtype],
    )


def _file_bytes(source: WeightSource, definition: Definition, name: str) -> float:
    block = get_format(source.tensor(definition.bindings[name].source).format)
    return block.block_bytes / block.block


def _packed_bytes(source: WeightSource, definition: Definition, name: str, *, exact: bool) -> float:
    shape = definition.program.weights[name].shape
    if len(shape) == 1:
        return 4.0
    binding = definition.bindings[name]
    rows = min(shape[0], SAMPLE_ROWS)
    some = replace(binding, rows=rows, interleaved_heads=None)
    return pack_matrix(source, some, exact=exact).data.nbytes / math.prod((-(-rows // 16) * 16, shape[1]))
