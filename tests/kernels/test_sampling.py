"""The sampler against numpy, transformers' logits warpers, and the distribution it claims to draw from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from attention_harness import ISAS, available_isas
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from fourfold import _native
from fourfold.engine.batch import SAMPLE_DTYPE

every_isa = pytest.mark.parametrize("isa", available_isas(), ids=[ISAS[i] for i in available_isas()])
BEST = available_isas()[-1]
Floats = NDArray[np.float32]
Values = dict[str, Any]

DEFAULTS: Values = {
    "target": -1,
    "temperature": 0.0,
    "top_p": 1.0,
    "typical_p": 1.0,
    "repetition_penalty": 1.0,
    "logprobs": -1,
    "allowed_vocab": 2**31 - 1,
    "mask": -1,
}


@dataclass
class Drawn:
    token: NDArray[np.int32]
    logprob: Floats
    rank: NDArray[np.int32]
    top_ids: NDArray[np.int32]
    top_logprobs: Floats
    status: NDArray[np.uint8]


@dataclass
class Asked:
    """One row's parameters by their names in SAMPLE_DTYPE, and the lists that its record points into."""

    values: Values = field(default_factory=dict)
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    bias: dict[int, float] = field(default_factory=dict)
    banned: tuple[int, ...] = ()
    allowed: set[int] | None = None


