"""Costs against figures worked out by hand and by brute force."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fourfold.program.costs import Cost, Span, keys_read, keys_seen, op_cost, program_cost
from fourfold.program.ops import Embed, Linear, Logits, Program
from fourfold.program.passes import optimize
from fourfold.program.trace import Tracer
from program.programs import decoder


def smollm2_135m() -> Program:
    """The published sizes: 30 layers, hidden 576, MLP 1536, 9 heads over 3 of 64, vocabulary 49152, tied."""
    t = Tracer("smollm2", vocab_size=49152, hidden_size=576, max_position=8192)
    h = t.embed("embed.weight")
    for i in range(30):
        x = t.norm(h, f"layers.{i}.attn_norm.weight", 1e-5)
        q, k, v = (t.linear(x, f"layers.{i}.{n}", w) for n, w in (("q", 576), ("k", 192), ("v", 192)))
        x = t.attention(q, k, v, layer=i, heads=9, kv_heads=3, scale=0.125)
        h = t.add(h, t.linear(x, f"layers.{i}.o", 576))
        x = t.norm(h, f"layers.{i}.mlp_norm.weight", 1e-5)
        x = t.gate(t.linear(x, f"layers.{i}.gate", 1536), t.linear(x, f"layers.{i}.up", 1536), "silu")
        h = t.add(h, t.linear(x, f"layers.{i}.down", 576))
    t.logits(t.norm(t.gather_rows(h), "norm.weight", 1e-5), "embed.weight")
    return t.finish()


def test_a_token_of_smollm2_costs_two_operations_per_parameter() -> None:
    program = optimize(smollm2_135m())
    parameters = 134_515_008  # the checkpoint's own count, embedding and head counted once
    cost = program_cost(program, [Span(new=1)])
    attention = 4 * 576 * 30  # one key each: QK and PV
    norms = 61 * 576
    assert cost.flops - attention == 2 * (parameters - norms)


def test_weights_are_read_once_per_step_whatever_its_tokens() -> None:
    program = optimize(smollm2_135m())
    one, many = (program_cost(program, [Span(n)]) for n in (1, 512))
    embedding_rows = (512 - 1) * 576 * 2
    assert many.weight_bytes - one.weight_bytes == embedding_rows
    assert one.weight_bytes == 2 * (134_515_008 + 576)


def test_kv_bytes_of_a_decode_step() -> None:
    """1000 cached tokens in bf16: 1001 keys and values read and one written, 3 heads of 64, 30 layers."""
    cost = program_cost(smollm2_135m(), [Span(new=1, cached=1000)])
    assert cost.kv_bytes == 30 * 2 * (1001 + 1) * 3 * 64 * 2


def test_prices_follow_the_formats() -> None:
    program = decoder(layers=1)
    (linear,) = (op for op in program.ops if isinstance(op, Linear) and "layers.0.q.weight" in op.weights)
    cost = op_cost(linear, program, [Span(3)], weight_bytes=lambda name: 0.5)
    assert cost == Cost(flops=2 * 3 * 12 * 12, weight_bytes=(144 + 12) / 2, activation_bytes=3 * 24 * 4)
    assert cost.bytes == 78 + 288


def test_logits_are_paid_for_wanted_rows_only() -> None:
    program = decoder(layers=1)
    logits = program.ops[-1]
    assert isinstance(logits, Logits)
    assert op_cost(logits, program, [Span(100, wanted=1), Span(50, wanted=2)]).flops == 2 * 3 * 17 * 12
    embed = program.ops[0]
    assert isinstance(embed, Embed)
    assert op_cost(embed, program, [Span(10)]).weight_bytes == 10 * 12 * 2


@given(st.integers(1, 30), st.integers(0, 30), st.none() | st.integers(1, 40))
def test_keys_by_brute_force(new: int, cached: int, window: int | None) -> None:
    seen = [range(max(0, p + 1 - (window or p + 1)), p + 1) for p in range(cached, cached + new)]
    assert keys_seen(Span(new, cached), window) == sum(len(keys) for keys in seen)
    assert keys_read(Span(new, cached), window) == len(set().union(*seen))


def test_fusing_changes_traffic_but_not_operations() -> None:
    program = decoder()
    spans = [Span(7, cached=3, wanted=7)]
    plain, best = program_cost(program, spans), program_cost(optimize(program), spans)
    assert plain.flops == best.flops
    assert best.activation_bytes < plain.activation_bytes


def test_of_the_last_layer_only_wanted_rows_count() -> None:
    plain, best = decoder(layers=1), optimize(decoder(layers=1))
    shapes = [plain.weights[f"layers.0.{name}.weight"].shape for name in ("o", "gate", "up", "down")]
    unwanted = 7 - 2
    saved = sum(2 * unwanted * rows * columns for rows, columns in shapes)
    spans = [Span(7, cached=3, wanted=2)]
    assert program_cost(plain, spans).flops - program_cost(best, spans).flops == saved
