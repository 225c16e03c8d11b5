"""The runtime on hand-made programs with every op and option, against the interpreter. Needs no torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from matmul_harness import DENSE, INTS, Kind, random_matrix
from msgspec.structs import replace
from numpy.typing import NDArray

from fourfold import _native
from fourfold.backends.native import NativeBackend, NativeLimits
from fourfold.build.divisions import Division
from fourfold.build.packed import Outliers, PackedMatrix, PackedWeights
from fourfold.engine.batch import SAMPLE_DTYPE, Batch
from fourfold.errors import LoadError
from fourfold.program.check import check
from fourfold.program.interpret import interpret
from fourfold.program.memory import plan
from fourfold.program.ops import Attention, Linear, Logits, Norm, NormSpec, Op, Program, RopeSpec, WeightSpec
from fourfold.program.passes import optimize
from fourfold.program.trace import Tracer

VOCAB, HIDDEN, MLP, HEADS, KV_HEADS, DIM, CONTEXT = 101, 64, 96, 4, 2, 16, 128
ROPE = RopeSpec(8, (1.0, 0.3, 0.1, 0.02), scale=1.1)
LIMITS = NativeLimits(max_batch_tokens=CONTEXT, max_seqs=3, max_context=CONTEXT, num_blocks=7)

Floats = NDArray[np.float32]


def decoder(*, layer_norm: bool) -> Program:
    """Two layers: windows, soft caps, sinks, norms of heads, biases, a partial rotation, scaled logits."""
    t = Tracer("test", vocab_size=VOCAB, hidden_size=HIDDEN, max_position=CONTEXT)
    h = t.scale(t.embed("embed.weight", scale=1.5), 0.8)
    for i in range(2):
        name = f"layers.{i}"
        x = t.norm(h, f"{name}.attn_norm.weight", 1e-5)
        q = t.linear(x, f"{name}.q", HEADS * DIM, bias=True)
        k, v = t.linear(x, f"{name}.k", KV_HEADS * DIM), t.linear(x, f"{name}.v", KV_HEADS * DIM, bias=True)
        if i == 0:
            q = t.norm(q, f"{name}.q_norm.weight", 1e-6, heads=HEADS)
            k = t.norm(k, f"{name}.k_norm.weight", 1e-6, heads=KV_HEADS)
        q, k = t.rope(q, HEADS, ROPE), t.rope(k, KV_HEADS, ROPE)
        softcap = 3.0 if i else None
        x = t.attention(
            q,
            k,
            v,
            layer=i,
            heads=HEADS,
            kv_heads=KV_HEADS,
            scale=0.3,
            window=9 if i else None,
            softcap=softcap,
        )
        x = t.linear(x, f"{name}.o", HIDDEN, bias=True)
        h = t.add(h, t.norm(x, f"{name}.post.weight", 1e-5) if i else x)
        x = t.norm(h, f"{name}.mlp_norm.weight", 1e-5)
        x = t.gate(t.linear(x, f"{name}.gate", MLP), t.linear(x, f"{name}.up", MLP), "gelu" if i else "silu")
        h = t.add(h, t.linear(x, f"{name}.down", HIDDEN))
    t.logits(t.norm(t.gather_rows(h), "norm.weight", 1e-5), "head.weight", softcap=10.0, scale=0.7)
    program = t.finish()
    weights = dict(program.weights)

    def widen(op: Op) -> Op:
        """What no family uses yet."""
        match op:
            case Norm() if layer_norm and op.heads == 1:
                name = op.spec.weight.replace("weight", "bias")
                weights[name] = WeightSpec(name, (op.x.width,))
                return replace(op, spec=NormSpec(op.spec.weight, 1e-3, "layer", offset=0.5, bias=name))
            case Attention():
                name = f"layers.{op.layer}.sinks"
                weights[name] = WeightSpec(name, (HEADS,))
                return replace(op, sinks=name)
            case Logits():
                weights["head.bias"] = WeightSpec("head.bias", (VOCAB,))
                return replace(op, bias="head.bias")
        return op

    program = replace(program, ops=tuple(widen(op) for op in program.ops), weights=weights)
    check(program)
    return program


def random_weights(program: Program, kinds: list[Kind]) -> tuple[PackedWeights, dict[str, Floats]]:
    rng = np.random.default_rng(0)
    matrices: dict[str, PackedMatrix] = {}
    vectors: dict[str, Floats] = {}
    plain: dict[str, Floats] = {}
    for index, (name, spec) in enumerate(program.weights.items()):
        if len(spec.shape) == 2:
            m = random_matrix(kinds[index % len(kinds)], *spec.shape, seed=index)
            matrices[name] = PackedMatrix(name, m.data, m.n, m.k, *m.description)
            plain[name] = m.w
        else:
            around = 1.0 if name.endswith("norm.weight") else 0.0
            plain[name] = vectors[name] = (around + 0.3 * rng.standard_normal(spec.shape)).astype(np.float32)
    return PackedWeights(matrices, vectors), plain


def batch(parts: list[tuple[NDArray[np.int32], int, list[int]]]) -> Batch:
    total = sum(len(tokens) for tokens, _, _ in parts)
    samples = np.zeros(total, SAMPLE_DTYPE)
    samples["row"], samples["target"], samples["mask"], samples["logprobs"] = np.arange(total), -1, -1, 3
    samples["allowed_vocab"] = VOCAB
    for off in ("top_p", "typical_p", "repetition_penalty"):
        samples[off] = 1
    none = np.zeros(0, np.int32)
    return Batch(
        tokens=np.concatenate([tokens for tokens, _, _ in parts]),
        seq_tokens=np.array([len(tokens) for tokens, _, _ in parts], np.int32),
        seq_context=np.array([context for _, context, _ in parts], np.int32),
        block_start=np.cumsum([0, *(len(blocks) for _, _, blocks in parts)], dtype=np.int32),
        blocks=np.array([b for _, _, blocks in parts for b in blocks], np.int32),
        samples=samples,
        history=none,
        bias_ids=none,
        bias_values=np.zeros(0, np.float32),
        ban_ids=none,
        return_logits=True,
    )


def logits(backend: NativeBackend, tokens: NDArray[np.int32], size: int) -> Floats:
    """By `size` tokens a step, beside another sequence that has one token a step."""
    found, other = [], np.arange(CONTEXT, dtype=np.int32) % VOCAB
    for step, start in enumerate(range(0, len(tokens), size)):
        part = tokens[start : start + size]
        parts = [(part, start, [5, 0, 3, 1])]
        if len(part) < CONTEXT and step < 60:
            parts.append((other[step : step + 1], step, [2, 6]))
        result = backend.run(batch(parts))
        assert result.logits is not None
        assert not result.status.any()
        found.append(result.logits[: len(part)])
    return np.concatenate(found)


def make(program: Program, weights: PackedWeights, **options: Any) -> NativeBackend:
    return NativeBackend(program, plan(program), weights, LIMITS, **options)


TOKENS = np.random.default_rng(1).integers(0, VOCAB, 75).astype(np.int32)


@pytest.mark.parametrize("isa", _native.isas())
@pytest.mark.parametrize("layer_norm", [False, True])
def test_every_op_and_option_against_the_interpreter(layer_norm: bool, isa: str) -> None:
    program = decoder(layer_norm=layer_norm)
    weights, plain = random_weights(program, [*DENSE, INTS[2], INTS[7], INTS[9], INTS[14]])
    want = interpret(program, plain, TOKENS.tolist())
    assert want.std() > 0.5
    for form in (program, optimize(program)):
        backend = make(form, weights, activation_dtype="float32", kv_dtype="float32", isa=isa, threads=2)
        found = logits(backend, TOKENS, 75)
        np.testing.assert_allclose(found, want, atol=2e-4, rtol=0)
        np.testing.assert_array_equal(logits(backend, TOKENS, 8), found)


@pytest.mark.parametrize("isa", _native.isas())
@pytest.mark.parametrize(
    "kinds", [INTS[::5], [INTS[0], Kind("bf16"), INTS[15]], DENSE], ids=["ints", "mixed", "dense"]
)
def test_int8_and_bf16_give_the_same_bits_in_any_cut(kinds: list[Kind], isa: str) -> None:
    program = optimize(decoder(layer_norm=False))
    weights, _ = random_weights(program, kinds)
    channels = np.array([1, 17, 40], np.int32)
    columns = {}
    for name, m in weights.matrices.items():
        if m.elem == 0:
            out = np.empty(-(-m.n // 16) * 16 * len(channels), np.uint16)
            _native.extract_columns(
                m.data, m.n, m.k, m.bits, m.group, m.zero, m.has_offset, m.wide, channels, out
            )
            columns[name] = Outliers(channels, (out,))
    # Of the ops with a single matrix; the others do without.
    outliers = {
        name: o for name, o in columns.items() if name.endswith((".o.weight", ".down.weight", "head.weight"))
    }
    weights = replace(weights, outliers=outliers)
    whole = logits(make(program, weights, isa=isa), TOKENS, 75)
    assert np.isfinite(whole).all()
    for size, threads in ((1, 1), (4, 2), (5, 3), (33, 2)):
        found = logits(make(program, weights, isa=isa, threads=threads), TOKENS, size)
        np.testing.assert_array_equal(found, whole, err_msg=f"{size} tokens a step, {threads} threads")


@pytest.mark.parametrize("isa", _native.isas())
@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_every_division_gives_the_same_bits(dtype: str, isa: str) -> None:
    program = optimize(decoder(layer_norm=False))
    weights, _ = random_weights(program, INTS[::4])
    whole = logits(make(program, weights, isa=isa, activation_dtype=dtype), TOKENS, 75)
    rng = np.random.default_rng(0)
    for _ in range(12):
        divisions = {
            index: tuple(
                Division(least, most, int(rng.choice([0, 4, 40])), runs, *map(int, rng.integers(1, [5, 257])))
                for least, most, runs in ((1, 7, bool(rng.integers(2))), (9, 2**31 - 1, False))
            )
            for index, op in enumerate(program.ops)
            if isinstance(op, Linear | Logits) and rng.integers(4)
        }
        backend = make(program, weights, isa=isa, activation_dtype=dtype, threads=3, divisions=divisions)
        for size in (1, 6, 8, 75):
            np.testing.assert_array_equal(logits(backend, TOKENS, size), whole, err_msg=str(divisions))


@pytest.mark.parametrize(
    "wrong, complaint",
    [
        ([Division(1, 4, 0, False, 5, 8)], "too large"),
        ([Division(1, 4, 0, False, 0, 8)], "too large"),
        ([Division(1, 4, 0, False, 4, 257)], "too large"),
        ([Division(1, 4, 0, False, 4, 0)], "too large"),
        ([Division(3, 2, 0, False, 4, 8)], "more and more rows"),
        ([Division(1, 4, 0, False, 4, 8), Division(4, 8, 0, False, 4, 8)], "more and more rows"),
    ],
)
def test_divisions_that_cannot_be_are_refused(wrong: list[Division], complaint: str) -> None:
    program = optimize(decoder(layer_norm=False))
    weights, _ = random_weights(program, INTS[::4])
    index = next(i for i, op in enumerate(program.ops) if isinstance(op, Linear))
    with pytest.raises(LoadError, match=complaint):
        make(program, weights, divisions={index: tuple(wrong)})


def test_magnitudes_of_inputs_are_those_of_the_interpreter() -> None:
    """Of the head's input, which the interpreter gives as logits of an identity."""
    program = optimize(decoder(layer_norm=False))
    weights, plain = random_weights(program, DENSE)
    backend = make(program, weights, activation_dtype="float32", kv_dtype="float32")
    found = backend.input_magnitudes(TOKENS)
    assert all(len(values) and np.isfinite(values).all() for values in found.values())
    head = program.ops[-1]
    assert isinstance(head, Logits)
    bare = replace(program, ops=(*program.ops[:-1], replace(head, bias=None, softcap=None, scale=1.0)))
    identity = {**plain, "head.weight": np.eye(HIDDEN, dtype=np.float32)}
    want = np.abs(interpret(bare, identity, TOKENS.tolist())).max(0)
    np.testing.assert_allclose(found[len(program.ops) - 1], want, rtol=1e-4)
