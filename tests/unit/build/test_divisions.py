"""Measured divisions of matmuls: kept, found again in the same situation only, no influence on answers."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from fourfold.backends import autotune
from fourfold.backends.autotune import clearly_fastest
from fourfold.build import divisions
from fourfold.build.divisions import Division, keep_divisions, read_divisions, situation
from fourfold.build.load import load_engine_backend
from fourfold.config import EngineConfig

FOUND = {3: (Division(1, 4, 0, True, 2, 256), Division(5, 8, 32, False, 4, 64)), 7: ()}


def test_what_is_kept_is_read_in_its_situation_and_no_other(tmp_path: Path) -> None:
    assert read_divisions(tmp_path, "here") is None
    keep_divisions(tmp_path, "here", FOUND)
    keep_divisions(tmp_path, "there", {})
    assert read_divisions(tmp_path, "here") == FOUND
    assert read_divisions(tmp_path, "there") == {}
    assert read_divisions(tmp_path, "elsewhere") is None


@pytest.mark.parametrize("content", [b"", b"\x81", b"not a map", b"\x81\xa4here\x81\x03\x91\x91\x01"])
def test_a_torn_file_is_said_and_replaced(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "divisions.msgpack").write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert read_divisions(tmp_path, "here") is None
    assert "by rule" in caplog.text
    keep_divisions(tmp_path, "here", FOUND)
    assert read_divisions(tmp_path, "here") == FOUND


def test_a_folder_that_cannot_be_written_costs_the_next_start_a_measurement(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keep_divisions(tmp_path / "missing", "here", FOUND)
    assert "measure again" in caplog.text


def test_a_situation_is_the_program_the_cpu_the_threads_and_the_kernels(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_text("processor\t: 0\nmodel name\t: A\ncpu MHz\t\t: 1000.1\nflags\t\t: x\n")
    other.write_text("processor\t: 0\nmodel name\t: B\ncpu MHz\t\t: 1000.1\n")
    base: tuple[Any, ...] = (("ops",), "avx2", 2, "int8")
    here = situation(*base, one)
    assert here == situation(*base, one)
    one.write_text(one.read_text().replace("1000.1", "3000.7"))
    assert here == situation(*base, one), "a clock that changes is no other CPU"
    changes: list[tuple[int, Any]] = [(0, ("other",)), (1, "avx512"), (2, 3), (3, "float32")]
    others = {situation(*base[:at], to, *base[at + 1 :], one) for at, to in changes}
    assert len(others | {here, situation(*base, other), situation(*base, tmp_path / "none")}) == 7


def test_only_what_is_clearly_faster_is_taken() -> None:
    assert clearly_fastest([[1.0, 0.5, 0.9], [1.1, 3.0, 0.9]]) == 1
    assert clearly_fastest([[1.0, 0.98, 0.99], [1.2, 0.98, 0.99]]) == 0
    assert clearly_fastest([[1.0]]) == 0


def test_a_start_with_autotune_measures_and_the_next_one_finds_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOURFOLD_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(autotune, "_COLD_BYTES", 1 << 10)
    # As if the last candidate always were the fastest, so that something is found.
    monkeypatch.setattr(autotune, "clearly_fastest", lambda rounds: len(rounds[0]) - 1)
    shares: list[float] = []

    def progress(what: str, share: float) -> None:
        if "divide" in what:
            shares.append(share)

    def start(**fields: Any) -> tuple[str, bool]:
        """What the start says of divisions, and whether it measured."""
        shares.clear()
        info = load_engine_backend(EngineConfig(model=str(model), num_kv_blocks=8, **fields), progress)[1]
        return info.description["matmuls divided"], bool(shares)

    assert start() == ("by rule", False)
    assert start(autotune=True) == ("as measured", True)
    assert shares == sorted(shares)
    assert len(shares) >= 5, "one per kind of matmul"
    assert start() == ("as measured", False)
    assert start(autotune=True) == ("as measured", False)
    assert start(autotune=False) == ("by rule", False)
    assert start(threads=3) == ("by rule", False)


def test_kept_divisions_are_not_looked_for_where_there_are_none(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOURFOLD_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(divisions, "_read", lambda folder: pytest.fail("a start reads no file for nothing"))
    load_engine_backend(EngineConfig(model=str(model), num_kv_blocks=8), lambda what, share: None)