def sample(logits: Any, asked: list[Asked] | Asked, isa: int = BEST, top: int = 0) -> Drawn:
    """Samples row i of logits with asked[i] (or all rows with one)."""
    logits = np.atleast_2d(np.array(logits, np.float32))
    n, vocab = logits.shape
    each = asked if isinstance(asked, list) else [asked] * n
    records = np.zeros(n, SAMPLE_DTYPE)
    history: list[int] = []
    bias_ids: list[int] = []
    bias_values: list[float] = []
    banned: list[int] = []
    masks: list[NDArray[np.uint32]] = []
    for record, a in zip(records, each, strict=True):
        for name, value in (DEFAULTS | a.values).items():
            record[name] = value
        record["history_start"] = len(history)
        record["history_prompt_end"] = len(history) + len(a.prompt)
        history += [*a.prompt, *a.output]
        record["history_end"] = len(history)
        record["bias_start"] = len(bias_ids)
        bias_ids += a.bias.keys()
        bias_values += a.bias.values()
        record["bias_end"] = len(bias_ids)
        record["ban_start"] = len(banned)
        banned += a.banned
        record["ban_end"] = len(banned)
        if a.allowed is not None:
            record["mask"] = len(masks)
            bits = np.zeros((vocab + 31) // 32 * 32, np.uint8)
            bits[list(a.allowed)] = 1
            masks.append(np.packbits(bits, bitorder="little").view(np.uint32))
    out = Drawn(
        np.zeros(n, np.int32),
        np.zeros(n, np.float32),
        np.zeros(n, np.int32),
        np.zeros((n, top), np.int32),
        np.zeros((n, top), np.float32),
        np.zeros(n, np.uint8),
    )
    _native.test_sampling(
        isa,
        logits,
        records.view(np.uint8),
        np.array(history, np.int32),
        np.array(bias_ids, np.int32),
        np.array(bias_values, np.float32),
        np.array(banned, np.int32),
        np.stack(masks) if masks else None,
        out.token,
        out.logprob,
        out.rank,
        out.top_ids,
        out.top_logprobs,
        out.status,
    )
    return out


def random_logits(vocab: int, seed: int = 0, spread: float = 3.0) -> Floats:
    return (spread * np.random.default_rng(seed).standard_normal(vocab)).astype(np.float32)


def draws(logits: Floats, asked: Asked, count: int, isa: int = BEST, seed: int = 1) -> NDArray[np.int32]:
    """Tokens for counters 0 .. count - 1."""
    each = [
        Asked(
            asked.values | {"seed": seed, "counter": i},
            asked.prompt,
            asked.output,
            asked.bias,
            asked.banned,
            asked.allowed,
        )
        for i in range(count)
    ]
    out = sample(np.tile(logits, (count, 1)), each, isa)
    assert (out.status == 0).all()
    return out.token


# ---- The generator


def test_uniform_is_philox_4x32_10_of_the_published_vectors() -> None:
    """Random123's known answer (kat_vectors) of the zero key and counter: its first two words."""
    zero = 0x6627E8D5 | 0xE169C58D << 32
    assert _native.test_uniform(0, 0) == (zero >> 11) / 2**53


def test_uniform_fills_the_unit_interval() -> None:
    u = np.array([_native.test_uniform(s, c) for s in range(20) for c in range(500)])
    assert 0 <= u.min() < u.max() < 1
    counts = np.histogram(u, 20, (0, 1))[0]
    assert ((counts - 500) ** 2 / 500).sum() < 43.8  # chi-square, 19 degrees of freedom, p = 0.001
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.04


# ---- Greedy, reports


@every_isa
@pytest.mark.parametrize("vocab", [1, 5, 16, 31, 257, 1000, 4099])
def test_greedy_is_the_first_of_the_largest(vocab: int, isa: int) -> None:
    for seed in range(5):
        logits = random_logits(vocab, seed)
        logits[np.random.default_rng(seed).integers(0, vocab, 3)] = 20.0
        assert sample(logits, Asked(), isa).token[0] == logits.argmax()


@every_isa
@pytest.mark.parametrize("vocab", [3, 100, 5000])
def test_logprobs_rank_and_alternatives_are_those_of_the_raw_logits(vocab: int, isa: int) -> None:
    logits = np.round(random_logits(vocab) * 4) / 4  # many ties
    exact = logits.astype(np.float64)
    logprobs = exact - exact.max() - np.log(np.exp(exact - exact.max()).sum())
    order = np.argsort(-logits, kind="stable")
    for target in {0, vocab // 2, vocab - 1}:
        asked = Asked({"target": target, "logprobs": 20, "temperature": 0.7, "top_k": 1}, bias={0: 50.0})
        out = sample(logits, asked, isa, top=20)
        assert out.token[0] == target
        assert out.logprob[0] == pytest.approx(logprobs[target], abs=2e-6)
        assert out.rank[0] == 1 + (logits > logits[target]).sum()
        shown = min(20, vocab)
        np.testing.assert_array_equal(out.top_ids[0, :shown], order[:shown])
        np.testing.assert_allclose(out.top_logprobs[0, :shown], logprobs[order[:shown]], atol=2e-6)
        assert (out.top_ids[0, shown:] == -1).all()
        assert np.isneginf(out.top_logprobs[0, shown:]).all()


def test_logprob_of_a_sampled_token_ignores_bias_mask_and_temperature() -> None:
    logits = random_logits(500)
    asked = Asked(
        {"temperature": 0.5, "top_p": 0.9, "logprobs": 2, "repetition_penalty": 1.5},
        prompt=(1, 2),
        bias={7: 30.0},
        allowed={3, 7, 11},
    )
    out = sample(logits, asked, top=3)
    logprobs = torch.log_softmax(torch.from_numpy(logits).double(), 0).numpy()
    assert out.token[0] == 7
    assert out.logprob[0] == pytest.approx(logprobs[7], abs=1e-6)
    assert out.rank[0] == 1 + (logits > logits[7]).sum()
    np.testing.assert_array_equal(out.top_ids[0], [*np.argsort(-logits)[:2], -1])


def test_b24_top_k_1_reports_finite_logprobs() -> None:
    """Logprobs beside top_k = 1: the alternatives are the model's own, not what the filter left."""
    for temperature in (0.0, 1.0):
        out = sample(
            random_logits(300), Asked({"temperature": temperature, "top_k": 1, "logprobs": 5}), top=5
        )
        assert np.isfinite(out.top_logprobs).all()
        assert np.isfinite(out.logprob).all()
        assert out.token[0] == out.top_ids[0, 0]


def test_alternatives_of_minus_infinity_are_left_out() -> None:
    logits = np.full(40, -np.inf, np.float32)
    logits[[4, 9]] = [1.0, 2.0]
    out = sample(logits, Asked({"logprobs": 5}), top=5)
    np.testing.assert_array_equal(out.top_ids[0], [9, 4, -1, -1, -1])


def test_nothing_is_reported_unless_asked_for() -> None:
    out = sample(random_logits(50), Asked(), top=2)
    assert np.isnan(out.logprob[0])
    assert out.rank[0] == 0
    np.testing.assert_array_equal(out.top_ids[0], [-1, -1])


# ---- Bad logits


@every_isa
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_b34_a_bad_row_fails_alone(temperature: float, bad: float, isa: int) -> None:
    asked = [Asked({"temperature": temperature, "seed": i, "logprobs": 1}) for i in range(4)]
    for place in (0, 15, 16, 500, 698, 699):
        logits = np.stack([random_logits(700, seed=i) for i in range(4)])
        want = sample(logits, asked, isa, top=1)
        logits[2, place] = bad
        got = sample(logits, asked, isa, top=1)
        assert got.status.tolist() == [0, 0, 1, 0]
        assert got.token[2] == -1
        assert np.isnan(got.logprob[2])
        for i in (0, 1, 3):
            assert got.token[i] == want.token[i]
            assert got.logprob[i] == want.logprob[i]


@every_isa
def test_all_minus_infinity_is_bad_and_one_finite_is_not(isa: int) -> None:
    logits = np.full((2, 77), -np.inf, np.float32)
    logits[1, 76] = -5.0
    for temperature in (0.0, 1.0):
        out = sample(logits, Asked({"temperature": temperature, "logprobs": 0}), isa)
        assert out.status.tolist() == [1, 0]
        assert out.token.tolist() == [-1, 76]
        assert out.logprob[1] == 0.0


def test_a_target_row_with_nan_is_bad_too() -> None:
    logits = random_logits(64)
    logits[3] = np.nan
    out = sample(logits, Asked({"target": 5, "logprobs": 0}))
    assert (out.status[0], out.token[0]) == (1, -1)


def test_masks_and_bans_that_leave_no_token_are_told_apart_from_bad_logits() -> None:
    for asked in (Asked(allowed=set()), Asked({"allowed_vocab": 0}), Asked(banned=tuple(range(40)))):
        out = sample(random_logits(40), asked)
        assert (out.status[0], out.token[0]) == (2, -1)


# ---- Masks, bias, penalties


@every_isa
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_only_allowed_tokens_come_out(isa: int, data: st.DataObject) -> None:
    vocab = data.draw(st.integers(2, 200))
    ids = st.integers(0, vocab - 1)
    allowed = data.draw(st.sets(ids, min_size=1))
    banned = data.draw(st.lists(ids, max_size=5))
    limit = data.draw(st.integers(1, vocab))
    rest = {i for i in allowed if i < limit} - set(banned)
    asked = Asked(
        {"temperature": data.draw(st.sampled_from([0.0, 2.0])), "allowed_vocab": limit},
        banned=tuple(banned),
        allowed=allowed,
    )
    logits = random_logits(vocab, data.draw(st.integers(0, 99)))
    out = sample(
        np.tile(logits, (8, 1)),
        [Asked(asked.values | {"counter": i}, (), (), {}, asked.banned, asked.allowed) for i in range(8)],
        isa,
    )
    if rest:
        assert set(out.token) <= rest
        if asked.values["temperature"] == 0:
            assert out.token[0] == max(rest, key=lambda i: (logits[i], -i))
    else:
        assert (out.status == 2).all()


def test_b33_padded_vocabulary_is_never_drawn() -> None:
    logits = np.zeros(1000, np.float32)
    logits[900:] = 5.0
    tokens = draws(logits, Asked({"temperature": 2.0, "allowed_vocab": 900}), 2000)
    assert tokens.max() < 900


def test_b18_bias_adds_and_ids_outside_the_vocabulary_touch_nothing() -> None:
    """Such ids are refused at the door; here they must only not write out of bounds."""
    logits = random_logits(100)
    out = sample(logits, Asked(bias={3: 100.0, 100: 50.0, 2**31 - 1: 50.0, -1: 50.0}))
    assert out.token[0] == 3
    out = sample(logits, Asked(bias={int(logits.argmax()): -100.0}))
    assert out.token[0] == np.argsort(-logits)[1]
    assert sample(logits, Asked(bias={})).token[0] == logits.argmax()


def argmax_after(logits: Floats, asked: Asked) -> int:
    """The reference: vLLM's apply_penalties, in numpy."""
    x = logits.copy()
    v = DEFAULTS | {"presence_penalty": 0.0, "frequency_penalty": 0.0} | asked.values
    for token in {*asked.prompt, *asked.output}:
        p = np.float32(v["repetition_penalty"])
        x[token] = x[token] / p if x[token] > 0 else x[token] * p
    for token in set(asked.output):
        x[token] -= np.float32(v["frequency_penalty"]) * np.float32(asked.output.count(token))
        x[token] -= np.float32(v["presence_penalty"])
    return int(x.argmax())


@every_isa
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_penalties_count_distinct_ids_of_prompt_and_output(isa: int, data: st.DataObject) -> None:
    ids = st.lists(st.integers(0, 11), max_size=12).map(tuple)
    asked = Asked(
        {
            "repetition_penalty": data.draw(st.sampled_from([1.0, 0.5, 1.3, 3.0])),
            "presence_penalty": data.draw(st.sampled_from([0.0, -1.0, 0.7])),
            "frequency_penalty": data.draw(st.sampled_from([0.0, -0.3, 0.4])),
        },
        prompt=data.draw(ids),
        output=data.draw(ids),
    )
    logits = random_logits(12, data.draw(st.integers(0, 10_000)), spread=1.0)
    # Twice in one call: nothing of the first row's counts may be left.
    out = sample(np.stack([logits, logits]), asked, isa)
    assert out.token.tolist() == [argmax_after(logits, asked)] * 2


def test_repetition_penalty_equals_transformers() -> None:
    history = (3, 5, 5, 9, 40)
    for seed in range(20):
        logits = random_logits(50, seed, spread=1.0)
        want = RepetitionPenaltyLogitsProcessor(1.7)(
            torch.tensor([history]), torch.from_numpy(logits.copy())[None]
        )
        got = sample(logits, Asked({"repetition_penalty": 1.7}, prompt=history[:2], output=history[2:]))
        assert got.token[0] == want.argmax()


# ---- Filters


def kept_by_transformers(logits: Floats, values: Values) -> NDArray[np.float64]:
    """Probabilities after transformers' warpers in their order; zero for the tokens they remove."""
    scores = torch.from_numpy(logits.astype(np.float64))[None]
    warpers: list[Any] = [TemperatureLogitsWarper(values["temperature"])]
    if "top_k" in values:
        warpers.append(TopKLogitsWarper(values["top_k"]))
    if "top_p" in values:
        warpers.append(TopPLogitsWarper(values["top_p"]))
    if "min_p" in values:
        warpers.append(MinPLogitsWarper(values["min_p"]))
    if "typical_p" in values:
        warpers.append(TypicalLogitsWarper(values["typical_p"]))
    for warper in warpers:
        scores = warper(torch.zeros((1, 0), dtype=torch.long), scores)
    return torch.softmax(scores, -1)[0].numpy()


FILTERS: list[Values] = [
    {},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 60},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"top_p": 1e-4},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"typical_p": 0.2},
    {"typical_p": 0.9},
    {"top_k": 40, "top_p": 0.8},
    {"top_p": 0.97, "min_p": 0.02},
    {"top_k": 50, "top_p": 0.95, "min_p": 0.01, "typical_p": 0.7},
]


