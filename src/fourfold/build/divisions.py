"""How the matmuls of a model are divided on one machine, as measured (backends/autotune.py).

Kept with the artefact. Results do not depend on it: every division computes every row in the same order.
"""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path
from typing import TypeAlias

import msgspec

from fourfold import _native

log = logging.getLogger(__name__)

_FILE = "divisions.msgpack"
_CPUINFO = Path("/proc/cpuinfo")


class Division(msgspec.Struct, frozen=True, array_like=True):
    """Matmuls of `least` to `most` rows: native/program.h's Division.

    stream_rows: int8 blocks of up to so many rows unpack weights in registers, larger ones in panels.
    runs: a thread takes blocks that lie together.  block: tiles of a block.  chunk: rows of a block, at most.
    """

    least: int
    most: int
    stream_rows: int
    runs: bool
    block: int
    chunk: int


Divisions: TypeAlias = dict[int, tuple[Division, ...]]
"""Index of a Linear or Logits op in its Program → by ascending rows. What is missing is divided by rule."""


def situation(ops: object, isa: str, threads: int, activation_dtype: str, cpuinfo: Path = _CPUINFO) -> str:
    """Identifies what a measurement holds for: the Program's ops, this CPU, its threads, these kernels."""
    digest = hashlib.blake2b(msgspec.msgpack.encode(ops), digest_size=16)
    native = os.stat(_native.__file__)
    for part in (isa, threads, activation_dtype, _cpu(cpuinfo), native.st_size, native.st_mtime_ns):
        digest.update(f"{part};".encode())
    return digest.hexdigest()


def _cpu(cpuinfo: Path) -> str:
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return "unknown"
    pairs = (line.partition(":") for line in lines)
    found = {name.strip(): value.strip() for name, _, value in pairs}
    wanted = ("vendor_id", "cpu family", "model", "model name", "cache size", "CPU part")
    return ",".join(found.get(name, "") for name in wanted)


def are_kept(artefact: Path) -> bool:
    """Whether anything was measured in any situation."""
    return (artefact / _FILE).exists()


def read_divisions(artefact: Path, where: str) -> Divisions | None:
    """None if nothing was measured in this situation."""
    try:
        kept = _read(artefact)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        log.warning("%s cannot be used (%s); matmuls are divided by rule", artefact / _FILE, error)
        return None
    return kept.get(where)


def keep_divisions(artefact: Path, where: str, divisions: Divisions) -> None:
    """Adds them to those of other situations. A folder that cannot be written is logged only."""
    try:
        kept = _read(artefact)
    except (OSError, msgspec.DecodeError):
        kept = {}
    kept[where] = divisions
    work = artefact / f"{_FILE}.{os.getpid()}"
    try:
        work.write_bytes(msgspec.msgpack.encode(kept))
        work.replace(artefact / _FILE)
    except OSError as error:
        log.warning("the next start has to measure again: %s cannot be written (%s)", work, error)
        work.unlink(missing_ok=True)


def _read(artefact: Path) -> dict[str, Divisions]:
    return msgspec.msgpack.decode((artefact / _FILE).read_bytes(), type=dict[str, Divisions])
