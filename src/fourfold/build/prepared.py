"""What is known of a model before its weights are read, kept in the artefact beside them.

Reading a checkpoint's header, tracing its Program and fusing it takes longer than reading 100 MB of weights,
and gives the same every time.
"""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

import msgspec

from fourfold.build.artefact import WeightKeys
from fourfold.program.memory import MemoryPlan
from fourfold.program.ops import Program

log = logging.getLogger(__name__)

_FILE = "program.msgpack"
_MAKERS = ("build", "models", "program", "quant", "weights")
"""The rooms whose code decides what a checkpoint becomes."""


class Prepared(msgspec.Struct, frozen=True):
    """program: fused.  plan: its memory.  keys: its weights in the artefact.

    parameters: numbers in the model, tied weights counted once.  summary: what to show of it.
    """

    program: Program
    plan: MemoryPlan
    keys: WeightKeys
    parameters: int
    summary: dict[str, str]


class _Kept(msgspec.Struct, frozen=True):
    made_by: str
    prepared: Prepared


def maker(max_model_len: int | None) -> str:
    """Identifies what makes a Prepared of a checkpoint: this code, and the wanted length (see
    models.registry). Code is told apart by the names, sizes and times of its files."""
    digest = hashlib.blake2b(f"{max_model_len};".encode(), digest_size=16)
    package = Path(__file__).parent.parent
    for room in _MAKERS:
        for folder, _, names in sorted(os.walk(package / room)):
            for name in sorted(names):
                if name.endswith(".py"):
                    stat = os.stat(os.path.join(folder, name))
                    digest.update(f"{folder}/{name}:{stat.st_size}:{stat.st_mtime_ns};".encode())
    return digest.hexdigest()


def read_prepared(artefact: Path, made_by: str) -> Prepared | None:
    """None if there is none, or one that other code made."""
    try:
        kept = msgspec.msgpack.decode((artefact / _FILE).read_bytes(), type=_Kept)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        log.warning("%s cannot be used (%s); it is made again", artefact / _FILE, error)
        return None
    return kept.prepared if kept.made_by == made_by else None


def keep_prepared(artefact: Path, made_by: str, prepared: Prepared) -> None:
    """Readers see the old one or the new one, whole. A folder that cannot be written is logged only."""
    work = artefact / f"{_FILE}.{os.getpid()}"
    try:
        work.write_bytes(msgspec.msgpack.encode(_Kept(made_by, prepared)))
        work.replace(artefact / _FILE)
    except OSError as error:
        log.warning("the next start has to trace the model again: %s cannot be written (%s)", work, error)
        work.unlink(missing_ok=True)
