"""KV tiers: what leaves the pool comes back with the same bytes, survives a restart, and is never trusted."""

from __future__ import annotations

import errno
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fourfold.engine.loop import Engine
from fourfold.engine.tiers.codec import GROUP, Int8
from fourfold.engine.tiers.disk import DiskStore
from fourfold.engine.tiers.host import HostPool
from fourfold.errors import ConfigError

from .fake_backend import FakeBackend
from .helpers import check, make_engine, request, run, tokens

LONG = [(7 * i + i // 5) % 90 for i in range(60)]
OTHER = [(3 * i + 11) % 90 for i in range(60)]


def tiered(recompute: float = float("inf"), **config: Any) -> Engine:
    """recompute: seconds that computing anything costs, to the engine's knowledge."""
    engine = make_engine(FakeBackend(num_blocks=18), 70, **config)
    if engine.kv.tiers is not None:
        engine.kv.tiers.choice.recompute = lambda context, tokens, rest: recompute
    return engine


def ask(engine: Engine, name: str, prompt: list[int], salt: str = "") -> tuple[list[int], int]:
    events = run(engine, request(name, prompt, salt=salt))[name]
    return tokens(events), events[0].cached_tokens


def written(engine: Engine, blocks: int) -> None:
    for _ in range(2000):
        if engine.stats().tiers.disk_written_blocks >= blocks:
            return
        time.sleep(0.005)
    raise AssertionError(engine.stats().tiers)


def test_evicted_blocks_come_back_from_host_memory() -> None:
    engine = tiered(kv_host_cache_gib=0.001)
    cold, _ = ask(engine, "a", LONG)
    ask(engine, "b", OTHER)
    assert engine.stats().tiers.saved_blocks > 0
    warm, cached = ask(engine, "c", LONG)
    assert warm == cold
    assert cached >= 56
    assert engine.stats().tiers.restored_blocks > 0
    assert engine.stats().cached_tokens_by_tier["host"] > 0
    check(engine)
    assert ask(engine, "d", LONG, salt="tenant")[1] == 0
    engine.close()


def restarted(folder: Path) -> tuple[list[int], Engine]:
    """The answer to LONG, and a new engine that finds its KV on disk."""
    first = tiered(kv_disk_cache_dir=str(folder))
    cold, _ = ask(first, "a", LONG)
    written(first, 15)
    first.close()
    return cold, tiered(kv_disk_cache_dir=str(folder))


def test_a_restart_finds_its_blocks_on_disk(tmp_path: Path) -> None:
    cold, second = restarted(tmp_path)
    assert ask(second, "other", LONG, salt="tenant")[1] == 0
    warm, cached = ask(second, "b", LONG)
    assert (warm, cached) == (cold, 56)
    stats = second.stats()
    assert (stats.tiers.disk_read_blocks, stats.cached_tokens_by_tier) == (14, {"disk": 56})
    second.close()


def test_what_was_just_computed_outlives_an_orderly_end(tmp_path: Path) -> None:
    first = tiered(kv_disk_cache_dir=str(tmp_path))
    cold, _ = ask(first, "a", LONG)
    assert first.kv.tiers is not None
    threads = first.kv.tiers._threads
    first.close()
    assert not any(thread.is_alive() for thread in threads)
    second = tiered(kv_disk_cache_dir=str(tmp_path))
    assert ask(second, "b", LONG) == (cold, 56)
    second.close()


@pytest.mark.parametrize("damage", ["cut", "flip", "header", "empty"])
def test_a_damaged_file_is_ignored_counted_and_gone(tmp_path: Path, damage: str) -> None:
    first = tiered(kv_disk_cache_dir=str(tmp_path))
    cold, _ = ask(first, "a", LONG)
    written(first, 15)
    first.close()
    files = list(tmp_path.rglob("*.kv"))
    for file in files:
        data = bytearray(file.read_bytes())
        at = 3 if damage == "header" else -1
        data[at] ^= 1
        file.write_bytes({"cut": data[:-5], "empty": b""}.get(damage, bytes(data)))
    second = tiered(kv_disk_cache_dir=str(tmp_path))
    assert ask(second, "b", LONG) == (cold, 0)
    assert second.stats().tiers.disk_bad_files >= 1
    second.close()


def test_foreign_files_are_counted_and_left(tmp_path: Path) -> None:
    (tmp_path / "fourfold-kv-1").mkdir()
    foreign = tmp_path / "fourfold-kv-1" / "notes.txt"
    foreign.write_text("mine")
    store = DiskStore(tmp_path, "model", 8, 1 << 20)
    assert store.counters.bad_files == 1
    assert foreign.read_text() == "mine"


def content(value: int) -> np.ndarray:
    return np.full(8, value, np.uint8)


def digest(value: int) -> bytes:
    return value.to_bytes(16, "big")


def test_the_folder_has_a_limit_and_the_longest_unused_goes_first(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, "model", 8, 3 * 72)
    out = content(0)
    for value in (1, 2, 3):
        assert store.write(digest(value), content(value))
    assert store.read(digest(1), out)
    assert store.write(digest(4), content(4))
    assert [store.read(digest(v), out) for v in (1, 2, 3, 4)] == [True, False, True, True]
    assert store.used_bytes == 3 * 72 == sum(f.stat().st_size for f in tmp_path.rglob("*.kv"))
    again = DiskStore(tmp_path, "model", 8, 2 * 72)
    assert len(again) == 1
    other = DiskStore(tmp_path, "other model", 8, 1 << 20)
    assert not any(other.read(digest(v), out) for v in (1, 3, 4))
    with pytest.raises(ConfigError, match="72"):
        DiskStore(tmp_path, "model", 8, 71)


def test_a_full_disk_stops_writing_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DiskStore(tmp_path, "model", 8, 1 << 20)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    with monkeypatch.context() as patch:
        patch.setattr("fourfold.engine.tiers.disk._write", full)
        assert not store.write(digest(1), content(1))
    assert not store.write(digest(2), content(2))
    assert store.counters.write_errors == 2
    assert not list(tmp_path.rglob("*.tmp"))
    store._paused_until = 0.0
    assert store.write(digest(2), content(2))


def test_a_folder_that_cannot_be_used_is_an_error_of_the_configuration(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigError, match="kv_disk_cache_dir"):
        tiered(kv_disk_cache_dir=str(file))
    with pytest.raises(ConfigError, match="prefix"):
        tiered(kv_host_cache_gib=1.0, prefix_caching=False)
    with pytest.raises(ConfigError, match="kv_cache_dtype is int8"):
        tiered(kv_host_cache_gib=1.0, kv_offload_compression="int8", kv_cache_dtype="int8")


def test_a_held_slot_is_not_given_away() -> None:
    gone: list[bytes] = []
    pool = HostPool(2, 8, gone.append)
    for value in (1, 2):
        slot = pool.reserve(digest(value))
        assert slot is not None
        slot[:] = value
        assert digest(value) not in pool
        pool.commit(digest(value))
    assert pool.reserve(digest(1)) is None
    held = pool.hold(digest(1))
    assert held is not None
    assert pool.reserve(digest(3)) is not None
    assert gone == [digest(2)]
    assert pool.reserve(digest(4)) is None
    assert held[0].tolist() == [1] * 8
    pool.let_go(digest(1))
    pool.cancel(digest(3))
    assert pool.reserve(digest(4)) is not None
    assert len(pool) == 2


def test_a_discarded_slot_is_free_when_nobody_is_busy_with_it() -> None:
    gone: list[bytes] = []
    pool = HostPool(2, 8, gone.append)
    for value in (1, 2):
        assert pool.reserve(digest(value)) is not None
    pool.commit(digest(1))
    held = pool.hold(digest(1))
    assert held is not None
    for value in (1, 2, 3):
        pool.discard(digest(value))
    assert digest(1) not in pool
    assert pool.hold(digest(1)) is None
    assert gone == [digest(1)], "the other was never there"
    assert pool.reserve(digest(3)) is None
    pool.let_go(digest(1))
    pool.commit(digest(2))
    assert digest(2) not in pool
    assert len(pool) == 0


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_what_led_to_a_failure_does_not_come_back(tmp_path: Path, tier: str) -> None:
    """A prompt whose first chunks looked fine: they are in the tree, and below, when the last one fails."""
    where = {"kv_disk_cache_dir": str(tmp_path)} if tier == "disk" else {"kv_host_cache_gib": 0.001}
    engine = tiered(max_num_batched_tokens=16, **where)
    backend = engine.backend
    assert isinstance(backend, FakeBackend)
    if tier == "host":  # known from before, and evicted to host memory
        ask(engine, "before", LONG)
        ask(engine, "other", OTHER)
        assert engine.stats().tiers.saved_blocks > 0
    backend.poison = LONG[-1]
    (*_, last) = run(engine, request("bad", LONG))["bad"]
    assert last.finish_reason == "error"
    backend.poison = None
    expected, _ = ask(tiered(), "alone", LONG)
    assert ask(engine, "again", LONG) == (expected, 0)
    engine.close()


def test_int8_is_within_half_a_step_of_its_group() -> None:
    rng = np.random.default_rng(1)
    values = rng.standard_normal((40, GROUP)).astype(np.float32) * np.logspace(-6, 6, 40)[:, None]
    values[0] = 0
    bits = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    exact = (bits.astype(np.uint32) << 16).view(np.float32).reshape(40, GROUP)
    codec = Int8(bits.nbytes)
    packed, back = np.empty(codec.size, np.uint8), np.empty(bits.nbytes, np.uint8)
    codec.encode(bits.view(np.uint8).reshape(-1), packed)
    codec.decode(packed, back)
    got = (back.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(40, GROUP)
    largest = np.abs(exact).max(axis=1, keepdims=True)
    assert (np.abs(got - exact) <= largest * (0.5 / 127 + 2**-8)).all()
    assert codec.size / bits.nbytes == (GROUP + 4) / (2 * GROUP)
