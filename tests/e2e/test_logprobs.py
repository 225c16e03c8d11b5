"""Logprobs, ranks and alternatives against a log-softmax in NumPy of the logits of the same rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fourfold.engine.batch import Batch, StepResult
from fourfold.types import TokenLogprob

from .engines import engine, finish, request, tokenizer_of
from .tiny import ROWS


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    wide = logits.astype(np.float64)
    wide -= wide.max()
    return wide - np.log(np.exp(wide).sum())


def check(entry: TokenLogprob, logits: NDArray[np.float32], k: int) -> None:
    expected = log_softmax(logits)
    assert entry.logprob == pytest.approx(expected[entry.token_id], abs=2e-4)
    assert entry.rank == 1 + int((logits > logits[entry.token_id]).sum())
    assert len(entry.top) == k
    for (token, logprob), best in zip(entry.top, np.sort(expected)[::-1], strict=False):
        assert logprob == pytest.approx(best, abs=2e-4)
        assert logprob == pytest.approx(expected[token], abs=2e-4)


@pytest.mark.parametrize("which", ["tiny_model", "real_model"])
def test_against_numpy(which: str, request: pytest.FixtureRequest) -> None:
    _check_against_numpy(request.getfixturevalue(which))


def _check_against_numpy(model: Path) -> None:
    prompt = tokenizer_of(model).encode("The quick brown fox jumps over the lazy dog and")
    rows: list[NDArray[np.float32]] = []

    def keep(_: Batch, result: StepResult) -> None:
        assert result.logits is not None
        rows.extend(result.logits)

    with engine(model, keep, logits=True, max_num_batched_tokens=16) as watched:
        asked = request("a", prompt, 6, temperature=1.0, logprobs=5, prompt_logprobs=2)
        events = finish(watched, [asked])["a"]
    given = [entry for event in events for entry in event.prompt_logprobs or []]
    assert given[0] is None
    assert len(given) == len(prompt)
    for row, entry in zip(rows, given[1:], strict=False):
        assert entry is not None
        check(entry, row, 2)
    assert [entry.token_id for entry in given[1:] if entry is not None] == prompt[1:]
    drawn = [entry for event in events for entry in event.logprobs or []]
    assert len(drawn) == 6
    for row, entry in zip(rows[len(prompt) - 1 :], drawn, strict=True):
        check(entry, row, 5)


def test_padded_rows_are_never_drawn(tiny_model: Path) -> None:
    """B33: logits have more rows than the tokenizer has tokens."""
    tokenizer = tokenizer_of(tiny_model)
    assert tokenizer.vocab_size < ROWS
    with engine(tiny_model) as made:
        asks = [request(f"r{i}", [65 + i], 400, temperature=20.0, seed=i) for i in range(5)]
        for ask in asks:
            ask.allowed_vocab = tokenizer.vocab_size
        events = finish(made, asks)
    tokens = [token for found in events.values() for event in found for token in event.token_ids]
    assert len(tokens) == 2000
    assert max(tokens) < tokenizer.vocab_size
    tokenizer.decode(tokens)


def test_seeds_are_independent_of_neighbours(tiny_model: Path) -> None:
    """B29."""
    found = set()
    for other in range(4):
        with engine(tiny_model, max_num_seqs=4) as made:
            asks = [request("a", [65, 66], 20, temperature=0.8, seed=42)]
            asks += [request(f"b{i}", [67 + other] * (3 + i), 25, temperature=0.8) for i in range(other)]
            events = finish(made, asks, arrive=lambda index: 2 * (index % 2))
            found.add(tuple(token for event in events["a"] for token in event.token_ids))
    assert len(found) == 1


def test_tiny_temperatures_are_greedy(tiny_model: Path) -> None:
    """B32."""
    sampling: list[dict[str, Any]] = [{"temperature": t} for t in (0, 1e-12, 1e-5, 1e-4, 1e-3)]
    sampling.append({"temperature": 1.0, "top_p": 1e-4})
    with engine(tiny_model) as made:
        events = finish(made, [request(f"r{i}", [65, 66, 67], 20, **each) for i, each in enumerate(sampling)])
    answers = {name: [t for event in found for t in event.token_ids] for name, found in events.items()}
    assert all(answer == answers["r0"] for answer in answers.values()), answers


def test_alternatives_have_tokens(tiny_model: Path) -> None:
    """Rows of the logits without a token are nobody's alternative, for they cannot be named."""
    limit = tokenizer_of(tiny_model).vocab_size
    with engine(tiny_model) as made:
        ask = request("a", list(range(60, 90)), 30, temperature=1.0, logprobs=20, prompt_logprobs=20)
        ask.allowed_vocab = limit
        events = finish(made, [ask])["a"]
    entries = [entry for event in events for entry in (event.logprobs or []) + (event.prompt_logprobs or [])]
    tokens = [token for entry in entries if entry is not None for token, _ in entry.top]
    assert len(tokens) > 20 * 30
    assert max(tokens) < limit
