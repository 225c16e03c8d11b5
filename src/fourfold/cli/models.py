"""`fourfold models`."""

from __future__ import annotations

import json

import click

from fourfold.cli.base import Command
from fourfold.config import Environment
from fourfold.hub.inventory import Entry, inventory


@click.command(cls=Command)
@click.option(
    "--json", "as_json", is_flag=True, help="A JSON list: kind, name, bytes, path (null: not here), about."
)
def models(as_json: bool) -> None:
    """List known aliases, models in the Hugging Face cache, and artefacts built for this machine."""
    entries = inventory(Environment.read())
    if as_json:
        click.echo(json.dumps([_record(entry) for entry in entries], indent=2))
        return
    rows = [("KIND", "NAME", "SIZE", "WHERE"), *(_row(entry) for entry in entries)]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for kind, name, size, where in rows:
        click.echo(f"{kind:<{widths[0]}}  {name:<{widths[1]}}  {size:>{widths[2]}}  {where}")


def _record(entry: Entry) -> dict[str, object]:
    return {
        "kind": entry.kind,
        "name": entry.name,
        "bytes": entry.bytes,
        "path": str(entry.path) if entry.path else None,
        "about": entry.about,
    }


def _row(entry: Entry) -> tuple[str, str, str, str]:
    where = str(entry.path) if entry.path else "not fetched"
    return (
        entry.kind,
        entry.name,
        f"{entry.bytes / 1e6:.1f} MB",
        f"{where} ({entry.about})" if entry.about else where,
    )
