"""Small checkpoints in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fourfold.build.make import WeightNames
from fourfold.errors import LoadError
from fourfold.models.binding import Binding
from fourfold.quant.registry import FORMATS, get_format
from fourfold.weights.source import RawTensor


class Memory:
    """Tensors by name: (format, array) encoded, or RawTensor as it is."""

    path = Path("memory.gguf")
    kind: Literal["gguf", "hf"] = "gguf"
    metadata: Mapping[str, Any] = {}

    def __init__(self, tensors: Mapping[str, RawTensor | tuple[str, NDArray[np.float32]]]) -> None:
        self._tensors = {
            name: value if isinstance(value, RawTensor) else encoded(name, *value)
            for name, value in tensors.items()
        }

    def names(self) -> Iterable[str]:
        return self._tensors

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def tensor(self, name: str) -> RawTensor:
        if name not in self._tensors:
            raise LoadError(f"{self.path}: tensor {name} is missing")
        return self._tensors[name]


def encoded(name: str, format_name: str, array: NDArray[np.float32]) -> RawTensor:
    data = np.ascontiguousarray(get_format(format_name).encode(array)).view(np.uint8).reshape(-1)
    return RawTensor(name, array.shape, format_name, data)


def random_tensor(name: str, format_name: str, shape: tuple[int, int], seed: int = 0) -> RawTensor:
    """Encoded random numbers; for formats that are only read, random blocks whose numbers are all finite."""
    rng, block_format = np.random.default_rng(seed), FORMATS[format_name]
    if block_format.encoder is not None:
        return encoded(name, format_name, rng.standard_normal(shape).astype(np.float32))
    while True:
        data = rng.integers(0, 256, block_format.nbytes(shape), dtype=np.uint8)
        blocks = data.reshape(-1, block_format.block_bytes)
        for _ in range(200):
            values = block_format.decode(data, shape).reshape(len(blocks), -1)
            bad = ~(np.abs(values) < 1e4).all(1)
            if not bad.any():
                return RawTensor(name, shape, format_name, data)
            blocks[bad] = rng.integers(0, 256, (int(bad.sum()), block_format.block_bytes), dtype=np.uint8)


def small() -> tuple[Memory, WeightNames]:
    """Two matrices, one of them named twice (tied), and two vectors."""
    rng = np.random.default_rng(0)
    source = Memory(
        {
            "embed": ("Q4_1", rng.standard_normal((40, 64)).astype(np.float32)),
            "proj": ("Q6_K", rng.standard_normal((24, 256)).astype(np.float32)),
            "norm": ("F32", rng.standard_normal(64).astype(np.float32)),
            "bias": ("F16", rng.standard_normal(24).astype(np.float32)),
        }
    )
    names = WeightNames(
        {"embed.weight": Binding("embed"), "head.weight": Binding("embed"), "proj.weight": Binding("proj")},
        {"norm.weight": Binding("norm", add=1.0), "proj.bias": Binding("bias")},
    )
    return source, names
