"""The q, k and v projections of one input become one Linear with three matrices."""

from __future__ import annotations

from msgspec.structs import replace

from fourfold.program.graph import rewire
from fourfold.program.ops import Attention, Linear, Norm, Op, Program, Rope, Value, View


def fuse_qkv(program: Program) -> Program:
    """Fuse wherever an attention's q, k and v come, through per-head norms and rotations, from three plain
    Linears of the same input. Each weight stays its own matrix, so their formats may differ."""
    producer = {op.out.id: op for op in program.ops}

    def projection(view: View) -> Linear | None:
        op = producer[view.value.id]
        while isinstance(op, Norm | Rope):
            op = producer[op.x.value.id]
        plain = isinstance(op, Linear) and op.gate is None and op.residual is None and len(op.weights) == 1
        return op if isinstance(op, Linear) and plain else None

    first: dict[int, Linear] = {}
    dropped: set[int] = set()
    columns: dict[int, View] = {}
    next_id = 1 + max(producer)
    for op in program.ops:
        if not isinstance(op, Attention):
            continue
        parts = [projection(view) for view in (op.q, op.k, op.v)]
        linears = [part for part in parts if part is not None]
        outs = [linear.out.id for linear in linears]
        if len(linears) != 3 or len(set(outs)) != 3 or any(out in columns for out in outs):
            continue
        q = linears[0]
        same_input = all(linear.x == q.x and linear.norm == q.norm for linear in linears)
        if not same_input or not _takes_views(program, outs):
            continue
        out = Value(next_id, sum(linear.out.width for linear in linears), q.out.rows)
        next_id += 1
        start = 0
        for linear in linears:
            columns[linear.out.id] = View(out, start, linear.out.width)
            start += linear.out.width
        earliest = min(linears, key=program.ops.index)
        first[earliest.out.id] = replace(
            q,
            out=out,
            weights=tuple(linear.weights[0] for linear in linears),
            biases=tuple(linear.biases[0] for linear in linears),
        )
        dropped |= set(outs)

    def resolve(view: View) -> View:
        root = columns.get(view.value.id)
        return view if root is None else View(root.value, root.start + view.start, view.width)

    ops: list[Op] = []
    for op in program.ops:
        if op.out.id in first:
            ops.append(rewire(first[op.out.id], resolve))
        elif op.out.id not in dropped:
            ops.append(rewire(op, resolve))
    return replace(program, ops=tuple(ops))


def _takes_views(program: Program, values: list[int]) -> bool:
    """Whether everyone who reads these values reads them through a View field."""
    return all(
        not (isinstance(item, Value) and item.id in values)
        for op in program.ops
        for item in (getattr(op, name) for name in op.__struct_fields__ if name != "out")
    )
