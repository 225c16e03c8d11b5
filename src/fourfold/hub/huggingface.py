"""Models from the Hugging Face Hub, with the Hub client's own cache, token and offline switch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import huggingface_hub
from huggingface_hub import errors

from fourfold.errors import DownloadError, ModelNotFoundError
from fourfold.progress import Progress

MODEL_FILES = ["*.safetensors", "*.json", "*.model", "*.jinja", "merges.txt", "vocab.txt"]
SUBFOLDERS = ["*/*"]
"""Other formats of the same weights live there (onnx/, original/)."""

_SHARD = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


def fetch_model(repo: str, file: str | None, progress: Progress, offline: bool) -> Path:
    """The path of a GGUF file or of a snapshot folder of a safetensors model, downloaded if need be.

    file: a GGUF file of the repository, or a part of its name (`Q4_K_M`). None: the safetensors model, or
    the one GGUF file there is.
    Raises ModelNotFoundError (no such repository or file, no access, several GGUF files) and DownloadError
    (network).
    """
    progress(f"looking up {repo} on the Hugging Face Hub", 0)
    try:
        files, cached = _list_files(repo, offline)
        shards = choose_files(repo, files, file)
        progress(f"fetching {repo}", 0)
        if shards:
            paths = [huggingface_hub.hf_hub_download(repo, name, local_files_only=cached) for name in shards]
            return Path(paths[0])
        return Path(
            huggingface_hub.snapshot_download(
                repo, allow_patterns=MODEL_FILES, ignore_patterns=SUBFOLDERS, local_files_only=cached
            )
        )
    except ModelNotFoundError:
        raise
    except errors.GatedRepoError as error:
        raise ModelNotFoundError(
            f"{repo} is gated: accept its licence on https://huggingface.co/{repo}, then `hf auth login` "
            "or set HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"no repository {repo} on the Hugging Face Hub, or no access to it: check the name; "
            "for a private one `hf auth login` or set HF_TOKEN"
        ) from error
    except errors.EntryNotFoundError as error:
        raise ModelNotFoundError(_unreachable(repo, offline, error)) from error
    except Exception as error:
        # The Hub client's network errors come from requests, httpx or xet, depending on its version.
        raise DownloadError(_unreachable(repo, offline, error)) from error


def choose_files(repo: str, files: Sequence[str], wanted: str | None) -> list[str]:
    """The GGUF file to take (all shards of a split one, in order); none for the safetensors model."""
    ggufs: dict[str, list[str]] = {}
    for name in sorted(files):
        if name.endswith(".gguf") and "mmproj" not in name.lower():
            ggufs.setdefault(_SHARD.sub(".gguf", name), []).append(name)
    if wanted is None:
        if "config.json" in files and any(f.endswith(".safetensors") and "/" not in f for f in files):
            return []
        matches = list(ggufs)
    else:
        name = _SHARD.sub(".gguf", wanted)
        matches = [name] if name in ggufs else [known for known in ggufs if name.lower() in known.lower()]
    if len(matches) == 1:
        return ggufs[matches[0]]
    if matches:
        raise ModelNotFoundError(
            f"{repo} has several GGUF files, choose one as {repo}:FILE: {', '.join(matches)}"
        )
    if wanted is None:
        raise ModelNotFoundError(
            f"{repo} has neither config.json with safetensors nor a GGUF file; other formats are not read"
        )
    listing = f"it has {', '.join(ggufs)}" if ggufs else "it has no GGUF file"
    raise ModelNotFoundError(f"{repo} has no file {wanted!r}; {listing}")


def _list_files(repo: str, offline: bool) -> tuple[list[str], bool]:
    """Names of the files, and whether they are those of the cache (wanted, or the Hub is out of reach)."""
    if offline:
        return _cached_files(repo), True
    try:
        siblings = huggingface_hub.HfApi().model_info(repo, timeout=10).siblings
    except errors.HfHubHTTPError:
        raise
    except Exception as unreachable:
        try:
            return _cached_files(repo), True
        except errors.LocalEntryNotFoundError:
            raise unreachable from None
    return [sibling.rfilename for sibling in siblings or ()], False


def _cached_files(repo: str) -> list[str]:
    folder = Path(huggingface_hub.snapshot_download(repo, local_files_only=True))
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()]


def _unreachable(repo: str, offline: bool, error: Exception) -> str:
    cause = f"{type(error).__name__}: {error}".splitlines()[0]
    if offline:
        return (
            f"{repo} is not (wholly) in the Hugging Face cache and offline mode is on ({cause}); "
            "unset HF_HUB_OFFLINE or give a path"
        )
    constants = huggingface_hub.constants
    return (
        f"cannot fetch {repo} from the Hugging Face Hub ({cause}); tried {constants.ENDPOINT}/{repo} "
        f"and the cache in {constants.HF_HUB_CACHE}. Connect to the network, or give an alias or a path"
    )
