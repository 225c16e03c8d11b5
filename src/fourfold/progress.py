"""How long work tells how far it is, and how that is shown on a terminal."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

PATIENCE_SECONDS = 0.25


class Progress(Protocol):
    """Called as often as something moved; `done` of `total` in `unit`, total None when it is not known.

    A new `stage` ends the one before it.
    """

    def __call__(self, stage: str, done: int, total: int | None = None, unit: str = "bytes") -> None: ...


def silent(stage: str, done: int, total: int | None = None, unit: str = "bytes") -> None:
    """The listener who does not listen."""


class ReportedProgress:
    """A Progress on standard error: bars on a terminal, elsewhere a line per download. A context ends it."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._stage = ""
        self._stage_began = 0.0
        self._bars: Bars | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> ReportedProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __call__(self, stage: str, done: int, total: int | None = None, unit: str = "bytes") -> None:
        new = stage != self._stage
        if new:
            self._stage_began = time.monotonic()
            self._stop()
        if self._stream.isatty():
            # What is over at once needs no bar, and rich takes longer to import than a small model to load.
            if total is None or time.monotonic() - self._stage_began > PATIENCE_SECONDS:
                self._draw(stage, done, total, unit)
        elif new and unit == "bytes":
            # Only what waits for a network is worth a line in somebody's log.
            size = f" ({total / 1e6:.0f} MB)" if total else ""
            print(f"{stage}{size}", file=self._stream, flush=True)
        self._stage = stage

    def close(self) -> None:
        """Ends the drawing; a later call begins a new one."""
        self._stop()
        self._stage = ""

    def _stop(self) -> None:
        if self._bars is not None:
            self._bars.stop()
        self._bars = self._task = None

    def _draw(self, stage: str, done: int, total: int | None, unit: str) -> None:
        if self._bars is None or self._task is None:
            self._bars = self._make_bars(unit)
            self._task = self._bars.add_task(stage, total=total)
        self._bars.update(self._task, completed=done, total=total)

    def _make_bars(self, unit: str) -> Bars:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            ProgressColumn,
            TaskProgressColumn,
            TextColumn,
            TimeRemainingColumn,
        )
        from rich.progress import Progress as RichProgress

        amounts: dict[str, type[ProgressColumn]] = {"bytes": DownloadColumn, "%": TaskProgressColumn}
        amount = amounts.get(unit, MofNCompleteColumn)()
        bars = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            amount,
            TimeRemainingColumn(),
            console=Console(file=self._stream),
            transient=unit == "%",
        )
        bars.start()
        return bars
