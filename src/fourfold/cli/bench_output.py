"""How measurements are shown: a table, or JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from fourfold.errors import ConfigError

if TYPE_CHECKING:
    from fourfold.bench.stats import Runs

F = TypeVar("F", bound=Callable[..., Any])

repeats_option = click.option(
    "--repeats", "-r", type=click.IntRange(1, 1000), default=5, show_default=True, help="Runs of each figure."
)


def json_option(command: F) -> F:
    """--json FILE, or --json alone for standard output."""
    return click.option(
        "--json",
        "json_to",
        is_flag=False,
        flag_value="-",
        metavar="FILE",
        help="Write JSON with every run to FILE; without a name or with - to standard output, not the table.",
    )(command)


def show(record: Mapping[str, Any], json_to: str | None, table: Callable[[], None]) -> None:
    """Writes the record where it is wanted, and the table unless JSON went to standard output.

    Raises ConfigError if the file cannot be written.
    """
    if json_to == "-":
        click.echo(json.dumps(record, indent=2))
        return
    table()
    if json_to is not None:
        write(Path(json_to), json.dumps(record, indent=2) + "\n")


def write(path: Path, text: str) -> None:
    """Raises ConfigError if it cannot be written."""
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from error


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """The first column is text, the others are numbers. As wide as its content when not on a terminal."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def spread(runs: Runs, digits: int = 1) -> str:
    """Median, and the smallest and largest if there are several."""
    text = f"{runs.median:,.{digits}f}"
    if len(runs.values) == 1:
        return text
    return f"{text} ({runs.low:,.{digits}f}..{runs.high:,.{digits}f})"


def share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"
