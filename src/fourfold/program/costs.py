"""What a step costs: floating-point operations and bytes moved, op by op. The planner turns these into time.

Counted as usual: a multiply-add is two operations; norms, activations and adds are left out of the operations
(they are memory traffic, which is counted). Activations are fp32 values as the Program means them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod

import msgspec

from fourfold.program.graph import reads, weight_shapes
from fourfold.program.ops import Attention, Embed, Linear, Logits, Op, Program

ACTIVATION_BYTES = 4


class Span(msgspec.Struct, frozen=True):
    """One sequence's share of a step: `new` tokens computed after `cached` ones. wanted: rows with logits."""

    new: int
    cached: int = 0
    wanted: int = 1


class Cost(msgspec.Struct, frozen=True):
    """flops: operations.  weight_bytes: weights read, once per step.  activation_bytes: activations read and
    written.  kv_bytes: keys and values read and written."""

    flops: int = 0
    weight_bytes: float = 0.0
    activation_bytes: int = 0
    kv_bytes: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.flops + other.flops,
            self.weight_bytes + other.weight_bytes,
            self.activation_bytes + other.activation_bytes,
            self.kv_bytes + other.kv_bytes,
        )

    @property
    def bytes(self) -> float:
        return self.weight_bytes + self.activation_bytes + self.kv_bytes


def bf16(name: str) -> float:
    """Bytes per element of a weight, for a model held in bf16."""
    del name
    return 2.0


def op_cost(
    op: Op,
    program: Program,
    spans: Iterable[Span],
    *,
    weight_bytes: Callable[[str], float] = bf16,
    kv_bytes: float = 2.0,
) -> Cost:
    """weight_bytes: weight name → bytes per element.  kv_bytes: per element of the KV cache."""
    spans = tuple(spans)
    tokens = sum(span.new for span in spans)
    rows = tokens if op.out.rows == "tokens" else sum(span.wanted for span in spans)
    read_rows = {"tokens": tokens, "logit_rows": sum(span.wanted for span in spans)}
    touched = op.out.width * rows + sum(view.width * read_rows[view.value.rows] for view in reads(op))
    activations = touched * ACTIVATION_BYTES
    shapes = weight_shapes(op, program)
    if isinstance(op, Embed):
        return Cost(0, rows * op.out.width * weight_bytes(op.weight), activations)
    weights = sum(prod(shape) * weight_bytes(name) for name, shape in shapes.items())
    match op:
        case Linear():
            return Cost(2 * rows * sum(prod(shapes[w]) for w in op.weights), weights, activations)
        case Logits():
            return Cost(2 * rows * prod(shapes[op.weight]), weights, activations)
        case Attention():
            pairs = sum(keys_seen(span, op.window) for span in spans)
            held = sum(keys_read(span, op.window) + span.new for span in spans)
            kv = int(2 * held * op.kv_heads * op.head_dim * kv_bytes)
            return Cost(4 * pairs * op.heads * op.head_dim, weights, activations, kv)
        case _:
            return Cost(0, weights, activations)


def program_cost(
    program: Program,
    spans: Iterable[Span],
    *,
    weight_bytes: Callable[[str], float] = bf16,
    kv_bytes: float = 2.0,
) -> Cost:
    """One step over all spans."""
    spans = tuple(spans)
    costs = (op_cost(op, program, spans, weight_bytes=weight_bytes, kv_bytes=kv_bytes) for op in program.ops)
    return sum(costs, Cost())


def keys_seen(span: Span, window: int | None) -> int:
    """Query-key pairs of a span: the query at position p sees min(p + 1, window) keys."""
    first, last = span.cached + 1, span.cached + span.new
    if window is None or last <= window:
        return (first + last) * span.new // 2
    full = min(span.new, last - max(window, first - 1))
    growing = span.new - full
    return (first + first + growing - 1) * growing // 2 + full * window


def keys_read(span: Span, window: int | None) -> int:
    """Distinct keys that the queries of a span read."""
    total = span.cached + span.new
    return total if window is None else min(total, span.new + window - 1)
