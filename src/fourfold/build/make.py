"""Making an artefact: weights packed once per checkpoint and precision.

It is made in a temporary folder and renamed into place, so that a reader sees all of it or nothing, whatever
is killed when.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from fourfold.build.artefact import LAYOUT, WeightKeys, open_artefact
from fourfold.build.pack import matrix_key, pack_matrix, pack_vector
from fourfold.build.packed import Outliers, PackedMatrix, PackedWeights
from fourfold.models.binding import Binding
from fourfold.weights.source import WeightSource

log = logging.getLogger(__name__)

_ALIGN = 64

Calibrate = Callable[[PackedWeights], Mapping[str, Outliers]]
"""Runs the packed model once and says which input columns are outliers."""

Progress = Callable[[str, float], None]
"""(what is being done, share done from 0 to 1)."""


class WeightNames(msgspec.Struct, frozen=True):
    """Which of a Program's weights are matrices and which vectors, each with its binding."""

    matrices: Mapping[str, Binding]
    vectors: Mapping[str, Binding]

    def keys(self) -> WeightKeys:
        return WeightKeys({name: matrix_key(b) for name, b in self.matrices.items()}, tuple(self.vectors))


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
            return open_artefact(folder, names.keys()), True
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
            return open_artefact(work, names.keys()), False
        return open_artefact(folder, names.keys()), False
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
    fields = [f for f in PackedMatrix.__struct_fields__ if f != "data"]
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
    found = calibrate(open_artefact(work, names.keys()))
    blobs = _Blobs(work / "outliers.bin")
    manifest["outliers"] = {
        name: {"channels": o.channels.tolist(), "columns": [blobs.put(c) for c in o.columns]}
        for name, o in found.items()
    }
    blobs.close()
    manifest["sizes"]["outliers.bin"] = blobs.size
    path.write_text(json.dumps(manifest))
