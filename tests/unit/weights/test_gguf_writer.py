"""The GGUF writer: what it writes is what the gguf package and the project's own reader read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize

from fourfold.quant import get_format
from fourfold.weights.gguf import open_gguf
from fourfold.weights.gguf_writer import write_gguf
from fourfold.weights.source import RawTensor


def tensor(name: str, array: np.ndarray, kind: str) -> RawTensor:
    return RawTensor(name, array.shape, kind, get_format(kind).encode(array).reshape(-1))


METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "a.count": 3,
    "a.negative": -3,
    "a.large": 2**40,
    "a.eps": 1e-5,
    "a.flag": True,
    "a.tiny": np.uint8(7),
    "tokens": ["a", "ü", ""],
    "scores": np.array([0.5, -1], np.float32),
    "types": [1, 2, 3],
    "flags": [True, False],
}


@pytest.mark.parametrize("alignment", [32, 64, 4096])
def test_the_gguf_package_reads_it(tmp_path: Path, alignment: int) -> None:
    path = tmp_path / "m.gguf"
    rng = np.random.default_rng(0)
    arrays = {
        kind: rng.standard_normal((3, 256)).astype(np.float32)
        for kind in ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q6_K")
    }
    arrays["F32"] = arrays["F32"][:, :5].copy()
    tensors = [tensor(f"t.{kind}", array, kind) for kind, array in arrays.items()]
    write_gguf(path, METADATA, tensors, alignment)

    reader = gguf.GGUFReader(path)
    assert reader.alignment == alignment
    for key, value in METADATA.items():
        want = value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value
        assert reader.fields[key].contents() == (pytest.approx(want, rel=1e-7) if key == "a.eps" else want)
    assert reader.fields["a.tiny"].types == [gguf.GGUFValueType.UINT8]
    assert [each.name for each in reader.tensors] == [each.name for each in tensors]

    ours = open_gguf(path)
    for each in reader.tensors:
        kind = each.tensor_type.name
        assert tuple(each.shape.tolist()) == arrays[kind].shape[::-1]
        raw = ours.tensor(each.name)
        decoded = get_format(kind).decode(raw.data, raw.shape)
        assert np.array_equal(decoded, dequantize(each.data, each.tensor_type).reshape(arrays[kind].shape))


def test_round_trip_through_our_own_reader(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(
        path, {**METADATA, "nested": [[1, 2], [3]]}, [tensor("x", np.ones((2, 32), np.float32), "Q8_0")]
    )
    metadata = open_gguf(path).metadata
    for key, value in METADATA.items():
        got = metadata[key]
        if key == "tokens":
            assert got.tolist() == value
        elif isinstance(value, (list, np.ndarray)):
            assert list(got) == list(value)
        else:
            assert got == (pytest.approx(value, rel=1e-7) if key == "a.eps" else value)
    assert [each.tolist() for each in metadata["nested"]] == [[1, 2], [3]]


@pytest.mark.parametrize(
    "metadata, message",
    [
        ({"k": None}, "key k: GGUF cannot hold a NoneType"),
        ({"k": 2**64}, "key k: integers from .* do not fit 64 bits"),
        ({"k": []}, "key k: an array must hold elements of one GGUF type"),
        ({"k": ["a", 1]}, "key k: an array must hold elements of one GGUF type"),
        ({"k": np.zeros((2, 2))}, "key k: numpy arrays must have one dimension"),
        ({"k": np.zeros(2, np.complex64)}, "key k: GGUF cannot hold an array of complex64"),
        ({"k": np.float16(1)}, "key k: GGUF cannot hold a float16"),
    ],
)
def test_values_gguf_cannot_hold(tmp_path: Path, metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        write_gguf(tmp_path / "m.gguf", metadata, [])
    assert list(tmp_path.iterdir()) == []


def test_tensors_gguf_cannot_hold(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    good = tensor("x", np.ones((2, 32), np.float32), "Q8_0")
    cases = [
        ([good, good], "tensor x is given twice"),
        ([RawTensor("f8", (4,), "F8_E4M3", np.zeros(4, np.uint8))], "tensor f8: GGUF has no type F8_E4M3"),
        ([RawTensor("s", (), "F32", np.zeros(4, np.uint8))], "tensor s: GGUF holds 1 to 4 dimensions"),
        ([RawTensor("n", (2, 32), "Q8_0", np.zeros(67, np.uint8))], "tensor n: 67 bytes are not Q8_0"),
    ]
    for tensors, message in cases:
        with pytest.raises(ValueError, match=message):
            write_gguf(path, {}, tensors)
    with pytest.raises(ValueError, match="alignment must be a power of two"):
        write_gguf(path, {}, [], alignment=48)


def test_an_interrupted_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.gguf"

    def fail(source: object, target: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("fourfold.weights.gguf_writer.os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_gguf(path, {"a": 1}, [])
    assert list(tmp_path.iterdir()) == []
