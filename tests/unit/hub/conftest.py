"""Small wheels in a folder, and a pip that sees only that folder."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from fourfold.hub.aliases import Alias, Member, Package

CONTENT = bytes(range(256)) * 4096
CUT = 400_000
LICENCE = b"licence text"


def write_wheel(folder: Path, name: str, files: dict[str, bytes]) -> Path:
    """A wheel as pip accepts one: the files, and a dist-info of three."""
    stem = name.replace("-", "_")
    info = f"{stem}-1.0.dist-info"
    path = folder / f"{stem}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, data in files.items():
            archive.writestr(member, data)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "index"
    folder.mkdir()
    write_wheel(
        folder, "toy-model", {"toy/part0": CONTENT[:CUT], "toy/LICENSE": LICENCE, "toy/__init__.py": b"1/0"}
    )
    write_wheel(folder, "toy-model-rest", {"toy/part1": CONTENT[CUT:]})
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def toy() -> Alias:
    """A model in two packages, as gemma3-270m is."""
    return Alias(
        name="toy",
        title="Toy",
        licence="Toy Terms",
        notice="Toy is provided under the Toy Terms",
        file="toy.gguf",
        size=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        packages=(
            Package("toy-model", "1.0", 1000, (Member("toy/part0", CUT),), ("toy/LICENSE",)),
            Package("toy-model-rest", "1.0", 1000, (Member("toy/part1", len(CONTENT) - CUT),)),
        ),
    )
