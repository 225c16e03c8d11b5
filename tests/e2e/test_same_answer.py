"""Design rule 1 on the real engine: neighbours, chunks, cache and preemption change no token."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from fourfold.engine.loop import Engine

from .engines import engine, finish, request, tokenizer_of, tokens_of

Prompts = dict[str, list[int]]

TEXTS = (
    "Once upon a time", "The capital of France is", "def fibonacci(n):", "Water boils at", "Dear Sir",
    "1, 1, 2, 3, 5, 8,", "In 1969, the first man", "A recipe for pancakes:", "The opposite of hot is",
    "To be, or not to be,", "SELECT name FROM", "The sun rises in the", "List three colours:", "E = m c",
    "My favourite book is", "It was a dark and stormy night", "The largest planet is", "Bonjour, je suis",
    "for i in range(10):", "The meaning of life",
)  # fmt: skip
"""Twenty beginnings; some are made longer, so that they span blocks and chunks."""


def _prompts(model: Path, longest: int) -> Prompts:
    tokenizer = tokenizer_of(model)
    rng = random.Random(3)
    prompts = {}
    for index, text in enumerate(TEXTS):
        ids = tokenizer.encode(text)
        if index % 3 == 0:
            ids = (ids + tokenizer.encode(" ".join(rng.sample(TEXTS, 12))) * 8)[: rng.randrange(40, longest)]
        prompts[f"p{index}"] = ids
    return prompts


def _alone(model: Path, prompts: Prompts, tokens: int) -> dict[str, list[int]]:
    answers = {}
    with engine(model, prefix_caching=False) as alone:
        for name, ids in prompts.items():
            answers |= tokens_of(finish(alone, [request(name, ids, tokens)]))
    return answers


def _check(model: Path, longest: int, tokens: int) -> None:
    prompts = _prompts(model, longest)
    requests = [request(name, ids, tokens) for name, ids in prompts.items()]
    expected = _alone(model, prompts, tokens)
    assert len({tuple(answer) for answer in expected.values()}) > 15

    def same(of: Engine, arrive: int = 0, crowd: bool = False) -> None:
        rng = random.Random(1)
        size = of.model.vocab_size // 2

        def at_step(step: int) -> None:
            # Others come with prompts of any length, and some of them leave.
            if crowd and step % 5 == 0 and step < 4 * tokens:
                ids = [rng.randrange(size) for _ in range(rng.randrange(1, longest))]
                of.add(request(f"other{step}", ids, 12, temperature=1.0))
            if crowd and step % 10 == 7:
                of.abort(f"other{step - 7}")

        found = tokens_of(finish(of, requests, arrive=lambda index: index * arrive, at_step=at_step))
        assert {name: found[name] for name in expected} == expected

    with engine(model, max_num_seqs=16) as batched:
        same(batched)
        # B36: now every prompt is in the cache.
        before = batched.stats().cached_prompt_tokens
        same(batched)
        assert batched.stats().cached_prompt_tokens > before
        same(batched, arrive=3, crowd=True)
    for budget in (16, 64, 512):
        with engine(model, max_num_batched_tokens=budget, prefix_caching=False) as chunked:
            same(chunked)
    need = max(-(-(len(ids) + tokens) // 32) for ids in prompts.values())
    with engine(model, num_kv_blocks=2 * need, max_model_len=32 * need, max_num_seqs=16) as starved:
        same(starved)
        assert starved.stats().preemptions > 0


def test_tiny_model(tiny_model: Path) -> None:
    _check(tiny_model, longest=200, tokens=40)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_real_model(real_model: Path) -> None:
    _check(real_model, longest=300, tokens=64)


def test_real_model_short(real_model: Path) -> None:
    """The same in small: six prompts at once and in chunks, so that every run sees the kernels."""
    prompts = dict(list(_prompts(real_model, 80).items())[:6])
    expected = _alone(real_model, prompts, 8)
    requests = [request(name, ids, 8) for name, ids in prompts.items()]
    for budget in (16, 512):
        with engine(real_model, max_num_batched_tokens=budget) as batched:
            assert tokens_of(finish(batched, requests, arrive=lambda index: index)) == expected
