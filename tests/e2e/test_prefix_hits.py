"""Design rule 1 and the cache: the same tokens without it, cold, warm, from host memory, from disk, after
preemption and after eviction, for prompts that part at, before and after the edges of blocks."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest

from fourfold.engine.loop import Engine
from fourfold.types import EngineRequest

from .engines import engine, finish, request, tokens_of

BLOCK = 32


def _pairs(count: int, vocab: int, tokens: int) -> list[EngineRequest]:
    rng = random.Random(5)

    def ids(n: int) -> list[int]:
        return [rng.randrange(vocab) for _ in range(n)]

    asks = []
    for i in range(count):
        head = ids(BLOCK * (1 + i % 3) + (-1, 0, 1, -9, 9)[i % 5])
        asks += [request(f"a{i}", head + ids(5), tokens), request(f"b{i}", head + ids(7), tokens)]
    return asks


def _written(of: Engine) -> None:
    for _ in range(4000):
        tiers = of.stats().tiers
        # What the queue of writes had no room for was skipped.
        if not tiers.queued_writes and tiers.disk_written_blocks + tiers.skipped_blocks >= tiers.saved_blocks:
            return
        time.sleep(0.005)
    raise AssertionError(of.stats().tiers)


def _check(model: Path, folder: Path, count: int, vocab: int, tokens: int) -> None:
    asks = _pairs(count, vocab, tokens)

    def answers(of: Engine, **arrivals: Any) -> dict[str, list[int]]:
        return tokens_of(finish(of, asks, **arrivals))

    with engine(model, prefix_caching=False) as off:
        expected = answers(off)
    with engine(model, kv_disk_cache_dir=str(folder)) as made:
        assert answers(made, arrive=lambda index: index * 2) == expected
        cold = made.stats().cached_prompt_tokens
        # Of each pair the second finds all that the first has in common with it.
        assert cold >= sum(BLOCK * (1 + i % 3) - 9 for i in range(count))
        assert answers(made) == expected
        assert made.stats().cached_prompt_tokens - cold >= sum(len(a.prompt_ids) - 1 for a in asks) - count
        _written(made)
    with engine(model, kv_disk_cache_dir=str(folder)) as restarted:
        assert answers(restarted) == expected
        assert restarted.stats().cached_tokens_by_tier["disk"] > 0
    small = {"num_kv_blocks": 10, "max_model_len": 8 * BLOCK}
    with engine(model, **small, max_num_seqs=16) as starved:
        assert answers(starved) == expected
        assert answers(starved) == expected
        assert starved.stats().preemptions > 0
    with engine(model, **small, kv_host_cache_gib=0.25) as swapped:
        assert answers(swapped) == expected
        assert answers(swapped) == expected
        assert swapped.stats().tiers.restored_blocks > 0


def test_tiny_model(tiny_model: Path, tmp_path: Path) -> None:
    _check(tiny_model, tmp_path, 10, 250, 30)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_fifty_pairs_on_the_real_model(real_model: Path, tmp_path: Path) -> None:
    _check(real_model, tmp_path, 50, 40_000, 30)
