from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.program.graph import reads
from fourfold.program.memory import in_place_candidates, lifetimes, plan
from fourfold.program.ops import Linear, Norm, Program
from fourfold.program.passes import optimize
from program.programs import decoder, programs


def assert_sound(program: Program) -> None:
    layout = plan(program)
    lives = lifetimes(program)
    by_id = {op.out.id: op.out for op in program.ops}
    assert set(layout.slot_of) == set(by_id)
    for value_id, slot in layout.slot_of.items():
        assert layout.slot_width[slot] >= by_id[value_id].width
        assert layout.slot_rows[slot] == by_id[value_id].rows
    # Independent of the planner: walk the program and see whether a slot still holds what is read from it.
    held: dict[int, int] = {}
    for op in program.ops:
        for view in reads(op):
            assert held[layout.slot_of[view.value.id]] == view.value.id, "overwritten before it was read"
        slot = layout.slot_of[op.out.id]
        sharing = [view.value.id for view in reads(op) if layout.slot_of[view.value.id] == slot]
        assert set(sharing) <= set(in_place_candidates(op)), "output over an input that is not an addend"
        held[slot] = op.out.id
    assert held[layout.slot_of[program.ops[-1].out.id]] == program.ops[-1].out.id
    assert lives[program.ops[-1].out.id][1] == len(program.ops)


@settings(max_examples=200, deadline=None)
@given(programs(), st.booleans())
def test_no_two_live_values_share_a_slot(program: Program, fused: bool) -> None:
    assert_sound(optimize(program) if fused else program)


@pytest.mark.parametrize("post_norm", [False, True])
def test_decoders(post_norm: bool) -> None:
    assert_sound(decoder(layers=4, post_norm=post_norm))
    assert_sound(optimize(decoder(layers=4, post_norm=post_norm)))


def test_the_hidden_state_is_updated_in_place() -> None:
    program = optimize(decoder(layers=3))
    layout = plan(program)
    stream = {
        layout.slot_of[op.out.id] for op in program.ops if isinstance(op, Linear) and op.residual is not None
    }
    rows = {layout.slot_rows[slot]: slot for slot in stream}
    assert len(stream) == 2
    assert rows["tokens"] == layout.slot_of[program.ops[0].out.id]
    # hidden 12; qkv and MLP share one slot of 20 columns; the attention's 12
    assert sorted(layout.slot_width[: len(layout.slot_width) - 2]) == [12, 12, 20]
    assert layout.columns("tokens") == 44
    # of wanted rows: hidden 12; attention, MLP and logits share one of 20
    assert layout.columns("logit_rows") == 12 + 20


def test_an_x_is_never_overwritten_even_when_it_is_the_residual_too() -> None:
    program = optimize(decoder(post_norm=True))
    for op in program.ops:
        if isinstance(op, Linear | Norm):
            assert op.x.value.id not in in_place_candidates(op)


def test_depth_does_not_cost_memory() -> None:
    shallow, deep = (plan(optimize(decoder(layers=n))) for n in (2, 12))
    assert shallow.slot_width == deep.slot_width
