from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings

from fourfold.program.check import check
from fourfold.program.interpret import interpret
from fourfold.program.ops import (
    Add,
    Attention,
    Gate,
    GatherRows,
    Linear,
    Logits,
    Norm,
    Rope,
    RopeSpec,
    Scale,
)
from fourfold.program.passes import (
    PASSES,
    drop_identities,
    fuse_attention_prologue,
    fuse_gate_up,
    fuse_norm,
    fuse_qkv,
    fuse_residual,
    gather_early,
    optimize,
)
from fourfold.program.trace import Tracer
from program.programs import ROPE, decoder, programs, random_weights

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


@pytest.mark.parametrize("rewrite", [*PASSES, optimize])
@pytest.mark.parametrize("qk_norm, post_norm, unit_scale", list(product([False, True], repeat=3)))
def test_meaning_is_kept(rewrite, qk_norm: bool, post_norm: bool, unit_scale: bool) -> None:  # type: ignore[no-untyped-def]
    program = decoder(qk_norm=qk_norm, post_norm=post_norm, unit_scale=unit_scale)
    weights = random_weights(program)
    before = interpret(program, weights, TOKENS)
    rewritten = rewrite(program)
    check(rewritten)
    np.testing.assert_allclose(interpret(rewritten, weights, TOKENS), before, atol=1e-6, rtol=1e-6)
    assert rewrite(rewritten) == rewritten, "a second run finds nothing more to do"


@settings(max_examples=120, deadline=None)
@given(programs())
def test_meaning_is_kept_for_any_program(program) -> None:  # type: ignore[no-untyped-def]
    weights = random_weights(program)
    rewritten = optimize(program)
    with np.errstate(all="ignore"):
        before, after = (interpret(p, weights, [1, 2, 3], logit_rows=[2, 0]) for p in (program, rewritten))
    np.testing.assert_allclose(after, before, atol=1e-6, rtol=1e-4)


def test_unit_scale_goes_and_others_stay() -> None:
    assert not [op for op in drop_identities(decoder(unit_scale=True)).ops if isinstance(op, Scale)]
    t = Tracer("test", vocab_size=5, hidden_size=4, max_position=8)
    t.logits(t.gather_rows(t.scale(t.embed("embed.weight"), 0.5)), "embed.weight")
    program = t.finish()
    assert drop_identities(program) == program


def test_fused_qkv_is_one_linear_of_three_matrices_read_through_views() -> None:
    program = fuse_qkv(decoder(layers=1))
    (linear,) = (op for op in program.ops if isinstance(op, Linear) and len(op.weights) == 3)
    assert linear.weights == ("layers.0.q.weight", "layers.0.k.weight", "layers.0.v.weight")
    assert linear.biases == ("layers.0.q.bias", None, None)
    assert linear.out.width == 20
    ropes = [op.x for op in program.ops if isinstance(op, Rope)]
    assert [(view.start, view.width) for view in ropes] == [(0, 12), (12, 4)]
    (attention,) = (op for op in program.ops if isinstance(op, Attention))
    assert (attention.v.value, attention.v.start, attention.v.width) == (linear.out, 16, 4)


def test_prologue_needs_equal_rotation_and_a_single_reader() -> None:
    def attend(k_rope: RopeSpec, extra_reader: bool) -> Attention:
        t = Tracer("test", vocab_size=5, hidden_size=8, max_position=8)
        h = t.embed("embed.weight")
        q, k, v = (t.linear(h, name, 8) for name in "qkv")
        q, k = t.rope(q, 2, ROPE), t.rope(k, 2, k_rope)
        x = t.attention(q, k, v, layer=0, heads=2, kv_heads=2, scale=1.0)
        t.logits(t.gather_rows(t.add(x, q) if extra_reader else x), "embed.weight")
        (op,) = (op for op in fuse_attention_prologue(t.finish()).ops if isinstance(op, Attention))
        return op

    assert attend(ROPE, False).rope == ROPE
    assert attend(RopeSpec(4, (1.0, 0.2)), False).rope is None
    assert attend(ROPE, True).rope is None


def test_norm_read_by_others_too_stays() -> None:
    t = Tracer("test", vocab_size=5, hidden_size=8, max_position=8)
    x = t.norm(t.embed("embed.weight"), "norm", 1e-5)
    t.logits(t.gather_rows(t.add(x, t.linear(x, "a", 8))), "embed.weight")
    program = t.finish()
    assert fuse_norm(program) == program


def test_final_norm_moves_into_logits() -> None:
    last = fuse_norm(decoder()).ops[-1]
    assert isinstance(last, Logits)
    assert last.norm is not None
    assert last.norm.weight == "norm.weight"


def test_residual_goes_to_the_op_before_the_add() -> None:
    plain, post = optimize(decoder()), optimize(decoder(post_norm=True))
    assert not [op for op in (*plain.ops, *post.ops) if isinstance(op, Add | Gate)]
    by_output = [op for op in plain.ops if isinstance(op, Linear) and op.residual is not None]
    assert [op.weights[0] for op in by_output[:2]] == ["layers.0.o.weight", "layers.0.down.weight"]
    assert [op.spec.weight for op in post.ops if isinstance(op, Norm)] == [
        "layers.0.post.weight",
        "layers.1.post.weight",
    ]


def test_residual_defined_after_the_matmul_cannot_be_absorbed() -> None:
    t = Tracer("test", vocab_size=5, hidden_size=8, max_position=8)
    h = t.embed("embed.weight")
    early = t.linear(h, "early", 8)
    late = t.scale(h, 2.0)
    t.logits(t.gather_rows(t.add(early, late)), "embed.weight")
    program = t.finish()
    assert fuse_residual(program) == program


def test_a_pair_read_elsewhere_is_not_gated() -> None:
    t = Tracer("test", vocab_size=5, hidden_size=8, max_position=8)
    h = t.embed("embed.weight")
    gate, up = t.linear(h, "gate", 8), t.linear(h, "up", 8)
    t.logits(t.gather_rows(t.add(t.gate(gate, up, "silu"), up)), "embed.weight")
    program = t.finish()
    assert fuse_gate_up(program) == program


def test_after_the_last_attention_only_wanted_rows_are_computed() -> None:
    program = optimize(decoder(layers=2))
    last = max(index for index, op in enumerate(program.ops) if isinstance(op, Attention))
    after = program.ops[last + 1 :]
    assert [type(op) for op in after] == [GatherRows, GatherRows, Linear, Linear, Linear, Logits]
    assert {op.out.rows for op in after} == {"logit_rows"}
    assert next(op.x for op in after if isinstance(op, GatherRows)) == program.ops[last].out
    assert not any(op.out.rows == "logit_rows" for op in program.ops[:last])


def test_what_other_rows_need_is_computed_for_all_rows() -> None:
    t = Tracer("test", vocab_size=5, hidden_size=8, max_position=8)
    h = t.linear(t.embed("embed.weight"), "a", 8)
    q, k, v = (t.linear(h, name, 8) for name in "qkv")
    x = t.attention(t.rope(q, 2, ROPE), k, v, layer=0, heads=2, kv_heads=2, scale=1.0)
    t.logits(t.gather_rows(t.add(x, t.rope(h, 2, ROPE))), "embed.weight")
    moved = gather_early(t.finish())
    rows = {type(op).__name__: op.out.rows for op in moved.ops}
    assert rows["Rope"] == "tokens", "a rotation needs its row's position"
    assert rows["Add"] == "logit_rows"
    assert sum(isinstance(op, GatherRows) for op in moved.ops) == 2
