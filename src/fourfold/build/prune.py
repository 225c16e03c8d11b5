"""Removing artefacts that nobody will open again, so that the cache folder does not grow for ever.

Run after one was built. An artefact's folder carries the time of its last use (see `note_use`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import time
from pathlib import Path

import msgspec

from fourfold.build.artefact import LAYOUT

log = logging.getLogger(__name__)

MAX_BYTES = 64 << 30
"""Of all artefacts together; beyond it the longest unused go first."""
GRACE_SECONDS = 24 * 3600.0
"""What was used since is kept whatever else holds: another version of Fourfold may be running from it."""

_NAME = re.compile(r".+-[0-9a-f]{32}-(?:fast|exact)-(?P<layout>\d+)")
_LEFTOVER = re.compile(rf"\.{_NAME.pattern}-.+")
"""Of a build or a removal; after a day, of one that was killed."""


class _Entry(msgspec.Struct, frozen=True):
    path: Path
    layout: int
    used: float
    bytes: int


def note_use(artefact: Path) -> None:
    """Now is the time of its last use. A folder that cannot be written keeps the one it has."""
    with contextlib.suppress(OSError):
        os.utime(artefact)


def prune(folder: Path, *, max_bytes: int = MAX_BYTES, now: float | None = None) -> list[str]:
    """Removes artefacts of other layouts, those whose checkpoint is gone, and the longest unused above
    `max_bytes`; none that was used within the last day. Returns their names.

    Readers see an artefact whole or not at all, and one that is open stays readable.
    """
    now = time.time() if now is None else now
    entries = sorted(_entries(folder), key=lambda entry: entry.used)
    total = sum(entry.bytes for entry in entries)
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            if _LEFTOVER.fullmatch(path.name) and now - path.stat().st_mtime >= GRACE_SECONDS:
                shutil.rmtree(path, ignore_errors=True)
    removed = []
    for entry in entries:
        useless = entry.layout != LAYOUT or _checkpoint_is_gone(entry.path)
        if now - entry.used < GRACE_SECONDS or not (useless or total > max_bytes):
            continue
        if _remove(entry.path):
            total -= entry.bytes
            removed.append(entry.path.name)
    if removed:
        log.info("artefacts removed that are of no use any more: %s", ", ".join(removed))
    return removed


def _entries(folder: Path) -> list[_Entry]:
    found = []
    for path in folder.iterdir():
        match = _NAME.fullmatch(path.name)
        # Another process may be removing it, too.
        with contextlib.suppress(OSError):
            if match is not None and path.is_dir() and not path.is_symlink():
                size = sum(file.stat().st_size for file in path.iterdir())
                found.append(_Entry(path, int(match["layout"]), path.stat().st_mtime, size))
    return found


def _checkpoint_is_gone(artefact: Path) -> bool:
    """Whether the manifest names a file that is not there; a manifest that cannot be read says nothing."""
    try:
        source = json.loads((artefact / "manifest.json").read_bytes())["source"]
        return not Path(source).exists()
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _remove(artefact: Path) -> bool:
    # Out of sight in one step first.
    doomed = artefact.with_name(f".{artefact.name}-removed-{os.getpid()}")
    try:
        artefact.rename(doomed)
    except OSError as error:
        log.warning("artefact %s cannot be removed: %s", artefact, error)
        return False
    shutil.rmtree(doomed, ignore_errors=True)
    return True
