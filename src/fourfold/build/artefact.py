"""Packed weights on disk, as every start after the first reads them.

A folder holds `weights.bin` and `outliers.bin` (blobs aligned to 64 bytes) and `manifest.json` (what each
blob is). make.py makes it; prepared.py adds the Program that goes with it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np

from fourfold.build.packed import Outliers, PackedMatrix, PackedWeights
from fourfold.build.resident import Resident

LAYOUT = 6
"""Changes whenever native/matrix.h's layout or the packing changes; part of the key."""

_SAMPLE = 1 << 16


class WeightKeys(msgspec.Struct, frozen=True, array_like=True):
    """A Program's weights in an artefact: names of matrices → key of their content, names of vectors."""

    matrices: dict[str, str]
    vectors: tuple[str, ...]


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


def open_artefact(folder: Path, keys: WeightKeys) -> PackedWeights:
    """Raises OSError, ValueError, KeyError or TypeError when files are missing or do not fit each other."""
    manifest = json.loads((folder / "manifest.json").read_bytes())
    if manifest["layout"] != LAYOUT:
        raise ValueError(f"its layout is {manifest['layout']}, this version reads {LAYOUT}")
    files = {name: Resident(folder / name, size) for name, size in manifest["sizes"].items()}
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
        {name: by_key[key] for name, key in keys.matrices.items()},
        {
            name: weights.run(at, 4 * count).view(np.float32)
            for name, (at, count) in ((name, manifest["vectors"][name]) for name in keys.vectors)
        },
        outliers,
    )
