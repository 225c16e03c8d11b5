"""Kinds of flag values."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[KMGT]?)(?:i?B)?", re.IGNORECASE)
_POWER = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
MAX_BYTES = 2**50


def byte_size(text: str) -> int:
    """A number of bytes: 1073741824, 512M, 1.5G, 4GiB. K, M, G and T are powers of 1024."""
    match = _SIZE.fullmatch(text.strip())
    size = int(float(match["number"]) * 1024 ** _POWER[match["unit"].upper()]) if match else 0
    if not 1 <= size <= MAX_BYTES:
        raise click.BadParameter(f"{text!r} is not a size between 1 byte and 1024T, written like 512M or 4G")
    return size


def spelled(*names: str, meanings: Mapping[str, str | None], help: str) -> Callable[[F], F]:
    """An option whose values may be spelled in several ways; None means that nothing was chosen."""

    def meaning(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
        return None if value is None else meanings[value]

    choice = click.Choice(list(meanings), case_sensitive=False)
    return click.option(*names, type=choice, callback=meaning, help=help)
