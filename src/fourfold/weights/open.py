"""One entry for every kind of checkpoint."""

from __future__ import annotations

from pathlib import Path

from fourfold.errors import LoadError, ModelNotFoundError
from fourfold.weights.source import WeightSource


def open_checkpoint(path: str | Path) -> WeightSource:
    """A GGUF file (first shard of a split one), or a Hugging Face directory.

    Raises ModelNotFoundError when nothing is there, LoadError when it cannot be read as a checkpoint.
    """
    # Imported here because either one brings in what the other does not need.
    path = Path(path)
    if path.is_dir():
        from fourfold.weights.hf import open_hf

        return open_hf(path)
    if not path.exists():
        raise ModelNotFoundError(f"{path}: no such file or directory")
    if path.suffix == ".safetensors":
        raise LoadError(
            f"{path}: give the directory that holds it and its config.json ({path.parent}), not the file"
        )
    from fourfold.weights.gguf import open_gguf

    return open_gguf(path)
