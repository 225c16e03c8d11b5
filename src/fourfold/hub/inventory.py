"""What is on this machine: aliases, models in the Hugging Face cache, built artefacts."""

from __future__ import annotations

from pathlib import Path

import msgspec

from fourfold.config import Environment
from fourfold.hub.aliases import known_aliases


class Entry(msgspec.Struct, frozen=True):
    """kind: "alias", "hub" or "artefact".  bytes: on disk; of an alias not fetched, what it will take.

    path: None if it is not on this machine.
    """

    kind: str
    name: str
    bytes: int
    path: Path | None
    about: str = ""


def inventory(environment: Environment) -> list[Entry]:
    """Everything known, sorted by kind and name."""
    return [*_aliases(environment), *_hub(), *_artefacts(environment)]


def _aliases(environment: Environment) -> list[Entry]:
    models = environment.model_dir
    return [
        Entry(
            "alias",
            alias.name,
            alias.size,
            alias.path(models) if alias.is_fetched(models) else None,
            f"{alias.title}; {alias.licence}",
        )
        for alias in known_aliases().values()
    ]


def _hub() -> list[Entry]:
    import huggingface_hub

    try:
        repos = huggingface_hub.scan_cache_dir().repos
    except huggingface_hub.CacheNotFound:
        return []
    return sorted(
        (
            Entry("hub", repo.repo_id, repo.size_on_disk, Path(repo.repo_path))
            for repo in repos
            if repo.repo_type == "model"
        ),
        key=lambda entry: entry.name,
    )


def _artefacts(environment: Environment) -> list[Entry]:
    folder = environment.artefact_dir
    if not folder.is_dir():
        return []
    return [
        Entry(
            "artefact",
            path.name,
            sum(f.stat().st_size for f in (path, *path.rglob("*")) if f.is_file()),
            path,
        )
        for path in sorted(folder.iterdir())
    ]
