"""Attention kernels against a float64 oracle, and against themselves however the work is cut up."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attention_harness import (
    BLOCK,
    CODED,
    ISAS,
    KV_TYPES,
    Layer,
    Pool,
    Tokens,
    available_isas,
    covered_isas,
    prepared,
    random_tokens,
    reference,
    stored,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

every_isa = pytest.mark.parametrize("isa", available_isas(), ids=[ISAS[i] for i in available_isas()])
and_emulated = pytest.mark.parametrize("isa", covered_isas(), ids=[ISAS[i] for i in covered_isas()])


def sinks(heads: int) -> NDArray[np.float32]:
    return np.linspace(-2, 3, heads).astype(np.float32)


def norm(head_dim: int) -> NDArray[np.float32]:
    return np.linspace(0.3, 1.7, head_dim).astype(np.float32)


LAYERS = {
    "llama": Layer(rope_dim=64),
    "mha-80": Layer(heads=3, kv_heads=3, head_dim=80, rope_dim=80),
    "phi-96-partial-rope": Layer(heads=4, kv_heads=4, head_dim=96, rope_dim=72),
    "qwen3-128": Layer(heads=8, kv_heads=2, head_dim=128, rope_dim=128, q_norm=norm(128), k_norm=norm(128)),
    "gemma3-256-window": Layer(
        heads=4,
        kv_heads=1,
        head_dim=256,
        window=40,
        rope_dim=256,
        q_norm=norm(256) - 1,
        k_norm=norm(256) - 1,
        norm_offset=1.0,
    ),
    "gemma2-softcap": Layer(heads=4, kv_heads=2, head_dim=64, softcap=5.0, window=33),
    "sinks": Layer(heads=8, kv_heads=1, head_dim=64, sinks=sinks(8), window=20),
    "group-16": Layer(heads=16, kv_heads=1, head_dim=32),
    "group-5": Layer(heads=10, kv_heads=2, head_dim=16),
}
MODES: dict[str, dict[str, Any]] = {
    "dot": {},
    "exact": {"exact": True},
    "f32": {"kv": "f32"},
    "int8": {"kv": "int8"},
    "int8-exact": {"kv": "int8", "exact": True},
    "fp8": {"kv": "fp8"},
    "fp8-exact": {"kv": "fp8", "exact": True},
}
EXACT = ("exact", "f32", "int8-exact", "fp8-exact")
every_mode = pytest.mark.parametrize(
    "isa,mode",
    # What is exact is not computed by the tile unit.
    [(i, m) for i in covered_isas() for m in MODES if ISAS[i] != "amx_emulated" or m not in EXACT],
    ids=lambda each: each if isinstance(each, str) else ISAS[each],
)
# Against float64 on the same cache: weights and q rounded to 8 bits in dot mode; 1e-5 of values of size 1
# otherwise.
TOLERANCE = {name: 2e-5 if name in EXACT else 3e-2 for name in MODES}


def whole(
    layer: Layer, tokens: Tokens, isa: int, threads: int = 1, planned: int | None = None
) -> NDArray[np.float32]:
    pool = Pool(layer, len(tokens.q) // 32 + 3, isa)
    return pool.run({"a": tokens}, threads, planned)["a"]


@every_mode
@pytest.mark.parametrize("name", LAYERS)
def test_equals_the_float64_oracle_with_stale_slots_full_of_nan(name: str, mode: str, isa: int) -> None:
    layer = replace(LAYERS[name], **MODES[mode])
    for count in (1, 2, 31, 32, 33, 100):
        tokens = random_tokens(layer, count, seed=count)
        pool = Pool(layer, 6, isa)
        got = pool.run({"a": tokens})["a"]
        want = reference(layer, tokens, pool.cached("a")[0])
        np.testing.assert_allclose(got, want, atol=TOLERANCE[mode], rtol=0)


@every_isa
@pytest.mark.parametrize("kv", KV_TYPES)
def test_the_cache_holds_k_after_norm_and_rotation_and_v(kv: str, isa: int) -> None:
    layer = replace(LAYERS["qwen3-128"], kv=kv)
    tokens = random_tokens(layer, 45, seed=7)
    pool = Pool(layer, 4, isa)
    pool.run({"a": tokens[:20]})
    pool.run({"a": tokens[20:]})
    k, v = pool.cached("a")
    want_k = prepared(layer, tokens)[1]
    np.testing.assert_array_equal(v, stored(tokens.v.reshape(v.shape), kv).astype(np.float32))
    largest = np.abs(want_k).max(-1, keepdims=True)
    step = {"bf16": 2**-7 * np.abs(want_k), "f32": 4e-6, "int8": largest / 127,
            "fp8": np.maximum(2**-3 * np.abs(want_k), largest / 448 * 2**-9)}[kv]  # fmt: skip
    assert (np.abs(k - want_k) <= step / 2 + 2e-6).all()
    # Float32 rounding before the cut moves few numbers across a tie.
    if kv != "f32":
        assert (np.abs(k - stored(want_k, kv)) > 4e-6).mean() < 1e-3


@every_mode
@pytest.mark.parametrize("window", [0, 513])
def test_equals_the_oracle_around_the_split_boundary(window: int, mode: str, isa: int) -> None:
    layer = replace(Layer(heads=2, kv_heads=1, head_dim=16, window=window, sinks=sinks(2)), **MODES[mode])
    for count in (511, 512, 513, 1030):
        tokens = random_tokens(layer, count, seed=count)
        got, want = whole(layer, tokens, isa), reference(layer, tokens)
        np.testing.assert_allclose(got, want, atol=TOLERANCE[mode], rtol=0)


@every_isa
def test_dot_mode_error_is_that_of_bf16_rounding(isa: int) -> None:
    """The mean error, not only the largest, is of the order of 2^-9 of the spread of V over sqrt(tokens)."""
    layer = Layer(rope_dim=64)
    tokens = random_tokens(layer, 256, seed=5)
    error = np.abs(whole(layer, tokens, isa) - reference(layer, tokens))
    assert error[64:].mean() < 1.5e-3


def without_rounding(layer: Layer, tokens: Tokens) -> NDArray[np.float64]:
    return reference(replace(layer, kv="f32"), tokens)


@every_isa
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("kv,mean_error", [("int8", 5e-3), ("fp8", 3e-2)])
def test_error_of_eight_bit_caches_is_that_of_their_codes(
    kv: str, mean_error: float, exact: bool, isa: int
) -> None:
    """Keys off by half a step shift a score by at most delta, so weights change by a factor of at most
    exp(2 delta), and values by half a step. The mean is far lower: errors of many tokens cancel."""
    layer = Layer(rope_dim=64, kv=kv, exact=exact)
    tokens = random_tokens(layer, 256, seed=5)
    error = np.abs(whole(layer, tokens, isa) - without_rounding(layer, tokens))
    q, k = prepared(layer, tokens)
    half_step = 1 / 254 if kv == "int8" else 2**-4
    delta = layer.scale * np.abs(q).sum(-1).max() * np.abs(k).max() * half_step
    most = np.abs(tokens.v).max()
    assert error.max() <= np.expm1(2 * delta) * most + half_step * most + TOLERANCE["dot"]
    assert error[64:].mean() < mean_error


@every_isa
@pytest.mark.parametrize("kv", CODED)
def test_eight_bit_rows_of_any_size_and_of_zeros(kv: str, isa: int) -> None:
    """Scales are fp32: a row of numbers around 1e-25 or 1e25 keeps its relative precision."""
    layer = Layer(heads=1, kv_heads=1, head_dim=16, kv=kv, exact=True)
    tokens = random_tokens(layer, 6, seed=8)
    tokens.v[:] *= np.array([1e-25, 1e-6, 0, 1, 1e25, 1e-37], np.float32)[:, None]
    tokens.k[3] = 0
    pool = Pool(layer, 1, isa)
    pool.run({"a": tokens})
    k, v = pool.cached("a")
    want = stored(tokens.v[[0, 1, 3, 4]], kv).astype(np.float32)
    np.testing.assert_array_equal(v[[0, 1, 3, 4], 0], want)
    assert not v[[2, 5]].any()
    assert not k[3].any()


def test_exact_modes_give_the_same_bits_on_every_instruction_set() -> None:
    for name in ("llama", "gemma2-softcap", "sinks", "qwen3-128", "mha-80"):
        for mode in EXACT:
            layer = replace(LAYERS[name], **MODES[mode])
            tokens = random_tokens(layer, 70, seed=3)
            first, *others = [whole(layer, tokens, isa) for isa in available_isas()]
            for other in others:
                np.testing.assert_array_equal(first, other)


def in_chunks(layer: Layer, tokens: Tokens, isa: int, sizes: list[int]) -> NDArray[np.float32]:
    pool, parts, done = Pool(layer, len(tokens.q) // 32 + 3, isa, seed=sum(sizes)), [], 0
    for size in sizes:
        parts.append(pool.run({"a": tokens[done : done + size]})["a"])
        done += size
    assert done == len(tokens.q)
    return np.concatenate(parts)


def cut(total: int, size: int) -> list[int]:
    return [size] * (total // size) + ([total % size] if total % size else [])


@every_mode
@pytest.mark.parametrize("name", ["llama", "gemma3-256-window", "gemma2-softcap", "sinks", "group-5"])
def test_any_chunking_gives_the_same_bits(name: str, mode: str, isa: int) -> None:
    layer = replace(LAYERS[name], **MODES[mode])
    tokens = random_tokens(layer, 130, seed=11)
    want = whole(layer, tokens, isa)
    for size in (1, 7, 16, 64):
        np.testing.assert_array_equal(in_chunks(layer, tokens, isa, cut(130, size)), want)


@and_emulated
@pytest.mark.parametrize("window", [0, 300])
def test_chunks_across_split_boundaries_give_the_same_bits(window: int, isa: int) -> None:
    layer = Layer(heads=2, kv_heads=1, head_dim=16, window=window)
    tokens = random_tokens(layer, 1100, seed=12)
    want = whole(layer, tokens, isa)
    for sizes in (cut(1100, 512), cut(1100, 64), [500, *[1] * 30, 570], [1090, *[1] * 10]):
        np.testing.assert_array_equal(in_chunks(layer, tokens, isa, sizes), want)


@every_isa
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_a_sequence_in_any_batch_gives_the_bits_it_gives_alone(isa: int, data: st.DataObject) -> None:
    layer = replace(
        Layer(heads=6, kv_heads=2, head_dim=32, rope_dim=32),
        window=data.draw(st.sampled_from([0, 10, 50])),
        **MODES[data.draw(st.sampled_from(list(MODES)))],
    )
    names = ["a", "b", "c"]
    tokens = {n: random_tokens(layer, data.draw(st.integers(1, 90)), seed=i) for i, n in enumerate(names)}
    pool = Pool(layer, 16, isa, seed=data.draw(st.integers(0, 5)))
    outputs: dict[str, list[NDArray[np.float32]]] = {n: [] for n in names}
    left = dict(tokens)
    while left:
        chosen = data.draw(st.lists(st.sampled_from(sorted(left)), min_size=1, unique=True))
        sizes = {n: data.draw(st.integers(1, len(left[n].q))) for n in chosen}
        threads = data.draw(st.integers(1, 3))
        step = pool.run({n: left[n][: sizes[n]] for n in chosen}, threads)
        for n, out in step.items():
            outputs[n].append(out)
            left[n] = left[n][sizes[n] :]
            if not len(left[n].q):
                del left[n]
    for n in names:
        np.testing.assert_array_equal(np.concatenate(outputs[n]), whole(layer, tokens[n], isa))


@every_mode
def test_dividing_the_kv_over_threads_changes_no_bit(mode: str, isa: int) -> None:
    layer = replace(Layer(heads=3, kv_heads=1, head_dim=16, sinks=sinks(3)), **MODES[mode])
    tokens = random_tokens(layer, 1600, seed=2)
    pool = Pool(layer, 50, isa)
    pool.run({"a": tokens[:1599]})
    state, last = pool.data.copy(), tokens[1599:]
    outputs = []
    for threads, planned in ((1, 1), (1, 2), (2, 2), (3, 16)):
        pool.data[:], pool.lengths["a"] = state, 1599
        outputs.append(pool.run({"a": last}, threads, planned)["a"])
    for other in outputs[1:]:
        np.testing.assert_array_equal(outputs[0], other)
    want = reference(layer, tokens)[1599:]
    np.testing.assert_allclose(outputs[0], want, atol=TOLERANCE[mode], rtol=0)


@every_mode
def test_one_long_sequence_among_many_short_ones_is_divided(mode: str, isa: int) -> None:
    layer = replace(Layer(heads=3, kv_heads=1, head_dim=16), **MODES[mode])
    tokens = random_tokens(layer, 1600, seed=2)
    short = {str(i): random_tokens(layer, 10, seed=i) for i in range(40)}
    pool = Pool(layer, 50 + 40, isa)
    pool.run({"long": tokens[:1599], **{name: each[:9] for name, each in short.items()}})
    state, lengths = pool.data.copy(), dict(pool.lengths)
    last = {"long": tokens[1599:], **{name: each[9:] for name, each in short.items()}}
    outputs, items = [], []
    for threads, planned in ((1, 1), (2, 8)):
        pool.data[:], pool.lengths = state, dict(lengths)
        outputs.append(pool.run(last, threads, planned))
        items.append(pool.items)
    assert items == [41, 44], "1,600 tokens are four splits"
    for name, output in outputs[0].items():
        np.testing.assert_array_equal(outputs[1][name], output)


@and_emulated
@pytest.mark.parametrize("kv", KV_TYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_in_one_sequence_stays_there(bad: float, kv: str, isa: int) -> None:
    layer = Layer(rope_dim=64, kv=kv)
    a, b = random_tokens(layer, 40, seed=1), random_tokens(layer, 37, seed=2)
    poisoned = Tokens(b.q.copy(), b.k.copy(), b.v.copy())
    for x in (poisoned.q, poisoned.k, poisoned.v):
        x[20] = bad
    out = Pool(layer, 8, isa).run({"b": poisoned, "a": a})
    np.testing.assert_array_equal(out["a"], whole(layer, a, isa))
    assert np.isnan(out["b"][20:]).all()


@and_emulated
def test_scores_far_apart_do_not_overflow(isa: int) -> None:
    layer = Layer(heads=1, kv_heads=1, head_dim=16)
    tokens = random_tokens(layer, 40, seed=4)
    tokens.q[:] *= 1000
    got = whole(layer, tokens, isa)
    assert np.isfinite(got).all()
    # One key takes all the weight: the output is its value.
    scores = np.where(np.tri(40, dtype=bool), reference_scores(layer, tokens), -np.inf)
    top = np.sort(scores, axis=1)[:, -2:]
    clear = (top[:, 1] - top[:, 0] > 200) & np.isfinite(top[:, 0])
    assert clear.sum() > 20
    want = tokens.v[scores.argmax(1)]
    np.testing.assert_allclose(got[clear], want[clear], rtol=2**-8)


def reference_scores(layer: Layer, tokens: Tokens) -> NDArray[np.float64]:
    return tokens.q.astype(np.float64) @ tokens.k.astype(np.float64).T * layer.scale


HIDDEN = """
from attention_harness import *
import mmap