def quantiles(probabilities: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """Tokens at the uniforms of seed 1, counters 0 .. count - 1, by inverse CDF in order of id."""
    u = np.array([_native.test_uniform(1, i) for i in range(count)])
    return np.minimum(np.searchsorted(np.cumsum(probabilities), u, side="right"), len(probabilities) - 1)


@every_isa
@pytest.mark.parametrize("values", FILTERS, ids=str)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_filters_leave_transformers_distribution(temperature: float, values: Values, isa: int) -> None:
    """Each draw is the inverse CDF of transformers' distribution at the generator's uniform."""
    for seed, vocab in ((0, 120), (1, 1000)):
        logits = random_logits(vocab, seed, spread=2.0)
        asked = values | {"temperature": temperature}
        probabilities = kept_by_transformers(logits, asked)
        tokens = draws(logits, Asked(asked), 300, isa)
        assert (probabilities[tokens] > 0).all()
        want = quantiles(probabilities, 300)
        # A uniform within float32 rounding of a step may fall on the neighbouring token.
        assert (tokens != want).mean() <= 0.01


@pytest.mark.parametrize("values", [{}, {"top_k": 8}, {"top_p": 0.9}, {"typical_p": 0.8}])
def test_draws_follow_the_distribution(values: Values) -> None:
    logits = random_logits(30, 3, spread=1.0)
    probabilities = kept_by_transformers(logits, values | {"temperature": 1.2})
    count = 6000
    observed = np.bincount(draws(logits, Asked(values | {"temperature": 1.2}), count, seed=99), minlength=30)
    likely = probabilities > 0
    assert observed[~likely].sum() == 0
    expected = probabilities[likely] * count
    chi2 = ((observed[likely] - expected) ** 2 / expected).sum()
    freedom = likely.sum() - 1
    assert chi2 < freedom + 3.5 * np.sqrt(2 * freedom) + 5


def test_large_vocabulary_with_every_filter_alone() -> None:
    logits = random_logits(262144, 8, spread=2.0)
    for values in (
        {},
        {"top_k": 1000},
        {"top_k": 100_000},
        {"top_p": 0.9},
        {"min_p": 0.001},
        {"typical_p": 0.9},
    ):
        asked = values | {"temperature": 1.0}
        probabilities = kept_by_transformers(logits, asked)
        tokens = draws(logits, Asked(asked), 4)
        assert (probabilities[tokens] > 0).all()
        assert np.abs(quantiles(probabilities, 4) - tokens).max() <= 5


def test_ties_at_the_edge() -> None:
    flat = np.zeros(64, np.float32)
    # top_k keeps all that equal the k-th, top_p the fewest (lowest ids first), min_p of 1 all that are equal.
    assert set(draws(flat, Asked({"temperature": 1.0, "top_k": 3}), 1000)) == set(range(64))
    assert set(draws(flat, Asked({"temperature": 1.0, "top_p": 0.25}), 400)) == set(range(16))
    assert set(draws(flat, Asked({"temperature": 1.0, "top_p": 0.26}), 400)) == set(range(17))
    assert set(draws(flat, Asked({"temperature": 1.0, "min_p": 1.0}), 1000)) == set(range(64))
    assert set(draws(flat, Asked({"temperature": 1.0, "top_k": 1}), 20)) == {0}
    big = np.zeros(2**16, np.float32)
    assert set(draws(big, Asked({"temperature": 1.0, "top_p": 2**-10}), 800)) == set(range(64))


def test_filters_work_on_what_mask_and_bans_left() -> None:
    logits = random_logits(400, 5)
    allowed = set(range(0, 400, 7))
    left = np.full_like(logits, -np.inf)
    left[list(allowed)] = logits[list(allowed)]
    for values in ({"top_k": 10}, {"top_k": 200}, {"top_p": 0.8}, {"typical_p": 0.5}, {"min_p": 0.1}):
        asked = values | {"temperature": 1.0}
        order = np.array(sorted(allowed))
        probabilities = np.zeros(400)
        probabilities[order] = kept_by_transformers(left[order], asked)
        tokens = draws(logits, Asked(asked, allowed=allowed), 200)
        assert (tokens != quantiles(probabilities, 200)).mean() <= 0.01


@every_isa
def test_b32_tiny_temperatures_are_greedy(isa: int) -> None:
    logits = random_logits(3000, 2)
    logits[77] = logits.max() + 0.25
    for temperature in (1e-3, 1e-4, 1e-5, 1e-12, 1e-45, 0.0):
        assert set(draws(logits, Asked({"temperature": temperature}), 20, isa)) == {77}
    assert set(draws(logits, Asked({"temperature": 1.0, "top_p": 1e-4}), 20, isa)) == {77}


def test_huge_logits_and_temperatures_stay_finite() -> None:
    logits = np.array([-3e38, 3e38, 3e38, 0, -np.inf], np.float32)
    for values in (
        {"temperature": 1.0},
        {"temperature": 100.0},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 1.0, "typical_p": 0.9},
        {"temperature": 1.0, "min_p": 0.5, "top_k": 4},
    ):
        assert set(draws(logits, Asked(values), 60)) == {1, 2}


