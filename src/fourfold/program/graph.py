"""Reading and rewriting single ops: what they read, what they write, which weights they name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from msgspec.structs import replace

from fourfold.program.ops import (
    Attention,
    Embed,
    Linear,
    Logits,
    Norm,
    NormSpec,
    Op,
    Program,
    Value,
    View,
)

OpT = TypeVar("OpT", bound=Op)


def whole(value: Value) -> View:
    """All columns of a value."""
    return View(value, 0, value.width)


def is_whole(view: View) -> bool:
    return view.start == 0 and view.width == view.value.width


def reads(op: Op) -> tuple[View, ...]:
    """Every activation the op reads, in field order; whole values appear as views of all their columns."""
    views = []
    for name in op.__struct_fields__:
        item = getattr(op, name)
        if isinstance(item, View):
            views.append(item)
        elif isinstance(item, Value) and name != "out":
            views.append(whole(item))
    return tuple(views)


def rewire(op: OpT, change: Callable[[View], View]) -> OpT:
    """The op with every input replaced by `change(input)`. An input that must be a whole value stays one:
    ValueError when `change` gives it some columns only."""
    changed: dict[str, Any] = {}
    for name in op.__struct_fields__:
        item = getattr(op, name)
        if isinstance(item, View):
            changed[name] = change(item)
        elif isinstance(item, Value) and name != "out":
            view = change(whole(item))
            if not is_whole(view):
                raise ValueError(f"{type(op).__name__}.{name} takes a whole value, got {view}")
            changed[name] = view.value
    return replace(op, **changed)


def consumers(ops: tuple[Op, ...] | list[Op]) -> dict[int, list[int]]:
    """Value id → indices of the ops that read it, once each, in order."""
    users: dict[int, list[int]] = {}
    for index, op in enumerate(ops):
        for value_id in {view.value.id for view in reads(op)}:
            users.setdefault(value_id, []).append(index)
    return users


def norm_weights(spec: NormSpec | None, width: int) -> dict[str, tuple[int, ...]]:
    if spec is None:
        return {}
    return {name: (width,) for name in (spec.weight, spec.bias) if name is not None}


def weight_shapes(op: Op, program: Program) -> Mapping[str, tuple[int, ...]]:
    """The weights an op names with the shape it needs; a Linear's rows are taken from the program's own spec,
    since the split of its width over several matrices is not written in the op."""
    match op:
        case Embed():
            return {op.weight: (program.vocab_size, op.out.width)}
        case Norm():
            return norm_weights(op.spec, op.x.width // op.heads)
        case Linear():
            shapes = dict(norm_weights(op.norm, op.x.width))
            for weight, bias in zip(op.weights, op.biases, strict=True):
                rows = program.weights[weight].shape[0]
                shapes[weight] = (rows, op.x.width)
                if bias is not None:
                    shapes[bias] = (rows,)
            return shapes
        case Attention():
            shapes = {**norm_weights(op.q_norm, op.head_dim), **norm_weights(op.k_norm, op.head_dim)}
            if op.sinks is not None:
                shapes[op.sinks] = (op.heads,)
            return shapes
        case Logits():
            shapes = {**norm_weights(op.norm, op.x.width), op.weight: (op.out.width, op.x.width)}
            if op.bias is not None:
                shapes[op.bias] = (op.out.width,)
            return shapes
        case _:
            return {}
