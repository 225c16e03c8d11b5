"""`fourfold pull NAME`."""

from __future__ import annotations

import sys

import click

from fourfold.cli.base import Command
from fourfold.hub import ResolvedModel, resolve
from fourfold.progress import ReportedProgress


def fetch(name: str) -> ResolvedModel:
    """Resolves `name` with progress on standard error, and shows the licence notice of what was fetched."""
    with ReportedProgress() as progress:
        found = resolve(name, progress=progress)
    if found.notice:
        print(found.notice, file=sys.stderr)
    return found


@click.command(cls=Command)
@click.argument("name")
def pull(name: str) -> None:
    """Fetch the model NAME (alias or Hub id) if it is not here yet, and print its path."""
    click.echo(fetch(name).path)
