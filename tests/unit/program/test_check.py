from __future__ import annotations

import pytest
from msgspec.structs import replace

from fourfold.program.check import check
from fourfold.program.graph import whole
from fourfold.program.ops import Add, KVSpec, Linear, Op, Program, Rope, RopeSpec, Value, View, WeightSpec
from fourfold.program.trace import Tracer
from program.programs import decoder


def at(program: Program, kind: type, nth: int = 0) -> int:
    return [index for index, op in enumerate(program.ops) if isinstance(op, kind)][nth]


def with_op(program: Program, index: int, op: Op) -> Program:
    return replace(program, ops=(*program.ops[:index], op, *program.ops[index + 1 :]))


def test_a_traced_program_is_accepted() -> None:
    check(decoder())


def test_reading_before_writing() -> None:
    program = decoder()
    swapped = (program.ops[1], program.ops[0], *program.ops[2:])
    with pytest.raises(ValueError, match=r"op 0 \(Norm\): reads .* no earlier op writes"):
        check(replace(program, ops=swapped))


def test_writing_twice() -> None:
    program = decoder()
    first, second = at(program, Linear, 1), at(program, Linear, 2)
    again = replace(program.ops[second], out=program.ops[first].out)
    with pytest.raises(ValueError, match="written a second time"):
        check(with_op(program, second, again))


def test_a_view_past_the_end() -> None:
    program = decoder()
    index = at(program, Rope)
    op = program.ops[index]
    assert isinstance(op, Rope)
    with pytest.raises(ValueError, match="past the end"):
        check(with_op(program, index, replace(op, x=View(op.x.value, 4, 12))))


def test_widths_that_do_not_fit() -> None:
    program = decoder()
    index = at(program, Add)
    op = program.ops[index]
    with pytest.raises(ValueError, match=r"\(Add\): a, b and out differ"):
        check(with_op(program, index, replace(op, out=Value(op.out.id, 13))))


def test_rotation_wider_than_a_head() -> None:
    program = decoder()
    index = at(program, Rope)
    with pytest.raises(ValueError, match="rotates 6 of 4 columns"):
        check(with_op(program, index, replace(program.ops[index], spec=RopeSpec(6, (1.0, 0.1, 0.01)))))


def test_weights_unknown_unused_or_misshapen() -> None:
    program = decoder()
    missing = {k: v for k, v in program.weights.items() if k != "layers.1.down.weight"}
    with pytest.raises(ValueError, match=r"unknown weight layers\.1\.down\.weight"):
        check(replace(program, weights=missing))
    extra = {**program.weights, "stray": WeightSpec("stray", (1,))}
    with pytest.raises(ValueError, match="no op uses: stray"):
        check(replace(program, weights=extra))
    bent = {**program.weights, "norm.weight": WeightSpec("norm.weight", (11,))}
    with pytest.raises(ValueError, match=r"needs norm\.weight as \(12,\)"):
        check(replace(program, weights=bent))


def test_every_kv_layer_is_written_once() -> None:
    program = decoder()
    with pytest.raises(ValueError, match="KV layers"):
        check(replace(program, kv=program.kv[:1]))
    with pytest.raises(ValueError, match="KV layers"):
        check(replace(program, kv=(*program.kv[:1], KVSpec(1, 2, 4, 5))))


def test_logits_come_last() -> None:
    program = decoder()
    with pytest.raises(ValueError, match="last op must be Logits"):
        check(
            replace(
                program,
                ops=program.ops[:-2],
                weights={k: v for k, v in program.weights.items() if k != "norm.weight"},
            )
        )


def test_token_rows_cannot_be_read_as_logit_rows() -> None:
    program = decoder()
    op = program.ops[-2]
    with pytest.raises(ValueError, match="reads"):
        check(with_op(program, len(program.ops) - 2, replace(op, x=whole(program.ops[0].out))))


def test_one_weight_name_has_one_shape() -> None:
    t = Tracer("test", vocab_size=5, hidden_size=4, max_position=8)
    h = t.embed("embed.weight")
    t.linear(h, "a", 6)
    with pytest.raises(ValueError, match=r"a\.weight is \(6, 4\) to one op and \(7, 4\)"):
        t.linear(h, "a", 7)
