"""Opening and mapping a file that is not trusted."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from fourfold.errors import LoadError

_LFS_START = b"version https://git-lfs.github.com/spec/"


def map_file(path: Path, kind: str, smallest: int) -> mmap.mmap:
    """The whole file, read-only. `kind` names what was expected; no such file is shorter than `smallest` bytes.

    Raises LoadError when it cannot be read, is a directory, is a Git LFS pointer, or is too short.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(len(_LFS_START))
            if head == _LFS_START:
                raise LoadError(
                    f"{path}: is a Git LFS pointer (a small text file), not a {kind}; "
                    f"fetch the real file with `git lfs pull` or download it again"
                )
            if size < smallest:
                raise LoadError(
                    f"{path}: is too short for a {kind}: needs at least {smallest} bytes, has {size}; "
                    f"download it again"
                )
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise LoadError(f"{path}: cannot be read: {error.strerror or error}") from error
