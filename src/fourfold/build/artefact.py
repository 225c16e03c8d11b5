"""Packed weights on disk: packed once per checkpoint and precision, mapped ever after.

A folder holds `weights.bin` (blobs aligned to 4 KiB) and `manifest.json` (what each blob is). It is made in a
temporary folder and renamed into place, so that a reader sees all of it or nothing, whatever is killed when.
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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fourfold.build.pack import matrix_key, pack_matrix, pack_vector
from fourfold.build.packed import PackedMatrix, PackedWeights
from fourfold.models.binding import Binding
from fourfold.weights.source import WeightSource

log = logging.getLogger(__name__)

LAYOUT = 2
"""Changes whenever native/matrix.h's layout or the packing changes; part of the key."""

_ALIGN = 4096
_SAMPLE = 1 << 16

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
    folder: Path, source: WeightSource, names: WeightNames, *, exact: bool, progress: Progress
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
        return _in_memory(source, names, exact=exact, progress=progress), False
    try:
        _write(work, source, names, exact=exact, progress=progress)
        with contextlib.suppress(OSError):  # another process was faster; its artefact is as good
            work.rename(folder)
        return _open(folder, names), False
    except OSError as error:
        log.warning("packed weights are not kept for the next start: writing %s failed (%s)", folder, error)
        shutil.rmtree(work, ignore_errors=True)
        return _in_memory(source, names, exact=exact, progress=progress), False
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _remove_leftovers(folder: Path) -> None:
    """Work folders of killed builds of this artefact; those of running builds are younger than an hour."""
    for old in folder.parent.glob(f".{folder.name}-*"):
        with contextlib.suppress(OSError):
            if old.stat().st_mtime < folder.parent.stat().st_mtime - 3600:
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


def _in_memory(source: WeightSource, names: WeightNames, *, exact: bool, progress: Progress) -> PackedWeights:
    by_key = {m.key: m for m in _packed(source, names, exact=exact, progress=progress)}
    matrices = {name: by_key[matrix_key(b)] for name, b in names.matrices.items()}
    return PackedWeights(matrices, {name: pack_vector(source, b) for name, b in names.vectors.items()})


def _write(work: Path, source: WeightSource, names: WeightNames, *, exact: bool, progress: Progress) -> None:
    matrices: list[dict[str, Any]] = []
    vectors: dict[str, list[int]] = {}
    with (work / "weights.bin").open("wb") as file:

        def put(data: NDArray[Any]) -> int:
            start = -(-file.tell() // _ALIGN) * _ALIGN
            file.write(bytes(start - file.tell()))
            file.write(data.data)
            return start

        for m in _packed(source, names, exact=exact, progress=progress):
            entry = {k: v for k, v in ((f, getattr(m, f)) for f in m.__dataclass_fields__) if k != "data"}
            matrices.append({**entry, "start": put(m.data), "nbytes": m.data.nbytes})
        everything = [pack_vector(source, b) for b in names.vectors.values()]
        start = put(np.concatenate(everything)) if everything else 0
        for name, v in zip(names.vectors, everything, strict=True):
            vectors[name] = [start, v.size]
            start += v.nbytes
        size = file.tell()
        file.flush()
        os.fsync(file.fileno())
    manifest = {
        "layout": LAYOUT,
        "size": size,
        "matrices": matrices,
        "vectors": vectors,
        "source": str(source.path),
    }
    (work / "manifest.json").write_text(json.dumps(manifest))


def _open(folder: Path, names: WeightNames) -> PackedWeights:
    """Raises ValueError, KeyError or TypeError when manifest and file do not fit each other."""
    manifest = json.loads((folder / "manifest.json").read_bytes())
    if manifest["layout"] != LAYOUT:
        raise ValueError(f"its layout is {manifest['layout']}, this version reads {LAYOUT}")
    with (folder / "weights.bin").open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size != manifest["size"]:
            raise ValueError(f"weights.bin has {size} bytes instead of {manifest['size']}")
        mapped = mmap.mmap(
            file.fileno(), 0, flags=mmap.MAP_PRIVATE | getattr(mmap, "MAP_POPULATE", 0), prot=mmap.PROT_READ
        )
    blob = np.frombuffer(mapped, np.uint8)

    def run(start: int, nbytes: int) -> NDArray[np.uint8]:
        if not 0 <= start <= start + nbytes <= size:
            raise ValueError(f"bytes {start} to {start + nbytes} are outside weights.bin")
        return blob[start : start + nbytes]

    by_key: dict[str, PackedMatrix] = {}
    for entry in manifest["matrices"]:
        start, nbytes = entry.pop("start"), entry.pop("nbytes")
        by_key[entry["key"]] = PackedMatrix(data=run(start, nbytes), **entry)
    return PackedWeights(
        {name: by_key[matrix_key(b)] for name, b in names.matrices.items()},
        {name: run(at, 4 * count).view(np.float32) for name, (at, count) in manifest["vectors"].items()},
    )
