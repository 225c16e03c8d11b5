from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from .running import running
from .soak import POOL, soak

TINY_POOL = ("--kv-cache-memory", "1M")


def test_short(tiny_model: Path, tmp_path: Path) -> None:
    """200 requests, 40 % of them left by their clients."""
    with running(tiny_model, *TINY_POOL, env=[("FOURFOLD_CACHE_DIR", str(tmp_path))]) as server:
        report = asyncio.run(soak(server, 200))
    assert report.problems() == [], str(report)
    assert report.outcomes["left"] > 20


def test_kills(tiny_model: Path, tmp_path: Path) -> None:
    with running(tiny_model, *TINY_POOL, env=[("FOURFOLD_CACHE_DIR", str(tmp_path))]) as server:
        report = asyncio.run(soak(server, 150, kills=2))
    assert report.problems() == [], str(report)
    assert report.kills == 2
    assert report.outcomes["finished"] > 40


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kill", [False, True])
def test_long(real_model: Path, kill: bool) -> None:
    with running(real_model, "--kv-cache-memory", POOL, "--max-model-len", "512") as server:
        report = asyncio.run(soak(server, 1000, kills=2 if kill else 0))
    print(report)
    assert report.problems() == [], str(report)
