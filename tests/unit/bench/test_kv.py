"""`fourfold bench kv`: its figures against arithmetic on workloads small enough for it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.bench.kv.count import InfiniteCache, count
from fourfold.bench.kv.workloads import Agents, MooncakeTrace
from fourfold.bench.kv.zero_hits import RealSides, Sides, counted_cost
from fourfold.bench.stats import Runs
from fourfold.cli.main import main
from fourfold.errors import ConfigError


@given(st.lists(st.lists(st.integers(0, 1), max_size=6), max_size=6), st.lists(st.integers(0, 1), max_size=6))
def test_the_infinite_cache_knows_the_longest_common_beginning(
    seen: list[list[int]], asked: list[int]
) -> None:
    cache = InfiniteCache()
    for tokens in seen:
        cache.add(tokens)
    wanted = max((n for n in range(len(asked) + 1) if any(s[:n] == asked[:n] for s in seen)), default=0)
    assert cache.known(asked) == wanted


def test_agents() -> None:
    counted = count(Agents(agents=4, turns=2, system=64, user=8, answer=8), 256, 16, 512)
    # Turns of 72 and then 88 tokens. The first computes all, three others their own 8, and each second turn
    # its 8 and the last token of the answer, which was drawn but never computed.
    assert (counted.requests, counted.prompt_tokens) == (8, 4 * (72 + 88))
    assert counted.cached_tokens == 3 * 64 + 4 * 79
    # An infinite cache would have the whole answers.
    assert counted.ideal_tokens == 3 * 64 + 4 * 80
    assert counted.cached_tokens + counted.computed_tokens == counted.prompt_tokens + 8 * 7
    # At the peak each of the four has 88 tokens and an answer's; they share the 64.
    assert counted.held_blocks == 4 * 6
    assert counted.shared_blocks == 4 + 4 * 2


def _trace(path: Path, *hashes: list[int]) -> Path:
    rows = [{"timestamp": 0, "input_length": 1, "output_length": 512, "hash_ids": ids} for ids in hashes]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_trace(tmp_path: Path) -> None:
    path = _trace(tmp_path / "t.jsonl", [1, 2], [1, 3], [4], [1, 2, 5, 6])
    counted = count(MooncakeTrace(path, per_hash=16, longest=40, rows=4), 64, 8, 128)
    assert (counted.prompt_tokens, counted.ideal_tokens) == (32 + 32 + 16 + 40, 16 + 0 + 32)
    assert counted.cached_tokens == counted.ideal_tokens
    assert count(MooncakeTrace(path, 16, 40, rows=2), 64, 8, 128).requests == 2


@pytest.mark.parametrize(
    "content", [b"", b"{}\n", b"[1]\n", b"\xff\n", b'{"hash_ids": [], "output_length": 1}\n', b"{" * 5000]
)
def test_what_is_no_trace(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"bad\.jsonl"):
        MooncakeTrace(path, 16, 64, 10)
    with pytest.raises(ConfigError, match="cannot be read"):
        MooncakeTrace(tmp_path / "none", 16, 64, 10)


def test_zero_hits() -> None:
    costs = counted_cost(2, requests=4)
    assert len(costs.off.values) == len(costs.on.values) == 2
    assert min(costs.off.values + costs.on.values) >= 0


def test_the_cost_is_held_against_a_real_request() -> None:
    counted = Sides(Runs((0.002, 0.004, 0.001)), Runs((0.003, 0.007, 0.0005)))
    assert counted.difference == pytest.approx(0.001)
    cpu = Sides(Runs((0.4, 0.5, 0.6)), Runs((0.5, 0.5, 0.5)))
    assert RealSides(cpu, cpu).share(counted) == pytest.approx(0.002)


def test_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fourfold.bench.kv.zero_hits.counted_cost", partial(counted_cost, requests=2))
    trace = str(_trace(tmp_path / "t.jsonl", [1, 2], [1, 3]))
    small = ["--agents", "2", "--turns", "1", "--system-tokens", "50", "--repeats", "1"]
    assert main(["bench", "kv", "--trace", trace, *small, "--json", str(tmp_path / "o.json")]) == 0
    assert "t.jsonl" in capsys.readouterr().out
    record = json.loads((tmp_path / "o.json").read_text())
    agents, rows = record["workloads"]
    assert (agents["prompt_tokens"], agents["cached_tokens"]) == (220, 50)
    assert (rows["prompt_tokens"], rows["cached_tokens"]) == (128, 32)
    assert set(record["zero_hits"]["counted_seconds_per_request"]) >= {"off", "on"}
    assert main(["bench", "kv", "--trace", str(tmp_path / "missing"), *small]) != 0
    assert main(["bench", "kv", "--blocks", "2", *small]) != 0
    assert "Traceback" not in capsys.readouterr().err