layer = Layer(heads=4, kv_heads=1, head_dim=256, window={window})
depth, isa = 3_000, {isa}
pool = Pool(layer, depth // BLOCK + 1, isa)
pool.data[:] = 0
memory = mmap.mmap(-1, pool.data.nbytes)
memory.write(pool.data.tobytes())
pool.data = np.frombuffer(memory, np.uint8)
pool.tables["a"], pool.lengths["a"] = list(range(pool.blocks)), depth
hide(pool.data[: (depth + 1 - 512) // BLOCK * (pool.data.nbytes // pool.blocks)])
out = pool.run({{"a": random_tokens(layer, 1, seed=1)}})["a"]
assert np.isfinite(out).all()
print("attended")
"""


@every_isa
@pytest.mark.parametrize(("window", "reads"), [(512, False), (513 + BLOCK, True), (0, True)])
def test_what_the_window_hides_is_not_read(window: int, reads: bool, isa: int) -> None:
    """As Gemma 3's layers, whose cost must not grow with the context: here, to read what is out of sight
    ends the process."""
    modules = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    run = subprocess.run(
        [sys.executable, "-c", HIDDEN.format(window=window, isa=isa)],
        env=os.environ | {"PYTHONPATH": modules}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ("attended" in run.stdout) == (not reads), run.stderr
    if reads:
        assert run.returncode != 0
        assert "Traceback" not in run.stderr, "not the read that was to fail"
