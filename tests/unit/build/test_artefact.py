"""The artefact cache: built once, never half seen, and never in the way when it is damaged or cannot be."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from build.sources import Memory, small
from fourfold.build import make
from fourfold.build.artefact import fingerprint
from fourfold.build.make import WeightNames, load_or_build
from fourfold.build.packed import Outliers, PackedWeights
from fourfold.errors import LoadError
from fourfold.models.binding import Binding


def quiet(what: str, share: float) -> None:
    pass


def load(folder: Path, **options: Any) -> tuple[PackedWeights, bool]:
    source, names = small()
    defaults: dict[str, Any] = {"exact": False, "calibrate": None, "progress": quiet}
    return load_or_build(folder, source, names, **{**defaults, **options})


def some_outliers(weights: PackedWeights) -> dict[str, Outliers]:
    matrix = weights.matrices["embed.weight"]
    columns = np.arange(-(-matrix.n // 16) * 2 * 16, dtype=np.uint16)
    return {"embed.weight": Outliers(np.array([3, 60], np.int32), (columns,))}


def assert_same(one: PackedWeights, two: PackedWeights) -> None:
    assert one.matrices.keys() == two.matrices.keys()
    assert one.vectors.keys() == two.vectors.keys()
    assert one.outliers.keys() == two.outliers.keys()
    for name, matrix in one.matrices.items():
        other = two.matrices[name]
        np.testing.assert_array_equal(matrix.data, other.data)
        for field in ("key", "n", "k", "elem", "bits", "group", "zero", "has_offset", "wide"):
            assert getattr(matrix, field) == getattr(other, field)
    for name, vector in one.vectors.items():
        np.testing.assert_array_equal(vector, two.vectors[name])
    for name, outliers in one.outliers.items():
        np.testing.assert_array_equal(outliers.channels, two.outliers[name].channels)
        for left, right in zip(outliers.columns, two.outliers[name].columns, strict=True):
            np.testing.assert_array_equal(left, right)


def in_memory(tmp_path: Path, **options: Any) -> PackedWeights:
    """What packing gives where nothing can be kept."""
    (tmp_path / "file").write_text("")
    weights, ready = load(tmp_path / "file" / "a", **options)
    assert not ready
    return weights


def test_built_once_and_opened_after(tmp_path: Path) -> None:
    told: list[tuple[str, float]] = []
    first, ready = load(tmp_path / "x" / "a", progress=lambda what, share: told.append((what, share)))
    assert not ready
    shares = [share for what, share in told if what == "packing weights"]
    assert shares == sorted(shares)
    assert shares[-1] == 1
    second, ready = load(tmp_path / "x" / "a")
    assert ready
    assert_same(first, second)
    assert_same(first, in_memory(tmp_path))
    assert [p.name for p in (tmp_path / "x").iterdir()] == ["a"]
    assert second.matrices["head.weight"].data is second.matrices["embed.weight"].data
    for matrix in second.matrices.values():
        assert matrix.data.ctypes.data % 64 == 0


def test_outliers_are_kept(tmp_path: Path) -> None:
    first, _ = load(tmp_path / "a", calibrate=some_outliers)
    second, ready = load(tmp_path / "a", calibrate=some_outliers)
    assert ready
    assert second.outliers.keys() == {"embed.weight"}
    assert_same(first, second)
    assert_same(first, in_memory(tmp_path, calibrate=some_outliers))


def truncate(name: str, keep: float) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / name
        os.truncate(path, int(path.stat().st_size * keep))

    return damage


def edit(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / "manifest.json"
        manifest = json.loads(path.read_text())
        change(manifest)
        path.write_text(json.dumps(manifest))

    return damage


def grow(folder: Path) -> None:
    with (folder / "weights.bin").open("ab") as file:
        file.write(b"x")


DAMAGE: dict[str, Callable[[Path], None]] = {
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
    "empty manifest": truncate("manifest.json", 0),
    "torn manifest": truncate("manifest.json", 0.6),
    "not json": lambda folder: (folder / "manifest.json").write_bytes(b"\xff\x00"),
    "a list": lambda folder: (folder / "manifest.json").write_text("[1]"),
    "no weights": lambda folder: (folder / "weights.bin").unlink(),
    "weights cut at 0 %": truncate("weights.bin", 0),
    "weights cut at 50 %": truncate("weights.bin", 0.5),
    "weights cut at 99.9 %": truncate("weights.bin", 0.999),
    "weights too long": grow,
    "outliers cut": truncate("outliers.bin", 0.5),
    "no outliers": lambda folder: (folder / "outliers.bin").unlink(),
    "another layout": edit(lambda m: m.update(layout=m["layout"] - 1)),
    "no layout": edit(lambda m: m.pop("layout")),
    "no matrices": edit(lambda m: m.update(matrices=[])),
    "no vectors": edit(lambda m: m.update(vectors={})),
    "matrix outside": edit(lambda m: m["matrices"][0].update(start=2**60)),
    "matrix before": edit(lambda m: m["matrices"][0].update(start=-64)),
    "matrix without a size": edit(lambda m: m["matrices"][0].pop("nbytes")),
    "unknown field": edit(lambda m: m["matrices"][0].update(colour="red")),
    "vector outside": edit(lambda m: m["vectors"].update({"norm.weight": [0, 2**50]})),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_artefact_is_built_again(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, _ = load(tmp_path / "a", calibrate=some_outliers)
    DAMAGE[kind](tmp_path / "a")
    with caplog.at_level(logging.WARNING):
        second, ready = load(tmp_path / "a", calibrate=some_outliers)
    assert not ready
    assert "cannot be used" in caplog.text
    assert "built again" in caplog.text
    assert_same(first, second)
    assert load(tmp_path / "a", calibrate=some_outliers)[1]


def test_a_damaged_artefact_that_cannot_be_removed_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = load(tmp_path / "a")
    truncate("weights.bin", 0.5)(tmp_path / "a")
    real = make.shutil.rmtree
    monkeypatch.setattr(
        make.shutil, "rmtree", lambda path, **kw: None if Path(path).name == "a" else real(path, **kw)
    )
    second, ready = load(tmp_path / "a")
    assert not ready
    assert_same(first, second)
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_a_cache_that_cannot_be_written_is_done_without(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> str:
        raise OSError(code, os.strerror(code))

    expected = in_memory(tmp_path)
    monkeypatch.setattr(make.tempfile, "mkdtemp", refuse)
    with caplog.at_level(logging.WARNING):
        weights, ready = load(tmp_path / "x" / "a")
    assert not ready
    assert "cannot be written" in caplog.text
    assert os.strerror(code) in caplog.text
    assert_same(weights, expected)


def test_a_file_in_the_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("not a folder")
    weights, ready = load(tmp_path / "a")
    assert not ready
    assert_same(weights, in_memory(tmp_path))
    assert (tmp_path / "a").read_text() == "not a folder"


def test_a_disk_that_fills_up_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    expected = in_memory(tmp_path, calibrate=some_outliers)
    monkeypatch.setattr(make.os, "fsync", full)
    with caplog.at_level(logging.WARNING):
        weights, ready = load(tmp_path / "x" / "a", calibrate=some_outliers)
    assert not ready
    assert "No space left on device" in caplog.text
    assert_same(weights, expected)
    assert list((tmp_path / "x").iterdir()) == []


def test_a_damaged_checkpoint_leaves_nothing_behind(tmp_path: Path) -> None:
    source, names = small()
    broken = WeightNames({**names.matrices, "extra": Binding("missing")}, names.vectors)
    with pytest.raises(LoadError, match="tensor missing is missing"):
        load_or_build(tmp_path / "a", source, broken, exact=False, calibrate=None, progress=quiet)
    short = WeightNames({"embed.weight": Binding("embed", rows=4000)}, {})
    with pytest.raises(LoadError, match="has 40 rows"):
        load_or_build(tmp_path / "a", source, short, exact=False, calibrate=None, progress=quiet)
    assert list(tmp_path.iterdir()) == []


def test_another_builder_finishing_first_is_no_error(tmp_path: Path) -> None:
    """The second process builds the whole artefact while the first is packing."""
    inner: list[PackedWeights] = []

    def race(what: str, share: float) -> None:
        if not inner:
            inner.append(load(tmp_path / "a")[0])

    outer, ready = load(tmp_path / "a", progress=race)
    assert not ready
    assert_same(outer, inner[0])
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    again, ready = load(tmp_path / "a")
    assert ready
    assert_same(again, outer)


SCRIPT = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from build.test_artefact import load
def progress(what, share):
    if {kill}:
        os.kill(os.getpid(), signal.SIGKILL)
weights, ready = load(Path({folder!r}), progress=progress)
print(weights.nbytes)
"""


