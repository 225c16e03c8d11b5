"""Encoded KV blocks in a folder: named by what they hold, checked when read, and never more than a limit.

    FOLDER/fourfold-kv-1/IDENTITY/ab/abcd....kv

IDENTITY is a digest of model, artefact, dtypes and codec; the file's name is that of the whole prefix, with
its tenant's salt in it. Who does not know tokens and salt cannot ask for a block. A file gets its name when
it is complete; nothing is synced, so after a power failure a file may be torn, which its checksum tells.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import re
import struct
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fourfold.errors import ConfigError

log = logging.getLogger("fourfold.engine")

Bytes = NDArray[np.uint8]

LAYOUT = "fourfold-kv-1"
_HEADER = struct.Struct("<4sIQ16s16s16s")
"""Magic, version, bytes of content, identity, digest, checksum of the content."""
_MAGIC, _VERSION = b"FFKV", 1
_NAME = re.compile(r"[0-9a-f]{32}\.kv")
_TEMPORARY = re.compile(r"[0-9a-f]{32}\.kv\.[0-9]+-[0-9]+\.tmp")
_STALE_SECONDS = 3600.0
"""A temporary file of that age was left by a process that died."""
_PAUSE_SECONDS = 30.0
"""Nothing is written for so long after the disk was full."""


@dataclass(slots=True)
class DiskCounters:
    """Each only grows. bad_files: torn, altered or foreign, all ignored."""

    read_blocks: int = 0
    written_blocks: int = 0
    evicted_blocks: int = 0
    bad_files: int = 0
    write_errors: int = 0


class DiskStore:
    """Thread-safe. Several processes may use one folder; each knows what was there when it started and what
    it wrote itself."""

    def __init__(self, folder: Path, identity: str, content_bytes: int, limit_bytes: int) -> None:
        """Looks at the names and sizes of what is there. Raises ConfigError if the folder cannot be used, or
        not one block fits the limit."""
        self._identity = hashlib.blake2b(identity.encode(), digest_size=16).digest()
        self._content_bytes = content_bytes
        self._file_bytes = _HEADER.size + content_bytes
        if limit_bytes < self._file_bytes:
            raise ConfigError(
                f"kv_disk_cache_gib allows {limit_bytes} bytes, but one KV block takes {self._file_bytes}; "
                "raise it or leave kv_disk_cache_dir out"
            )
        self._limit = limit_bytes
        self._root = folder / LAYOUT
        self._home = self._root / self._identity.hex()
        self.counters = DiskCounters()
        self._lock = threading.Lock()
        self._files: OrderedDict[Path, int] = OrderedDict()
        self._used = 0
        self._temporary = 0
        self._paused_until = 0.0
        try:
            self._home.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._scan()
        except OSError as error:
            raise ConfigError(f"kv_disk_cache_dir {folder} cannot be used: {error}") from error

    @property
    def used_bytes(self) -> int:
        return self._used

    def __len__(self) -> int:
        """Files of all models."""
        return len(self._files)

    def __contains__(self, digest: bytes) -> bool:
        with self._lock:
            return self._path(digest) in self._files

    def read(self, digest: bytes, out: Bytes) -> bool:
        """Fills `out`, uint8 [content_bytes]. False, and the block is forgotten, if the file is gone or not
        what it should be; `out` may hold anything then."""
        path = self._path(digest)
        try:
            with open(path, "rb", buffering=0) as file:
                header = file.read(_HEADER.size)
                whole = file.readinto(out.data) == len(out) and not file.read(1)
        except FileNotFoundError:
            self._drop(path)
            return False
        except OSError as error:
            self._bad(path, str(error))
            return False
        if not whole or header != self._header(digest, out):
            self._bad(path, "torn or altered")
            with contextlib.suppress(OSError):
                path.unlink()
            return False
        self.counters.read_blocks += 1
        with self._lock:
            if path in self._files:
                self._files.move_to_end(path)
        with contextlib.suppress(OSError):
            os.utime(path)  # so that the order of use outlives this process
        return True

    def write(self, digest: bytes, data: Bytes) -> bool:
        """False if it could not be written: counted, and said in the log."""
        path = self._path(digest)
        if digest in self:
            return True
        if time.monotonic() < self._paused_until:
            self.counters.write_errors += 1
            return False
        self._make_room()
        self._temporary += 1
        temporary = path.with_name(f"{path.name}.{os.getpid()}-{self._temporary}.tmp")
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            try:
                _write(temporary, self._header(digest, data), data)
                temporary.rename(path)
            except OSError:
                with contextlib.suppress(OSError):
                    temporary.unlink()
                raise
        except OSError as error:
            self.counters.write_errors += 1
            log.warning("a KV block could not be written to %s: %s", path.parent, error)
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
                self._paused_until = time.monotonic() + _PAUSE_SECONDS
            return False
        with self._lock:
            self._files[path] = self._file_bytes
            self._used += self._file_bytes
        self.counters.written_blocks += 1
        return True

    def remove(self, digest: bytes) -> None:
        """Nothing happens if it is not there."""
        path = self._path(digest)
        self._drop(path)
        with contextlib.suppress(OSError):
            path.unlink()

    def _scan(self) -> None:
        found: list[tuple[float, Path, int]] = []
        now = time.time()
        for path in self._root.rglob("*"):
            if path.is_dir():
                continue
            state = path.stat()
            if _NAME.fullmatch(path.name) and path.parent.name == path.name[:2]:
                if path.parent.parent == self._home and state.st_size != self._file_bytes:
                    self._bad(path, f"{state.st_size} bytes instead of {self._file_bytes}")
                    path.unlink()
                else:
                    found.append((state.st_mtime, path, state.st_size))
            elif not _TEMPORARY.fullmatch(path.name):
                self._bad(path, "not a KV block's name")
            elif now - state.st_mtime > _STALE_SECONDS:
                path.unlink()
        for _, path, size in sorted(found):
            self._files[path] = size
            self._used += size
        self._make_room()

    def _make_room(self) -> None:
        """For one more file."""
        while True:
            with self._lock:
                if not self._files or self._used + self._file_bytes <= self._limit:
                    return
                path, size = self._files.popitem(last=False)
                self._used -= size
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            self.counters.evicted_blocks += 1

    def _bad(self, path: Path, why: str) -> None:
        self.counters.bad_files += 1
        log.warning("KV cache file %s is ignored: %s", path.name, why)
        self._drop(path)

    def _drop(self, path: Path) -> None:
        with self._lock:
            self._used -= self._files.pop(path, 0)

    def _path(self, digest: bytes) -> Path:
        name = digest.hex()
        return self._home / name[:2] / f"{name}.kv"

    def _header(self, digest: bytes, data: Bytes) -> bytes:
        checksum = hashlib.blake2b(data.data, digest_size=16).digest()
        return _HEADER.pack(_MAGIC, _VERSION, len(data), self._identity, digest, checksum)


def _write(path: Path, header: bytes, data: Bytes) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        parts = [memoryview(header), data.data]
        while parts:
            written = os.writev(file, parts)
            while parts and written >= len(parts[0]):
                written -= len(parts.pop(0))
            if parts:
                parts[0] = parts[0][written:]
    finally:
        os.close(file)
