"""What is removed from the artefact cache, and what never is."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from fourfold.build.artefact import LAYOUT
from fourfold.build.prune import GRACE_SECONDS, note_use, prune

NOW = 1e9
DAY = GRACE_SECONDS


def artefact(folder: Path, name: str, *, days: float, layout: int = LAYOUT, size: int = 100) -> str:
    """Last used so many days ago. Its checkpoint is the file `checkpoint` beside the cache."""
    path = folder / f"{name}-{'0' * 32}-fast-{layout}"
    path.mkdir(parents=True)
    checkpoint = folder.parent / "checkpoint"
    checkpoint.touch()
    (path / "weights.bin").write_bytes(bytes(size))
    (path / "manifest.json").write_text(json.dumps({"source": str(checkpoint)}))
    os.utime(path, (NOW - days * DAY, NOW - days * DAY))
    return path.name


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "artefacts"


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_other_layouts_go_once_nobody_used_them_for_a_day(folder: Path) -> None:
    current = artefact(folder, "a", days=300)
    old = artefact(folder, "b", days=1.1, layout=LAYOUT - 1)
    newer = artefact(folder, "c", days=2, layout=LAYOUT + 1)
    in_use = artefact(folder, "d", days=0.9, layout=LAYOUT - 1)
    assert set(prune(folder, now=NOW)) == {old, newer}
    assert names(folder) == {current, in_use}
    assert prune(folder, now=NOW) == []


def test_an_artefact_goes_with_its_checkpoint(folder: Path) -> None:
    gone = artefact(folder, "a", days=2)
    (folder / gone / "manifest.json").write_text(json.dumps({"source": str(folder / "not there")}))
    unreadable = artefact(folder, "b", days=2)
    (folder / unreadable / "manifest.json").write_text("[")
    assert prune(folder, now=NOW) == [gone]
    assert names(folder) == {unreadable}


def test_above_the_limit_the_longest_unused_go_first(folder: Path) -> None:
    by_age = [artefact(folder, str(days), days=days, size=10_000) for days in (9, 7, 5, 3)]
    recent = artefact(folder, "new", days=0.1, size=30_000)
    assert prune(folder, now=NOW, max_bytes=55_000) == by_age[:2]
    assert names(folder) == {*by_age[2:], recent}
    # What is in use is kept even if it alone is too much.
    assert prune(folder, now=NOW, max_bytes=1) == by_age[2:]
    assert names(folder) == {recent}


def test_what_is_no_artefact_is_left_alone(folder: Path) -> None:
    kept = [".a-work", "notes", f"x-{'0' * 31}-fast-1", f"x-{'0' * 32}-slow-1"]
    for name in kept:
        (folder / name).mkdir(parents=True)
        os.utime(folder / name, (0, 0))
    (folder / f"file-{'0' * 32}-fast-1").write_text("")
    assert prune(folder, now=NOW, max_bytes=0) == []
    assert len(names(folder)) == 5


def test_what_killed_builds_and_removals_left_goes(folder: Path) -> None:
    for name, days in ((f".a-{'0' * 32}-fast-3-x1y2", 1.1), (f".b-{'0' * 32}-fast-3-removed-7", 0.9)):
        (folder / name).mkdir(parents=True)
        (folder / name / "weights.bin").touch()
        os.utime(folder / name, (NOW - days * DAY, NOW - days * DAY))
    assert prune(folder, now=NOW) == []
    assert names(folder) == {f".b-{'0' * 32}-fast-3-removed-7"}


def test_use_is_noted(folder: Path) -> None:
    old = folder / artefact(folder, "a", days=500, layout=LAYOUT - 1)
    note_use(old)
    assert prune(folder, now=old.stat().st_mtime + 1) == []
    note_use(folder / "not there")


def test_an_open_artefact_stays_readable(folder: Path) -> None:
    name = artefact(folder, "a", days=2, layout=LAYOUT - 1)
    with (folder / name / "weights.bin").open("rb") as file:
        assert prune(folder, now=NOW) == [name]
        assert len(file.read()) == 100