def start(folder: Path, *, kill: bool = False) -> subprocess.Popen[str]:
    tests = str(Path(__file__).parent.parent)
    code = SCRIPT.format(tests=tests, folder=str(folder), kill=kill)
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_two_processes_at_once_both_succeed(tmp_path: Path) -> None:
    running = [start(tmp_path / "a"), start(tmp_path / "a")]
    results = [process.communicate(timeout=60) for process in running]
    for process, (out, err) in zip(running, results, strict=True):
        assert process.returncode == 0, err
        assert int(out) == load(tmp_path / "a")[0].nbytes
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_what_a_killed_builder_left_is_removed_when_it_is_old(tmp_path: Path) -> None:
    process = start(tmp_path / "a", kill=True)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".a-")
    load(tmp_path / "b")  # another artefact's build does not touch it
    assert left.exists()

    load(tmp_path / "a")  # it may be a build that is still running
    assert left.exists()
    make.shutil.rmtree(tmp_path / "a")
    old = time.time() - 2 * 3600
    os.utime(left, (old, old))
    os.utime(tmp_path, (old, old))  # nothing happened in the cache since
    load(tmp_path / "a")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


def test_the_fingerprint_follows_content_size_time_and_names(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(bytes(300_000))
    os.utime(path, (1e9, 1e9))
    seen = {fingerprint({"m": path})}
    assert fingerprint({"m": path}) in seen

    def changed() -> None:
        os.utime(path, (1e9, 1e9))
        mark = fingerprint({"m": path})
        assert mark not in seen
        seen.add(mark)

    path.write_bytes(b"x" + bytes(299_999))
    changed()
    path.write_bytes(bytes(299_999) + b"x")
    changed()
    path.write_bytes(bytes(300_001))
    changed()
    path.write_bytes(bytes(300_000))
    os.utime(path, (2e9, 2e9))
    assert fingerprint({"m": path}) not in seen
    os.utime(path, (1e9, 1e9))
    assert fingerprint({"n": path}) not in seen
    path.write_bytes(b"")
    changed()


def test_an_empty_model_has_no_vectors(tmp_path: Path) -> None:
    source = Memory({"w": ("F32", np.ones((2, 3), np.float32))})
    names = WeightNames({"w": Binding("w")}, {})
    for expected in (False, True):
        weights, ready = load_or_build(
            tmp_path / "a", source, names, exact=True, calibrate=None, progress=quiet
        )
        assert ready is expected
        assert weights.vectors == {}
