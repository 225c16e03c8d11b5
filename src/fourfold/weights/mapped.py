"""Opening and mapping a file that is not trusted."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from fourfold.errors import LoadError

_LFS_START = b"version https://git-lfs.github.com/spec/"


def lfs_pointer_error(path: Path, head: bytes, kind: str) -> LoadError | None:
    """The error to raise when the first bytes of a file are those of a Git LFS pointer, else None."""
    if not head.startswith(_LFS_START):
        return None
    return LoadError(
        f"{path}: is a Git LFS pointer (a small text file), not a {kind}; "
        f"fetch the real file with `git lfs pull` or download it again"
    )


def map_file(path: Path, kind: str, smallest: int) -> mmap.mmap:
    """The whole file, read-only. `kind` says what is expected; no such file is shorter than `smallest`.

    Raises LoadError when it cannot be read, is a directory, is a Git LFS pointer, or is too short.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            pointer = lfs_pointer_error(path, file.read(len(_LFS_START)), kind)
            if pointer is not None:
                raise pointer
            if size < smallest:
                raise LoadError(
                    f"{path}: is too short for a {kind}: needs at least {smallest} bytes, has {size}; "
                    f"download it again"
                )
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise LoadError(f"{path}: cannot be read: {error.strerror or error}") from error
