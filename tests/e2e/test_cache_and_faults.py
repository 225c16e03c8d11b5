"""Prefix cache, penalties, faults and refusals on the real engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fourfold.engine.batch import Batch, StepResult
from fourfold.engine.loop import Engine
from fourfold.errors import InvalidRequestError

from .engines import engine, finish, request, tokens_of

BLOCK = 32
LONG = [(7 * i + i // 9) % 250 for i in range(420)]


def _cached(of: Engine, prompt: list[int], salt: str = "", **sampling: object) -> tuple[int, list[int]]:
    """Cached prompt tokens and the answer."""
    ask = request("r", prompt, 12, **sampling)
    ask.cache_salt = salt
    events = finish(of, [ask])["r"]
    return sum(event.cached_tokens for event in events), [t for event in events for t in event.token_ids]


def test_warm_equals_cold(tiny_model: Path) -> None:
    """B36: twelve chained prefixes."""
    with engine(tiny_model) as made, engine(tiny_model, prefix_caching=False) as cold:
        for size in range(200, 416, 18):
            cached, answer = _cached(made, LONG[:size])
            assert (cached > 0) == (size > 200)
            assert answer == _cached(cold, LONG[:size])[1]
            assert _cached(made, LONG[:size])[0] > 0
            assert _cached(made, LONG[:size])[1] == answer


@pytest.mark.parametrize("extra", [0, 1])
@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_whole_blocks(tiny_model: Path, blocks: int, extra: int) -> None:
    """B38: one token of the prompt is always computed, for its logits."""
    prompt = LONG[: blocks * BLOCK + extra]
    with engine(tiny_model) as made:
        _, first = _cached(made, prompt)
        cached, second = _cached(made, prompt)
        assert cached == len(prompt) - 1
        assert second == first


def test_salts(tiny_model: Path) -> None:
    """B40."""
    with engine(tiny_model) as made:
        hits = [_cached(made, LONG[:200], salt)[0] > 0 for salt in ("A", "A", "B", "")]
    assert hits == [False, True, False, False]


def test_penalties_do_not_see_the_cache(tiny_model: Path) -> None:
    """B35."""
    repeated = LONG[:5] * 30
    ask = {"repetition_penalty": 1.1, "frequency_penalty": 0.5}
    with engine(tiny_model) as made:
        cold = _cached(made, repeated, **ask)
        warm = _cached(made, repeated, **ask)
        longer = _cached(made, repeated + LONG[:5], **ask)
    with engine(tiny_model, prefix_caching=False) as other:
        assert _cached(other, repeated + LONG[:5], **ask)[1] == longer[1]
    assert cold[1] == warm[1]
    assert cold[0] == 0 < warm[0]


def test_nan_ends_one_request(tiny_model: Path) -> None:
    """B34: the row with the NaN, and no other."""
    asks = [request(f"r{i}", [65 + i, 66], 10) for i in range(4)]
    with engine(tiny_model) as made:
        expected = tokens_of(finish(made, asks))

    def poison(batch: Batch, result: StepResult) -> None:
        row = np.flatnonzero(batch.tokens[batch.samples["row"]] == expected["r2"][3])
        if len(batch.samples) == 4 and row.size:
            result.status[2] = 1

    with engine(tiny_model, poison) as made:
        events = finish(made, asks)
        assert made.stats().nan_requests == 1
        found = tokens_of(events)
        assert events["r2"][-1].finish_reason == "error"
        assert "finite" in (events["r2"][-1].error or "")
        for name in ("r0", "r1", "r3"):
            assert found[name] == expected[name]
        assert tokens_of(finish(made, [request("again", [65, 66], 10)]))["again"] == expected["r0"]


def test_a_pool_too_small(tiny_model: Path) -> None:
    """B44."""
    with engine(tiny_model, num_kv_blocks=8) as made:
        with pytest.raises(InvalidRequestError, match="256"):
            made.add(request("big", LONG[: 20 * BLOCK], 1))
        assert len(tokens_of(finish(made, [request("small", [65], 5)]))["small"]) == 5
        # Both fit alone but not together: they take turns.
        both = [request(f"r{i}", LONG[i : i + 150], 80) for i in range(2)]
        assert {len(tokens) for tokens in tokens_of(finish(made, both)).values()} == {80}
