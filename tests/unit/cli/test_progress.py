"""Progress on a terminal, in a log, and not at all."""

from __future__ import annotations

import io

import pytest

from fourfold import progress
from fourfold.progress import ReportedProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_gets_one_line_per_download() -> None:
    log = io.StringIO()
    with ReportedProgress(log) as report:
        for done in range(0, 100, 10):
            report("downloading x", done, 98_000_000)
        report("packing", 50, 100, "%")
        report("unpacking x", 0, 5_000_000)
    assert log.getvalue() == "downloading x (98 MB)\nunpacking x (5 MB)\n"


def test_a_terminal_gets_a_bar_per_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PATIENCE_SECONDS", -1)
    terminal = Terminal()
    with ReportedProgress(terminal) as report:
        report("downloading x", 50_000_000, 100_000_000)
        report("generating", 3, 4, "answers")
    shown = terminal.getvalue()
    assert "downloading x" in shown
    assert "50.0/100.0 MB" in shown
    assert "3/4" in shown


def test_what_is_over_at_once_is_not_drawn() -> None:
    terminal = Terminal()
    with ReportedProgress(terminal) as report:
        report("packing", 0, 100, "%")
        report("packing", 100, 100, "%")
    assert terminal.getvalue() == ""


def test_waiting_without_end_is_shown_at_once() -> None:
    terminal = Terminal()
    with ReportedProgress(terminal) as report:
        report("waiting for another process", 0)
    assert "waiting for another process" in terminal.getvalue()
