"""Scaling by one is dropped."""

from __future__ import annotations

from msgspec.structs import replace

from fourfold.program.graph import is_whole, rewire
from fourfold.program.ops import Op, Program, Scale, View


def drop_identities(program: Program) -> Program:
    """Remove Scale ops of factor 1 over whole values (columns of a value may not stand for it everywhere)."""
    alias: dict[int, View] = {}

    def resolve(view: View) -> View:
        root = alias.get(view.value.id)
        return view if root is None else View(root.value, view.start, view.width)

    ops: list[Op] = []
    for op in program.ops:
        op = rewire(op, resolve)
        if isinstance(op, Scale) and op.factor == 1.0 and is_whole(op.x):
            alias[op.out.id] = op.x
        else:
            ops.append(op)
    return replace(program, ops=tuple(ops))
