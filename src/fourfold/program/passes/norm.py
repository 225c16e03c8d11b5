"""A norm that only feeds matmuls is computed by them, together with the quantization of their input."""

from __future__ import annotations

from msgspec.structs import replace

from fourfold.program.graph import consumers, is_whole
from fourfold.program.ops import Linear, Logits, Norm, Op, Program


def fuse_norm(program: Program) -> Program:
    """Norm → Linear(s) or Logits becomes their `norm`."""
    users = consumers(program.ops)
    ops: list[Op | None] = list(program.ops)

    def takes(op: Op, norm: Norm) -> bool:
        match op:
            case Linear():
                residual = op.residual is not None and op.residual.id == norm.out.id
                return op.norm is None and is_whole(op.x) and op.x.value.id == norm.out.id and not residual
            case Logits():
                return op.norm is None and is_whole(norm.x)
            case _:
                return False

    for index, norm in enumerate(program.ops):
        if not isinstance(norm, Norm) or norm.heads != 1 or norm.residual is not None:
            continue
        readers = users.get(norm.out.id, [])
        if not readers or not all(takes(program.ops[reader], norm) for reader in readers):
            continue
        for reader in readers:
            op = ops[reader]
            if isinstance(op, Linear):
                ops[reader] = replace(op, x=norm.x, norm=norm.spec)
            elif isinstance(op, Logits):
                ops[reader] = replace(op, x=norm.x.value, norm=norm.spec)
        ops[index] = None
    return replace(program, ops=tuple(op for op in ops if op is not None))
