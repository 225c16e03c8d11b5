"""How long work tells how far it is, without knowing who listens."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Called as often as something moved; `done` of `total` in `unit`, total None when it is not known.

    A new `stage` ends the one before it.
    """

    def __call__(self, stage: str, done: int, total: int | None = None, unit: str = "bytes") -> None: ...


def silent(stage: str, done: int, total: int | None = None, unit: str = "bytes") -> None:
    """The listener who does not listen."""
