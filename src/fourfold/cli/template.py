"""--chat-template takes a file or the Jinja source itself."""

from __future__ import annotations

from pathlib import Path

import click


def read_template(value: str | None) -> str | None:
    """The Jinja source that `value` is or names. Raises click.BadParameter if it is neither."""
    if value is None or "{" in value:
        return value
    try:
        return Path(value).expanduser().read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise click.BadParameter(
            f"{value!r} is neither a readable file ({error}) nor Jinja source (it has no brace)",
            param_hint="--chat-template",
        ) from error
