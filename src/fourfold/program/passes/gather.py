"""Rows whose logits nobody wants leave the Program as early as they can."""

from __future__ import annotations

from msgspec.structs import replace

from fourfold.program.graph import consumers, rewire, whole
from fourfold.program.ops import Add, Gate, GatherRows, Linear, Norm, Op, Program, Scale, Value, View

_ROW_BY_ROW = (Norm, Linear, Gate, Add, Scale)
"""Ops whose output row depends on that row of their inputs alone (a Rope needs its position, too)."""


def gather_early(program: Program) -> Program:
    """GatherRows moves up to the last values that other rows need: what follows the last attention is
    computed for wanted rows alone. Of a prompt that is one row, or none of a chunk in its middle."""
    users = consumers(program.ops)
    late: set[int] = set()
    for op in reversed(program.ops):
        readers = [program.ops[index] for index in users.get(op.out.id, ())]
        movable = isinstance(op, _ROW_BY_ROW) and op.out.rows == "tokens" and readers
        if movable and all(isinstance(reader, GatherRows) or reader.out.id in late for reader in readers):
            late.add(op.out.id)
    if not late:
        return program

    next_id = 1 + max(op.out.id for op in program.ops)
    gathers: list[Op] = []
    wanted_rows: dict[int, Value] = {}

    def gathered(view: View) -> View:
        value = view.value
        if value.rows == "tokens" and value.id not in wanted_rows:
            wanted_rows[value.id] = Value(next_id + len(gathers), value.width, "logit_rows")
            gathers.append(GatherRows(value, wanted_rows[value.id]))
        return View(wanted_rows.get(value.id, value), view.start, view.width)

    early: list[Op] = []
    after: list[Op] = []
    for op in program.ops:
        if isinstance(op, GatherRows):
            wanted_rows[op.out.id] = gathered(whole(op.x)).value
        elif op.out.id in late or op.out.rows == "logit_rows":
            wanted_rows[op.out.id] = replace(op.out, rows="logit_rows")
            after.append(replace(rewire(op, gathered), out=wanted_rows[op.out.id]))
        else:
            early.append(op)
    return replace(program, ops=(*early, *gathers, *after))
