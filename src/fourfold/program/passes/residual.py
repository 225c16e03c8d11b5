"""The add after a matmul or a norm becomes its residual."""

from __future__ import annotations

from msgspec.structs import replace

from fourfold.program.graph import consumers
from fourfold.program.ops import Add, Linear, Norm, Op, Program, Value


def fuse_residual(program: Program) -> Program:
    """Add(a, b) with b from a Linear or Norm that nobody else reads → that op with residual=a and the sum as
    output. The other addend must exist before the op; of two candidates the later op takes the add."""
    position = {op.out.id: index for index, op in enumerate(program.ops)}
    users = consumers(program.ops)
    ops: list[Op | None] = list(program.ops)

    def absorber(value: Value, other: Value) -> Norm | Linear | None:
        op = ops[position[value.id]]
        if not isinstance(op, Norm | Linear) or op.residual is not None:
            return None
        gated = isinstance(op, Linear) and op.gate is not None
        ready = position[other.id] < position[value.id]
        return op if ready and not gated and len(users[value.id]) == 1 else None

    for index, op in enumerate(program.ops):
        if not isinstance(op, Add) or op.a.id == op.b.id:
            continue
        for value, other in ((op.a, op.b), (op.b, op.a)):
            producer = absorber(value, other)
            if producer is not None:
                at = position[value.id]
                ops[at] = replace(producer, out=op.out, residual=other)
                ops[index] = None
                position[op.out.id] = at
                break
    return replace(program, ops=tuple(op for op in ops if op is not None))
