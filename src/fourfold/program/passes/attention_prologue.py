"""Per-head norms and the rotation of q and k move into the attention that reads them."""

from __future__ import annotations

from msgspec.structs import replace

from fourfold.program.graph import consumers
from fourfold.program.ops import Attention, Norm, NormSpec, Op, Program, Rope, RopeSpec, View


def fuse_attention_prologue(program: Program) -> Program:
    """Linear → [Norm over heads] → [Rope] → Attention becomes Linear → Attention(q_norm, k_norm, rope).

    q and k must be rotated alike, and nobody else may read what is in between.
    """
    producer = {op.out.id: op for op in program.ops}
    users = consumers(program.ops)
    fused: set[int] = set()

    def only_reader(view: View) -> bool:
        return len(users[view.value.id]) == 1

    def peel_rope(view: View, heads: int, head_dim: int) -> tuple[View, RopeSpec | None]:
        op = producer[view.value.id]
        if isinstance(op, Rope) and (op.heads, op.head_dim) == (heads, head_dim) and only_reader(view):
            return op.x, op.spec
        return view, None

    def peel_norm(view: View, heads: int) -> tuple[View, NormSpec | None]:
        op = producer[view.value.id]
        if isinstance(op, Norm) and op.heads == heads and op.residual is None and only_reader(view):
            return op.x, op.spec
        return view, None

    ops: list[Op] = []
    for op in program.ops:
        if isinstance(op, Attention) and op.rope is None and op.q_norm is None and op.k_norm is None:
            q, q_rope = peel_rope(op.q, op.heads, op.head_dim)
            k, k_rope = peel_rope(op.k, op.kv_heads, op.head_dim)
            if q_rope is not None and q_rope == k_rope:
                fused |= {op.q.value.id, op.k.value.id}
            else:
                q, k, q_rope = op.q, op.k, None
            inner_q, q_norm = peel_norm(q, op.heads)
            inner_k, k_norm = peel_norm(k, op.kv_heads)
            fused |= {view.value.id for view, spec in ((q, q_norm), (k, k_norm)) if spec is not None}
            op = replace(op, q=inner_q, k=inner_k, q_norm=q_norm, k_norm=k_norm, rope=q_rope)
        ops.append(op)
    return replace(program, ops=tuple(op for op in ops if op.out.id not in fused))