# ---- What a draw depends on


def test_b29_a_seeded_row_does_not_depend_on_its_neighbours() -> None:
    logits = np.stack([random_logits(500, i) for i in range(5)])
    asked = [Asked({"temperature": 0.8, "seed": 42, "counter": 3, "top_p": 0.9})] + [
        Asked({"temperature": 1.5, "seed": i, "counter": i, "typical_p": 0.5}, output=(i,)) for i in range(4)
    ]
    alone = sample(logits[:1], asked[:1]).token[0]
    for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 0]):
        out = sample(logits[order], [asked[i] for i in order])
        assert out.token[order.index(0)] == alone


@pytest.mark.parametrize("values", FILTERS[:3] + FILTERS[4:6] + FILTERS[9:10] + FILTERS[-1:])
def test_every_instruction_set_draws_the_same(values: Values) -> None:
    logits = random_logits(5003, 4)
    first, *others = [
        draws(logits, Asked(values | {"temperature": 0.9}), 50, isa) for isa in available_isas()
    ]
    reports = [sample(logits, Asked({"logprobs": 5}), isa, top=5) for isa in available_isas()]
    for other in others:
        np.testing.assert_array_equal(first, other)
    for report in reports[1:]:
        assert report.logprob[0] == reports[0].logprob[0]
        np.testing.assert_array_equal(report.top_logprobs, reports[0].top_logprobs)


def test_other_seeds_and_counters_draw_other_tokens() -> None:
    logits = np.zeros(10_000, np.float32)
    by_counter = draws(logits, Asked({"temperature": 1.0}), 50)
    by_seed = [draws(logits, Asked({"temperature": 1.0}), 1, seed=s)[0] for s in range(50)]
    assert len(set(by_counter)) > 45
    assert len(set(by_seed)) > 45
