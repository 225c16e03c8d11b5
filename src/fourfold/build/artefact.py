"""Packed weights on disk: packed once per checkpoint and precision, mapped ever after.

A folder holds `weights.bin` and `outliers.bin` (blobs aligned to 64 bytes) and `manifest.json` (what each
blob is). It is made in a temporary folder and renamed into place, so that a reader sees all of it or nothing,
whatever is killed when.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fourfold.build.pack import matrix_key, pack_matrix, pack_vector
from fourfold.build.packed import Outliers, PackedMatrix, PackedWeights
from fourfold.models.binding import Binding
from fourfold.weights.source import WeightSource

log = logging.getLogger(__name__)

LAYOUT = 6
"""Changes whenever native/matrix.h's layout or the packing changes; part of the key."""

_ALIGN = 64
_HUGE_PAGE = 1 << 21
_SAMPLE = 1 << 16

Calibrate = Callable[[PackedWeights], Mapping[str, Outliers]]
"""Runs the packed model once and says which input columns are outliers."""

Progress = Callable[[str, float], None]
"""(what is being done, share done from 0 to 1)."""


def fingerprint(files: Mapping[str, Path]) -> str:
    """Identifies the files' content without reading all of it: sizes, times, first and last 64 KiB."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(files):
        with files[name].open("rb") as file:
            stat = os.fstat(file.fileno())
            digest.update(f"{name}:{stat.st_size}:{stat.st_mtime_ns};".encode())
            digest.update(file.read(_SAMPLE))
            file.seek(max(0, stat.st_size - _SAMPLE))
            digest.update(file.read(_SAMPLE))
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class WeightNames:
    """Which of a Program's weights are matrices and which vectors, each with its binding."""

    matrices: Mapping[str, Binding]
    vectors: Mapping[str, Binding]


def load_or_build(
    folder: Path,
    source: WeightSource,
    names: WeightNames,
    *,
    exact: bool,
    calibrate: Calibrate | None,
    progress: Progress,
) -> tuple[PackedWeights, bool]:
    """Packed weights, mapped from `folder`, which is made first if it is not there or not readable.

    Second value: True if they were there. If the folder cannot be written (read-only or full disk), the
    weights stay in memory and a warning says so. Raises LoadError for a damaged checkpoint.
    """
    if folder.is_dir():
        try:
            return _open(folder, names), True
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("artefact %s cannot be used (%s); it is built again", folder, error)
            shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(folder)
        work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        log.warning(
            "packed weights are not kept for the next start: %s cannot be written (%s)", folder.parent, error
        )
        return _in_memory(source, names, exact=exact, calibrate=calibrate, progress=progress), False
    try:
        _write(work, source, names, exact=exact, calibrate=calibrate, progress=progress)
        try:
            work.rename(folder)
        except OSError:  # another process was faster, or what is there cannot be removed
            return _open(work, names), False
        return _open(folder, names), False
    except OSError as error:
        log.warning("packed weights are not kept for the next start: writing %s failed (%s)", folder, error)
        shutil.rmtree(work, ignore_errors=True)
        return _in_memory(source, names, exact=exact, calibrate=calibrate, progress=progress), False
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _remove_leftovers(folder: Path) -> None:
    """Work folders of killed builds of this artefact; those of running builds are younger than an hour."""
    for old in folder.parent.glob(f".{folder.name}-*"):
        with contextlib.suppress(OSError):
            if old.stat().st_mtime < time.time() - 3600:
                shutil.rmtree(old, ignore_errors=True)


def _packed(
    source: WeightSource, names: WeightNames, *, exact: bool, progress: Progress
) -> Iterator[PackedMatrix]:
    """Each distinct matrix once, one in memory at a time."""
    unique = {matrix_key(b): b for b in names.matrices.values()}
    sizes = {key: source.tensor(b.source).data.nbytes for key, b in unique.items()}
    total, done = max(1, sum(sizes.values())), 0
    for key, binding in unique.items():
        yield pack_matrix(source, binding, exact=exact)
        done += sizes[key]
        progress("packing weights", done / total)


def _in_memory(
    source: WeightSource,
    names: WeightNames,
    *,
    exact: bool,
    calibrate: Calibrate | None,
    progress: Progress,
) -> PackedWeights:
    by_key = {m.key: m for m in _packed(source, names, exact=exact, progress=progress)}
    weights = PackedWeights(
        {name: by_key[matrix_key(b)] for name, b in names.matrices.items()},
        {name: pack_vector(source, b) for name, b in names.vectors.items()},
    )
    return weights if calibrate is None else replace(weights, outliers=calibrate(weights))


