"""The gate and up projections and their activation become one gated Linear."""

from __future__ import annotations

from msgspec.structs import replace

from fourfold.program.graph import consumers, is_whole
from fourfold.program.ops import Gate, Linear, Op, Program, View


def fuse_gate_up(program: Program) -> Program:
    """Linear gate, Linear up, Gate → Linear(gate=act), when nobody else reads the two projections."""
    producer = {op.out.id: op for op in program.ops}
    users = consumers(program.ops)

    def projection(view: View) -> Linear | None:
        op = producer[view.value.id]
        if not isinstance(op, Linear) or not is_whole(view) or len(users[view.value.id]) != 1:
            return None
        plain = op.gate is None and op.residual is None and len(op.weights) == 1
        return op if plain else None

    fused: dict[int, Op] = {}
    dropped: set[int] = set()
    for op in program.ops:
        if not isinstance(op, Gate):
            continue
        gate, up = projection(op.gate), projection(op.up)
        if gate is None or up is None or gate is up or gate.x != up.x or gate.norm != up.norm:
            continue
        fused[op.out.id] = replace(
            gate, out=op.out, weights=gate.weights + up.weights, biases=gate.biases + up.biases, gate=op.act
        )
        dropped |= {gate.out.id, up.out.id}
    ops = (fused.get(op.out.id, op) for op in program.ops if op.out.id not in dropped)
    return replace(program, ops=tuple(ops))
