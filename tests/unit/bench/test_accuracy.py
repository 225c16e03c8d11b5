"""Windows, divergences and perplexity: hand-made figures and invariants. tests/model has the real models."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.bench.accuracy import (
    Divergence,
    Likelihood,
    Rows,
    Scorer,
    Window,
    compare,
    cut,
    kl_divergence,
    log_normalizer,
    perplexity,
)
from fourfold.engine.batch import Batch, StepResult
from fourfold.errors import FourfoldError


class Bigram:
    """A backend whose logits after token t are row t of a table."""

    def __init__(self, table: np.ndarray, max_batch_tokens: int) -> None:
        self.table = table.astype(np.float32)
        self.block_size, self.num_blocks, self.vocab_size = 4, 64, len(table)
        self.max_batch_tokens = max_batch_tokens
        self.computed: list[int] = []

    def run(self, batch: Batch) -> StepResult:
        (context,) = batch.seq_context.tolist()
        if context == 0:
            self.computed = []
        assert len(batch.tokens) <= self.max_batch_tokens
        assert context == len(self.computed)
        self.computed += batch.tokens.tolist()
        assert len(batch.blocks) * self.block_size >= len(self.computed)
        logits = self.table[batch.tokens[batch.samples["row"]]]
        target = batch.samples["target"]
        probabilities = np.exp(logits.astype(np.float64))
        probabilities /= probabilities.sum(1, keepdims=True)
        rows = len(target)
        return StepResult(
            token=target.copy(),
            logprob=np.log(probabilities[np.arange(rows), target]).astype(np.float32),
            rank=np.zeros(rows, np.int32),
            top_ids=np.empty((rows, 0), np.int32),
            top_logprobs=np.empty((rows, 0), np.float32),
            status=(~np.isfinite(logits).all(1)).astype(np.uint8),
            logits=logits if batch.return_logits else None,
        )

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        raise AssertionError("nothing is copied here")

    def close(self) -> None: ...


def rows(*probabilities: list[float]) -> Rows:
    logits = np.log(np.array(probabilities, np.float64)).astype(np.float32) + np.float32(3)
    return Rows(logits, log_normalizer(logits))


class TestWindows:
    @given(
        length=st.integers(1, 60),
        prefix=st.lists(st.integers(100, 200), max_size=3),
        context=st.integers(4, 30),
        data=st.data(),
    )
    def test_every_token_is_scored_once(
        self, length: int, prefix: list[int], context: int, data: st.DataObject
    ) -> None:
        room = context - len(prefix)
        stride = data.draw(st.integers(1, room))
        tokens = list(range(length))
        if length == 1 and not prefix:
            with pytest.raises(ValueError, match="longer text"):
                cut(tokens, prefix, context, stride)
            return
        windows = cut(tokens, prefix, context, stride)
        assert all(len(window.tokens) <= context for window in windows)
        assert all(window.tokens[: len(prefix)].tolist() == prefix for window in windows)
        scored = [token for window in windows for token in window.tokens[window.first :].tolist()]
        lost = set() if prefix else {0} if stride < room else set(range(0, length, stride))
        assert scored == [token for token in tokens if token not in lost]
        # After the first window, at least what is not new is context.
        assert all(window.first >= room - stride + len(prefix) for window in windows[1:])

    def test_a_stride_that_skips_tokens(self) -> None:
        with pytest.raises(ValueError, match="between 1 and 7, got 8"):
            cut(list(range(30)), [1], 8, 8)

    @given(length=st.integers(2, 40), data=st.data())
    def test_steps_compute_all_and_report_the_scored(self, length: int, data: st.DataObject) -> None:
        window = Window(np.arange(length, dtype=np.int32), data.draw(st.integers(1, length - 1)))
        steps = list(window.steps(data.draw(st.integers(1, 45))))
        assert [at for done, _ in steps for at in done] == list(range(length - 1))
        assert [at + 1 for _, scored in steps for at in scored] == list(range(window.first, length))
        assert all(set(scored) <= set(done) for done, scored in steps)


class TestFigures:
    def test_kl_by_hand(self) -> None:
        # 1/2 ln 2 + 1/2 ln 2/3, and nothing for equal rows
        found = kl_divergence(rows([0.5, 0.5], [0.2, 0.8]), rows([0.25, 0.75], [0.2, 0.8]))
        np.testing.assert_allclose(found, [0.5 * math.log(4 / 3), 0], atol=1e-7)

    def test_kl_leaves_out_what_is_below_the_floor(self) -> None:
        p, q = rows([0.6, 0.3, 0.1]), rows([0.3, 0.6, 0.1])
        found = kl_divergence(Rows(p.logits, p.log_z, floor=math.log(0.5)), q)
        np.testing.assert_allclose(found, [0.6 * math.log(2)], atol=1e-6)

    def test_log_normalizer_of_large_logits(self) -> None:
        found = log_normalizer(np.array([[1e4, 1e4], [-1e4, -1e4 - 2]] * 20, np.float32))
        np.testing.assert_allclose(found[:2], [1e4 + math.log(2), -1e4 + math.log1p(math.exp(-2))])
        assert len(found) == 40

    def test_summaries(self) -> None:
        likelihood = Likelihood(np.log([2.0, 8.0]))
        assert likelihood.perplexity == pytest.approx(4)
        # the two logarithms lie ln 4 apart: their deviation is ln 4 / sqrt 2, of the mean ln 4 / 2
        assert likelihood.error == pytest.approx(4 * math.log(4) / 2)
        divergence = Divergence(np.array([1.0, 2.0, 3.0]), np.array([True, True, False]))
        assert divergence.mean == 2
        assert divergence.error == pytest.approx(1 / math.sqrt(3))
        assert divergence.quantile(1.0) == 3
        assert divergence.agreement == pytest.approx(2 / 3)


@given(size=st.integers(1, 9), context=st.integers(2, 12), seed=st.integers(0, 5))
def test_comparison_of_two_bigram_models(size: int, context: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    tables = random.standard_normal((2, 5, 5)) * 3
    log_p = [np.log(np.exp(t) / np.exp(t).sum(1, keepdims=True)) for t in tables]
    tokens = random.integers(0, 5, 30).tolist()
    windows = cut(tokens, [0], context, context - 1)
    pairs = [(a, b) for w in windows for a, b in zip(w.tokens[:-1], w.tokens[1:], strict=True)]
    before, after = np.array(pairs).T

    tested, reference = (Scorer(Bigram(table, size)) for table in tables)
    result = compare(tested, reference, windows)
    np.testing.assert_allclose(result.tested.losses, -log_p[0][before, after], rtol=1e-5)
    np.testing.assert_allclose(result.reference.losses, -log_p[1][before, after], rtol=1e-5)
    kl = (np.exp(log_p[1]) * (log_p[1] - log_p[0])).sum(1)
    np.testing.assert_allclose(result.divergence.kl, kl[before], rtol=1e-4, atol=1e-7)
    same = log_p[0].argmax(1) == log_p[1].argmax(1)
    assert (result.divergence.same_top == same[before]).all()
    np.testing.assert_allclose(perplexity(tested, windows).losses, result.tested.losses, rtol=1e-5)


def test_logits_that_are_not_finite_are_an_error() -> None:
    table = np.zeros((3, 3))
    table[2] = math.nan
    windows = cut([0, 1, 0, 2, 0], [], 5, 5)
    with pytest.raises(FourfoldError, match="after token 3 of a window are not finite"):
        perplexity(Scorer(Bigram(table, 8)), windows)