class _Blobs:
    """A file of aligned runs of bytes, being written."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self.size = 0

    def put(self, data: NDArray[Any]) -> dict[str, int]:
        start = -(-self.size // _ALIGN) * _ALIGN
        self._file.write(bytes(start - self.size))
        self._file.write(data.data)
        self.size = start + data.nbytes
        return {"start": start, "nbytes": data.nbytes}

    def close(self) -> None:
        """On disk afterwards, not only in the system's cache."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


def _write(
    work: Path,
    source: WeightSource,
    names: WeightNames,
    *,
    exact: bool,
    calibrate: Calibrate | None,
    progress: Progress,
) -> None:
    blobs = _Blobs(work / "weights.bin")
    fields = [f for f in PackedMatrix.__dataclass_fields__ if f != "data"]
    matrices = [
        {**{f: getattr(m, f) for f in fields}, **blobs.put(m.data)}
        for m in _packed(source, names, exact=exact, progress=progress)
    ]
    packed = [pack_vector(source, b) for b in names.vectors.values()]
    start = blobs.put(np.concatenate(packed))["start"] if packed else 0
    vectors: dict[str, list[int]] = {}
    for name, v in zip(names.vectors, packed, strict=True):
        vectors[name] = [start, v.size]
        start += v.nbytes
    blobs.close()
    manifest: dict[str, Any] = {
        "layout": LAYOUT,
        "source": str(source.path),
        "sizes": {"weights.bin": blobs.size},
        "matrices": matrices,
        "vectors": vectors,
        "outliers": {},
    }
    path = work / "manifest.json"
    path.write_text(json.dumps(manifest))
    if calibrate is None:
        return
    progress("calibrating", 0.0)
    found = calibrate(_open(work, names))
    blobs = _Blobs(work / "outliers.bin")
    manifest["outliers"] = {
        name: {"channels": o.channels.tolist(), "columns": [blobs.put(c) for c in o.columns]}
        for name, o in found.items()
    }
    blobs.close()
    manifest["sizes"]["outliers.bin"] = blobs.size
    path.write_text(json.dumps(manifest))


class _Resident:
    """A whole file in memory, on huge pages where the system gives them.

    Not mapped: decoding streams through all of it for every token, and a file's 4 KiB pages cost a third of
    the memory bandwidth in address translation (measured: 17 against 26 GB/s on one thread).
    """

    def __init__(self, path: Path, expected: int) -> None:
        """Raises ValueError if the file has not the expected size (bytes)."""
        with path.open("rb", buffering=0) as file:
            self._size = os.fstat(file.fileno()).st_size
            if self._size != expected:
                raise ValueError(f"{path.name} has {self._size} bytes instead of {expected}")
            size = max(1, -(-expected // _HUGE_PAGE)) * _HUGE_PAGE
            # Private: the system gives huge pages to shared memory only if told so.
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with contextlib.suppress(OSError):  # a kernel without them: slower, not wrong
                    memory.madvise(mmap.MADV_HUGEPAGE)
            view, done = memoryview(memory), 0
            while done < expected:
                count = file.readinto(view[done:expected])
                if not count:
                    raise ValueError(f"{path.name} ended after {done} of {expected} bytes")
                done += count
            self._bytes = np.frombuffer(memory, np.uint8)
            self._bytes.flags.writeable = False

    def run(self, start: int, nbytes: int) -> NDArray[np.uint8]:
        if not 0 <= start <= start + nbytes <= self._size:
            raise ValueError(f"bytes {start} to {start + nbytes} are outside a file of {self._size}")
        return self._bytes[start : start + nbytes]


def _open(folder: Path, names: WeightNames) -> PackedWeights:
    """Raises ValueError, KeyError or TypeError when manifest and files do not fit each other."""
    manifest = json.loads((folder / "manifest.json").read_bytes())
    if manifest["layout"] != LAYOUT:
        raise ValueError(f"its layout is {manifest['layout']}, this version reads {LAYOUT}")
    files = {name: _Resident(folder / name, size) for name, size in manifest["sizes"].items()}
    weights = files["weights.bin"]
    by_key: dict[str, PackedMatrix] = {}
    for entry in manifest["matrices"]:
        data = weights.run(entry.pop("start"), entry.pop("nbytes"))
        by_key[entry["key"]] = PackedMatrix(data=data, **entry)
    outliers = {
        name: Outliers(
            np.asarray(entry["channels"], np.int32),
            tuple(files["outliers.bin"].run(**where).view(np.uint16) for where in entry["columns"]),
        )
        for name, entry in manifest["outliers"].items()
    }
    return PackedWeights(
        {name: by_key[matrix_key(b)] for name, b in names.matrices.items()},
        {
            name: weights.run(at, 4 * count).view(np.float32)
            for name, (at, count) in ((name, manifest["vectors"][name]) for name in names.vectors)
        },
        outliers,
    )
