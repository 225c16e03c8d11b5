"""Hugging Face checkpoint directories: config.json beside one or more safetensors files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from fourfold.errors import LoadError
from fourfold.weights.json_file import read_object
from fourfold.weights.metadata import Metadata
from fourfold.weights.safetensors import SafetensorsFile, open_safetensors
from fourfold.weights.source import RawTensor

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.00.pth")


class HFCheckpoint:
    """A WeightSource over a Hugging Face directory."""

    kind: Literal["hf"] = "hf"

    def __init__(self, path: Path, config: Metadata, where: Mapping[str, SafetensorsFile]) -> None:
        self._path = path
        self._config = config
        self._where = where

    @property
    def path(self) -> Path:
        return self._path

    @property
    def metadata(self) -> Metadata:
        """The parsed config.json."""
        return self._config

    def names(self) -> Iterable[str]:
        return self._where.keys()

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def tensor(self, name: str) -> RawTensor:
        """Raises LoadError naming the directory and the tensor when it is missing."""
        file = self._where.get(name)
        if file is None:
            raise LoadError(
                f"{self._path}: tensor {name} is missing; the checkpoint has {len(self._where)} tensors"
            )
        return file.tensor(name)


def open_hf(path: str | Path) -> HFCheckpoint:
    """Opens a directory with config.json and model.safetensors, or its shards and their index.

    Raises LoadError naming the file and what is wrong with it or missing.
    """
    path = Path(path)
    if not path.is_dir():
        raise LoadError(f"{path}: is not a directory")
    config_path = path / CONFIG
    if not config_path.exists():
        raise LoadError(f"{path}: has no {CONFIG}; a Hugging Face checkpoint needs one beside its weights")
    config = Metadata(config_path, read_object(config_path))
    if (path / INDEX).exists():
        return HFCheckpoint(path, config, _open_sharded(path))
    if (path / SINGLE).exists():
        file = open_safetensors(path / SINGLE)
        return HFCheckpoint(path, config, dict.fromkeys(file.names(), file))
    for name in _PICKLES:
        if (path / name).exists():
            raise LoadError(
                f"{path}: has only {name}, a pickle, which can run code when loaded and is not read; "
                f"convert it to safetensors (for example with save_pretrained(..., safe_serialization=True))"
            )
    raise LoadError(f"{path}: has neither {SINGLE} nor {INDEX}; the download may be incomplete")


def _plain_file_name(name: Any) -> bool:
    """No directory parts: an index must not lead out of its own directory."""
    return (
        isinstance(name, str)
        and name.isprintable()
        and "\\" not in name
        and name not in ("", ".", "..")
        and PurePosixPath(name).name == name
    )


def _open_sharded(path: Path) -> dict[str, SafetensorsFile]:
    index_path = path / INDEX
    weight_map: Any = read_object(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise LoadError(f"{index_path}: weight_map must be an object of tensor names and file names")
    files: dict[str, SafetensorsFile] = {}
    where: dict[str, SafetensorsFile] = {}
    for tensor, name in weight_map.items():
        if not _plain_file_name(name):
            raise LoadError(
                f"{index_path}: weight_map[{tensor!r}] must be the name of a file beside it, got {name!r:.80}"
            )
        file = files.get(name)
        if file is None:
            if not (path / name).exists():
                raise LoadError(
                    f"{index_path}: names shard {name}, which is missing; download it beside the index"
                )
            file = files[name] = open_safetensors(path / name)
        if tensor not in file:
            raise LoadError(f"{index_path}: says tensor {tensor} is in {name}, but it is not")
        where[tensor] = file
    return where
