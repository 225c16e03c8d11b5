"""A checkpoint without tensor data, for configuration tests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fourfold.errors import LoadError
from fourfold.weights.source import RawTensor

Array = NDArray[np.float32]


class FakeSource:
    """metadata and fp32 arrays under the names a real file would have."""

    def __init__(
        self,
        kind: Literal["gguf", "hf"],
        metadata: Mapping[str, Any],
        tensors: Mapping[str, Array] | None = None,
    ) -> None:
        self.path = Path("model.gguf" if kind == "gguf" else "config.json")
        self.kind: Literal["gguf", "hf"] = kind
        self.metadata = metadata
        self._tensors = dict(tensors or {})

    def names(self) -> Iterable[str]:
        return self._tensors

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def tensor(self, name: str) -> RawTensor:
        if name not in self._tensors:
            raise LoadError(f"{self.path}: tensor {name} is missing")
        array = np.ascontiguousarray(self._tensors[name], np.float32)
        return RawTensor(name, array.shape, "F32", array.view(np.uint8).reshape(-1))
