"""Small valid files to start from. `python fuzz/seeds.py DIR` writes them to DIR/gguf and DIR/safetensors."""

from __future__ import annotations

import json
import struct
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from fourfold.quant.registry import FORMATS
from fourfold.weights.gguf_writer import write_gguf
from fourfold.weights.source import RawTensor


def gguf_seeds() -> list[bytes]:
    rng = np.random.default_rng(0)
    metadata = {
        "general.architecture": "llama",
        "general.alignment": np.uint32(32),
        "n": 3, "i": -3, "big": 2**40, "f": 0.5, "d": np.float64(0.25), "b": True, "u8": np.uint8(1),
        "tokenizer.ggml.tokens": ["a", "bc", "é"],
        "tokenizer.ggml.scores": np.array([0.5, 1], np.float32),
        "flags": [True, False],
        "nested": [[1, 2], [3]],
    }  # fmt: skip
    tensors = []
    for spec in FORMATS.values():
        if spec.ggml_type is not None:
            shape = (2, spec.block)
            data = rng.integers(0, 256, spec.nbytes(shape), dtype=np.uint8)
            tensors.append(RawTensor(f"t.{spec.name}", shape, spec.name, data))
    cases: list[tuple[dict[str, Any], list[RawTensor]]] = [
        (metadata, tensors[:1]),
        (metadata, tensors),
        ({}, []),
        ({"split.count": np.uint16(2), "split.no": np.uint16(0)}, tensors[:2]),
    ]
    files = []
    with tempfile.TemporaryDirectory() as folder:
        for pairs, members in cases:
            path = Path(folder) / "seed"
            write_gguf(path, pairs, members)
            files.append(path.read_bytes())
    return files


def safetensors_seeds() -> list[bytes]:
    def build(tensors: dict[str, tuple[str, list[int], int]], notes: dict[str, str] | None) -> bytes:
        header: dict[str, object] = {} if notes is None else {"__metadata__": notes}
        end = 0
        for name, (dtype, shape, nbytes) in tensors.items():
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + nbytes]}
            end += nbytes
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + bytes(index % 256 for index in range(end))

    return [
        build({}, None),
        build({"a": ("F32", [2, 3], 24)}, {"format": "pt"}),
        build({"a": ("F16", [3], 6), "b": ("BF16", [1, 2], 4), "c": ("F8_E4M3", [5], 5)}, None),
        build({"a": ("I64", [], 8), "b": ("F8_E5M2", [0, 4], 0), "c": ("F64", [1], 8)}, {}),
    ]


SEEDS = {"gguf": gguf_seeds, "safetensors": safetensors_seeds}


def main() -> None:
    for name, make in SEEDS.items():
        folder = Path(sys.argv[1]) / name
        folder.mkdir(parents=True, exist_ok=True)
        for number, data in enumerate(make()):
            (folder / f"seed-{number}").write_bytes(data)


if __name__ == "__main__":
    main()
