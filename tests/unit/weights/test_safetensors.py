"""safetensors: what is read is what the safetensors package wrote; damaged files are LoadErrors (B76)."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fourfold.errors import LoadError
from fourfold.quant import get_format
from fourfold.weights.safetensors import open_safetensors

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 98362432\n"


def build(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(shape: Any, start: Any, stop: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def test_reads_what_the_safetensors_package_writes(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    torch.manual_seed(0)
    x = torch.randn(6, 10)
    tensors = {
        "f32": x, "f16": x.half(), "bf16": x.bfloat16(), "e4m3": x.to(torch.float8_e4m3fn),
        "e5m2": x.to(torch.float8_e5m2), "scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4),
    }  # fmt: skip
    save_file(tensors, path, metadata={"format": "pt"})
    file = open_safetensors(path)
    assert set(file.names()) == set(tensors)
    assert file.notes == {"format": "pt"}
    for name, want in tensors.items():
        raw = file.tensor(name)
        assert raw.shape == tuple(want.shape)
        assert not raw.data.flags.writeable or raw.data.size == 0
        assert np.array_equal(get_format(raw.format).decode(raw.data, raw.shape), want.float().numpy())


def test_integer_tensors_are_listed_but_are_no_weights(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    kinds = {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8}
    save_file({name: torch.ones(2, 3).to(kind) for name, kind in kinds.items()}, path)
    file = open_safetensors(path)
    for name in kinds:
        raw = file.tensor(name)
        assert raw.format == name
        with pytest.raises(LoadError, match=f"{name} holds plain integers"):
            get_format(raw.format)


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(2)}, path)
    with pytest.raises(LoadError, match=r"model\.safetensors: tensor b is missing; the file has 1 tensors"):
        open_safetensors(path).tensor("b")


CASES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "too short for a safetensors file: needs at least 10 bytes, has 0"),
    "LFS pointer": (LFS, "Git LFS pointer.*git lfs pull"),
    "header length 2^40": (build({}, length=2**40), f"header claims {2**40} bytes; at most 100000000"),
    "header length 2^64-1": (build({}, length=2**64 - 1), f"header claims {2**64 - 1} bytes"),
    "header cut": (build({}, length=100), "header ends at byte 108, but the file has 10"),
    "pickle": (b"\x80\x02" + bytes(100), "header ends at byte|header claims"),
    "web page": (build(b"<html></html>"), "its header starts with b'<'"),
    "not JSON": (build(b"{'a': 1}"), "header: is not valid JSON"),
    "not UTF-8": (build(b'{"\xff": 1}'), "header: is not UTF-8"),
    "array": (build(b"{}[]"), "header: is not valid JSON"),
    "NaN": (build(b'{"a": NaN}'), "header: holds NaN"),
    "deep": (build(b'{"a": ' + b"[" * 100_000), "header: nests too deeply"),
    "number of a million digits": (build(b'{"a": ' + b"9" * 1_000_000 + b"}"), "header: is not valid JSON"),
    "tensor twice": (
        build(b'{"a": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}, "a": {}}'),
        "header: key 'a' appears twice",
    ),
    "dtype twice": (build(b'{"a": {"dtype": "U8", "dtype": "F32"}}'), "key 'dtype' appears twice"),
    "entry is a list": (build({"a": []}), "tensor a must have dtype, shape and data_offsets"),
    "entry without shape": (
        build({"a": {"dtype": "F32", "data_offsets": [0, 0]}}),
        "tensor a must have dtype",
    ),
    "unknown dtype": (
        build({"a": entry([1], 0, 4, "Q4")}, bytes(4)),
        "tensor a has dtype 'Q4'; known are F64",
    ),
    "dtype a list": (build({"a": entry([1], 0, 4, [])}, bytes(4)), r"tensor a has dtype \[\]"),
    "shape not a list": (build({"a": entry("12", 0, 4)}, bytes(4)), "tensor a has shape '12'"),
    "shape of floats": (build({"a": entry([1.0], 0, 4)}, bytes(4)), r"tensor a has shape \[1\.0\]"),
    "shape of bools": (build({"a": entry([True], 0, 4)}, bytes(4)), r"tensor a has shape \[True\]"),
    "negative dimension": (build({"a": entry([-1, -1], 0, 4)}, bytes(4)), r"tensor a has shape \[-1, -1\]"),
    "dimension of 2^70": (
        build({"a": entry([2**70, 0], 0, 0)}),
        r"tensor a has shape \[1180591620717411303424, 0\]",
    ),
    "1000 dimensions": (build({"a": entry([2**62] * 1000, 0, 4)}, bytes(4)), "list of up to 32 integers"),
    "product that wraps": (build({"a": entry([2**32, 2**32], 0, 0)}), r"tensor a, F32 .* needs .* hold 0"),
    "offsets text": (build({"a": entry([1], "0", 4)}, bytes(4)), r"tensor a has data_offsets \['0', 4\]"),
    "offsets negative": (build({"a": entry([1], -4, 0)}, bytes(4)), r"tensor a has data_offsets \[-4, 0\]"),
    "offsets swapped": (
        build({"a": entry([1], 4, 0)}, bytes(4)),
        "needs 4 bytes, but data_offsets .* hold -4",
    ),
    "offsets too long": (
        build({"a": entry([1], 0, 8)}, bytes(8)),
        "needs 4 bytes, but data_offsets .* hold 8",
    ),
    "past the end": (build({"a": entry([8], 0, 32)}, bytes(4)), r"need \d+ bytes, but the file has \d+"),
    "overlap": (
        build({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, bytes(12)),
        r"tensor b starts at byte \d+, which overlaps a \(it ends at \d+\)",
    ),
    "same place": (build({"a": entry([1], 0, 4), "b": entry([1], 0, 4)}, bytes(4)), "tensor b .* overlaps a"),
    "hole": (
        build({"a": entry([1], 0, 4), "b": entry([1], 8, 12)}, bytes(12)),
        "tensor b starts at byte .*leaves a hole after a",
    ),
    "hole at the start": (
        build({"a": entry([1], 4, 8)}, bytes(8)),
        "tensor a .* leaves a hole after the header",
    ),
    "bytes left over": (build({"a": entry([1], 0, 4)}, bytes(8)), "has 4 bytes after its last tensor"),
    "notes not strings": (build({"__metadata__": {"a": 1}}), "__metadata__ must be an object of strings"),
    "name of control characters": (
        build({"a\x1b[2J": entry([1], 0, 4)}, bytes(4)),
        r"tensor name 'a\\x1b\[2J'",
    ),
    "name of half a character": (build(b'{"\\ud800": {}}'), r"tensor name '\\ud800'"),
}


@pytest.mark.parametrize("case", CASES)
def test_hostile_file(case: str, tmp_path: Path) -> None:
    data, message = CASES[case]
    path = tmp_path / "model-00001-of-00002.safetensors"
    path.write_bytes(data)
    with pytest.raises(LoadError, match=message) as caught:
        open_safetensors(path)
    assert str(caught.value).startswith(f"{path}: ")
    str(caught.value).encode()


def test_every_truncation_is_a_load_error(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    whole = build({"a": entry([3], 0, 12), "b": entry([2, 2], 12, 28)}, bytes(28))
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(LoadError):
            open_safetensors(path)
    path.write_bytes(whole)
    assert open_safetensors(path).tensor("b").shape == (2, 2)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.999])
def test_cut_shard_gives_needed_and_real_size(share: float, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(1000, 10)}, path)
    whole = path.read_bytes()
    cut = int(len(whole) * share)
    path.write_bytes(whole[:cut])
    with pytest.raises(
        LoadError, match=f"is cut short: its tensors need {len(whole)} bytes, but the file has {cut}"
    ):
        open_safetensors(path)


def test_header_padded_with_spaces_and_unordered(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    header = json.dumps({"b": entry([1], 4, 8), "a": entry([1], 0, 4)}).encode() + b"   "
    path.write_bytes(build(header, np.array([1, 2], np.float32).tobytes()))
    file = open_safetensors(path)
    assert file.tensor("a").data.view("<f4").tolist() == [1]
    assert file.tensor("b").data.view("<f4").tolist() == [2]
