"""Where activations live: values share a slot when their lives do not overlap.

A backend multiplies a slot's width by the rows of its kind (tokens of the step, or rows whose logits are
wanted) and lays the slots out in one arena.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from fourfold.program.graph import reads
from fourfold.program.ops import Add, Linear, Norm, Op, Program

Rows: TypeAlias = Literal["tokens", "logit_rows"]


class MemoryPlan(msgspec.Struct, frozen=True, array_like=True):
    """slot_of: value id → slot.  slot_width: fp32 columns of each slot (its widest value).
    slot_rows: the kind of rows a slot holds; values of different kinds never share one."""

    slot_of: dict[int, int]
    slot_width: tuple[int, ...]
    slot_rows: tuple[Rows, ...]

    def columns(self, rows: Rows) -> int:
        """fp32 columns of all slots of one kind: the arena's size per row."""
        return sum(w for w, kind in zip(self.slot_width, self.slot_rows, strict=True) if kind == rows)


def lifetimes(program: Program) -> dict[int, tuple[int, int]]:
    """Value id → (index of the op that writes it, of the last op that reads it). Logits live to the end."""
    lives = {op.out.id: (index, index) for index, op in enumerate(program.ops)}
    for index, op in enumerate(program.ops):
        for view in reads(op):
            lives[view.value.id] = (lives[view.value.id][0], index)
    last = program.ops[-1].out.id
    lives[last] = (lives[last][0], len(program.ops))
    return lives


def in_place_candidates(op: Op) -> tuple[int, ...]:
    """Values the op may overwrite with its output, if they die there: addends that are read column by column.

    Never the x of a Linear or Norm, of which every output column needs all columns.
    """
    match op:
        case Add():
            return (op.a.id, op.b.id)
        case Linear() | Norm() if op.residual is not None and op.residual.id != op.x.value.id:
            return (op.residual.id,)
        case _:
            return ()


def plan(program: Program) -> MemoryPlan:
    """Slots by one scan over the ops; of the free slots the narrowest that fits, else the widest, grown."""
    lives = lifetimes(program)
    dying: dict[int, list[int]] = {}
    for value_id, (_, end) in lives.items():
        dying.setdefault(end, []).append(value_id)

    slot_of: dict[int, int] = {}
    widths: list[int] = []
    kinds: list[Rows] = []
    free: set[int] = set()
    for index, op in enumerate(program.ops):
        out = op.out
        inherited = None
        for candidate in in_place_candidates(op):
            if lives[candidate][1] == index and kinds[slot_of[candidate]] == out.rows:
                inherited = candidate
                break
        if inherited is not None:
            slot = slot_of[inherited]
        else:
            fitting = [s for s in free if kinds[s] == out.rows]
            wide = [s for s in fitting if widths[s] >= out.width]
            if wide:
                slot = min(wide, key=lambda s: (widths[s], s))
            elif fitting:
                slot = max(fitting, key=lambda s: (widths[s], -s))
            else:
                slot = len(widths)
                widths.append(0)
                kinds.append(out.rows)
            free.discard(slot)
        slot_of[out.id] = slot
        widths[slot] = max(widths[slot], out.width)
        free |= {slot_of[v] for v in dying.get(index, ()) if v != inherited}
    return MemoryPlan(slot_of, tuple(widths), tuple(kinds))
