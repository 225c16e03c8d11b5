"""Named raw blocks: what every checkpoint reader yields and everything after it consumes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray


class RawTensor(msgspec.Struct, frozen=True):
    """A tensor as the file holds it.

    shape: row-major, linears are [out_features, in_features] (GGUF's dims reversed).
    format: a name of the quant registry: "F32", "F16", "BF16", "Q4_0", ...
    data: uint8 [nbytes], read-only view of the mapped file; blocks run along the last dimension.
    """

    name: str
    shape: tuple[int, ...]
    format: str
    data: NDArray[np.uint8]


class WeightSource(Protocol):
    """A checkpoint: GGUF file, or Hugging Face directory with one or more safetensors files."""

    @property
    def path(self) -> Path: ...
    @property
    def kind(self) -> Literal["gguf", "hf"]: ...
    @property
    def metadata(self) -> Mapping[str, Any]:
        """GGUF key-values, or the parsed config.json."""
        ...

    def names(self) -> Iterable[str]: ...
    def __contains__(self, name: str) -> bool: ...
    def tensor(self, name: str) -> RawTensor:
        """Raises LoadError naming the file and the tensor when it is missing."""
        ...
