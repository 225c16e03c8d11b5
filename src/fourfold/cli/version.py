"""`fourfold version`."""

from __future__ import annotations

import platform

import click

from fourfold._version import __version__
from fourfold.cli.base import Command


@click.command(cls=Command)
def version() -> None:
    """Print the version, and what it runs on."""
    click.echo(
        f"fourfold {__version__} (Python {platform.python_version()}, "
        f"{platform.system()} {platform.machine()})"
    )
