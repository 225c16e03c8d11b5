"""Damaged and hostile GGUF files: each a LoadError that names the file and the key or tensor."""

from __future__ import annotations

import re
from pathlib import Path

import gguf
import numpy as np
import pytest

from fourfold.errors import LoadError, ModelNotFoundError
from fourfold.weights.gguf import open_gguf
from fourfold.weights.open import open_checkpoint

from . import raw_gguf as raw
from .raw_gguf import File, Tensor

F32_TENSOR = [Tensor("t", (8,))]
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 98362432\n"


def nested(depth: int) -> bytes:
    return (
        raw.string("k")
        + b"\x09\0\0\0"
        + (b"\x09\0\0\0" + (1).to_bytes(8, "little")) * depth
        + b"\x04\0\0\0"
        + bytes(8)
    )


CASES: dict[str, tuple[bytes, str]] = {
    "empty file": (b"", "too short for a GGUF file: needs at least 24 bytes, has 0"),
    "text": (b"Not Found" + b" " * 100, r"not a GGUF file: it starts with b'Not '"),
    "LFS pointer": (LFS, "Git LFS pointer.*git lfs pull"),
    "version 1": (File(version=1).bytes(), "GGUF version 1, which is obsolete"),
    "version 4": (File(version=4).bytes(), "GGUF version 4; versions 2 and 3 are supported"),
    "version 0": (File(version=0).bytes(), "GGUF version 0; versions 2 and 3"),
    "big-endian": (File(version=0x03000000).bytes(), "big-endian GGUF"),
    "2^60 tensors": (
        File(tensor_count=2**60).bytes(),
        rf"claims 0 key-values and {2**60} tensors, which need at least .* bytes, but the file has 32",
    ),
    "2^60 keys": (File(kv_count=2**60).bytes(), f"claims {2**60} key-values"),
    "2^64-1 of both": (File(kv_count=2**64 - 1, tensor_count=2**64 - 1).bytes(), f"{2**64 - 1} tensors"),
    "one key too many": (
        File([raw.pair("a", raw.UINT32, 1)], kv_count=2, data=bytes(64)).bytes(),
        "key 1 is empty",
    ),
    "key of 2^60 bytes": (
        File([(2**60).to_bytes(8, "little")], data=bytes(64), kv_count=1).bytes(),
        f"key 0 is {2**60} bytes long; at most 65535",
    ),
    "key not UTF-8": (File([raw.pair(b"\xff\xfe", raw.UINT32, 1)]).bytes(), "key 0 is not UTF-8"),
    "key of control characters": (
        File([raw.pair("a\x1b[2J", raw.UINT32, 1)]).bytes(),
        r"key 0 holds characters that cannot be printed: 'a\\x1b\[2J'",
    ),
    "key twice": (File([raw.pair("a.b", raw.UINT32, 1)] * 2).bytes(), r"key a\.b appears twice"),
    "unknown value type": (
        File([raw.string("a.b") + b"\x0d\0\0\0" + bytes(16)]).bytes(),
        r"a\.b has value type 13; 0 to 12",
    ),
    "bool of 2": (
        File([raw.string("flag") + b"\x07\0\0\0\x02"]).bytes(),
        "flag must be true .1. or false .0., but is 2",
    ),
    "string of 2^60 bytes": (
        File([raw.string("name") + b"\x08\0\0\0" + (2**60).to_bytes(8, "little")]).bytes(),
        rf"name needs {2**60 + 48} bytes, but the file has \d+",
    ),
    "string not UTF-8": (File([raw.pair("name", raw.STRING, b"\xc3(")]).bytes(), "name is not UTF-8"),
    "array of 2^60 numbers": (
        File([raw.array("scores", raw.FLOAT32, [1.0], claimed=2**60)]).bytes(),
        f"scores claims {2**60} elements",
    ),
    "array of 2^60 strings": (
        File([raw.array("tokens", raw.STRING, ["a"], claimed=2**60)]).bytes(),
        f"tokens claims {2**60} elements",
    ),
    "array a little too long": (
        File([raw.array("scores", raw.FLOAT64, [1.0] * 4, claimed=20)]).bytes(),
        "scores claims 20 elements, which need at least 214 bytes",
    ),
    "string array cut": (
        File([raw.array("tokens", raw.STRING, ["a"], claimed=2) + (1000).to_bytes(8, "little")]).bytes(),
        r"the 2 strings of tokens need 10\d\d bytes or more, but the file has 96",
    ),
    "string in an array of 2^60": (
        File([raw.array("tokens", raw.STRING, [], claimed=2) + (2**60).to_bytes(8, "little") * 3]).bytes(),
        "the 2 strings of tokens need",
    ),
    "string in an array of 2^64-1": (
        File([raw.array("tokens", raw.STRING, [], claimed=2) + b"\xff" * 24]).bytes(),
        "the 2 strings of tokens need",
    ),
    "array of unknown type": (
        File([raw.string("a") + b"\x09\0\0\0\x63\0\0\0" + bytes(16)]).bytes(),
        "a is an array of value type 99",
    ),
    "bools of 2": (
        File([raw.string("a") + b"\x09\0\0\0\x07\0\0\0" + (2).to_bytes(8, "little") + b"\x01\x02"]).bytes(),
        "a must hold true .1. or false .0., but has 2",
    ),
    "arrays nested 5 deep": (File([nested(4)]).bytes(), "k nests arrays more than 4 deep"),
    "arrays nested 10000 deep": (File([nested(10000)]).bytes(), "k nests arrays more than 4 deep"),
    "2^60 nested arrays": (
        File([raw.string("k") + b"\x09\0\0\0\x09\0\0\0" + (2**60).to_bytes(8, "little")]).bytes(),
        f"k claims {2**60} elements",
    ),
    "alignment 0": (
        File([raw.pair("general.alignment", raw.UINT32, 0)]).bytes(),
        "general.alignment must be a power of two up to .*, but is 0",
    ),
    "alignment 24": (
        File([raw.pair("general.alignment", raw.UINT32, 24)]).bytes(),
        "alignment must be .* but is 24",
    ),
    "alignment 2^31": (File([raw.pair("general.alignment", raw.UINT32, 2**31)]).bytes(), "but is 2147483648"),
    "alignment text": (File([raw.pair("general.alignment", raw.STRING, "32")]).bytes(), "but is '32'"),
    "alignment bool": (File([raw.pair("general.alignment", raw.BOOL, True)]).bytes(), "but is True"),
    "tensor twice": (File(tensors=F32_TENSOR * 2, data=bytes(64)).bytes(), "tensor t appears twice"),
    "tensor without a name": (
        File(tensors=[Tensor("", (8,))], data=bytes(64)).bytes(),
        "the name of tensor 0 is empty",
    ),
    "tensor of no dimensions": (
        File(tensors=[Tensor("t", ())], data=bytes(64)).bytes(),
        "tensor t has 0 dimensions",
    ),
    "tensor of 5 dimensions": (
        File(tensors=[Tensor("t", (1, 1, 1, 1, 1))], data=bytes(64)).bytes(),
        "tensor t has 5 dimensions; 1 to 4",
    ),
    "dimension 0": (
        File(tensors=[Tensor("t", (8, 0))], data=bytes(64)).bytes(),
        r"tensor t has a dimension of 0",
    ),
    "dimensions of 2^60": (
        File(tensors=[Tensor("t", (2**60, 2**60, 2**60))], data=bytes(64)).bytes(),
        f"tensor t ends at byte .*{4 * 2**180 + 96} bytes",
    ),
    "product that wraps to 32 bytes": (
        File(tensors=[Tensor("t", (2**32, 2**32 + 8))], data=bytes(64)).bytes(),
        "tensor t ends at byte",
    ),
    "row not a multiple of the block": (
        File(tensors=[Tensor("t", (48, 2), 3)], data=bytes(64)).bytes(),
        "tensor t has rows of 48 elements, which is not a multiple of the 32 that a block of Q4_1",
    ),
    "unknown type": (
        File(tensors=[Tensor("t", (8,), 250)], data=bytes(64)).bytes(),
        "tensor t has type 250, which is",
    ),
    "removed type": (
        File(tensors=[Tensor("t", (32,), 4)], data=bytes(64)).bytes(),
        "tensor t has type 4, which is",
    ),
    "offset not aligned": (
        File(tensors=[Tensor("t", (8,), 0, 8)], data=bytes(64)).bytes(),
        "tensor t starts at offset 8, which is not a multiple of 32",
    ),
    "offset past the end": (
        File(tensors=[Tensor("t", (8,), 0, 2**60)], data=bytes(64)).bytes(),
        rf"tensor t ends at byte \d+, so the file needs {2**60 + 96} bytes, but it has 128",
    ),
    "offset that wraps": (
        File(tensors=[Tensor("t", (8,), 0, 2**64 - 32)], data=bytes(64)).bytes(),
        f"needs {2**64 + 64} bytes",
    ),
    "overlap": (
        File(tensors=[Tensor("a", (16,)), Tensor("b", (8,), 0, 32)], data=bytes(64)).bytes(),
        r"tensors a \(bytes 96 to 160\) and b \(from byte 128\) overlap",
    ),
    "same place": (
        File(tensors=[Tensor("a", (8,)), Tensor("b", (8,))], data=bytes(64)).bytes(),
        "tensors a .* and b .* overlap",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_hostile_file(case: str, tmp_path: Path) -> None:
    data, message = CASES[case]
    path = tmp_path / "hostile.gguf"
    path.write_bytes(data)
    with pytest.raises(LoadError, match=message) as caught:
        open_gguf(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_text_that_is_not_utf8_in_an_array_is_found_when_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(File([raw.array("tokens", raw.STRING, ["ok", b"\xff"])]).bytes())
    tokens = open_gguf(path).metadata["tokens"]
    with pytest.raises(LoadError, match=r"m\.gguf: element 1 of tokens is not UTF-8"):
        tokens.tolist()


def real_file(path: Path) -> bytes:
    """A small model as the gguf package writes it."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list([f"token{number}" for number in range(500)])
    writer.add_token_scores([0.5] * 500)
    rng = np.random.default_rng(0)
    for number in range(20):
        writer.add_tensor(f"blk.{number}.w", rng.standard_normal((32, 64)).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


@pytest.mark.parametrize("share", [0.001, 0.01, 0.1, 0.5, 0.999])
def test_truncated_file_gives_needed_and_real_size(share: float, tmp_path: Path) -> None:
    """B73. In the data the needed size is the whole one; in the header it is what the next value needs."""
    path = tmp_path / "m.gguf"
    whole = real_file(path)
    cut = int(len(whole) * share)
    path.write_bytes(whole[:cut])
    with pytest.raises(LoadError) as caught:
        open_gguf(path)
    numbers = [int(each) for each in re.findall(r"\d+", str(caught.value).removeprefix(str(path)))]
    assert cut in numbers
    assert any(number > cut for number in numbers)
    if share >= 0.1:
        assert f"the file needs {len(whole)} bytes, but it has {cut}" in str(caught.value)


def test_every_truncation_is_a_load_error(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    file = File(
        [raw.array("tokens", raw.STRING, ["a", "bc"]), raw.pair("n", raw.UINT64, 7)],
        [Tensor("a", (8,)), Tensor("b", (32, 2), 3, 32)],
        bytes(72),
    )
    whole = file.bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(LoadError):
            open_gguf(path)
    path.write_bytes(whole)
    assert open_gguf(path).tensor("b").data.size == 40


def test_what_is_not_a_readable_file(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="cannot be read: No such file"):
        open_gguf(tmp_path / "none.gguf")
    with pytest.raises(LoadError, match="cannot be read: Is a directory"):
        open_gguf(tmp_path)
    with pytest.raises(ModelNotFoundError, match="no such file or directory"):
        open_checkpoint(tmp_path / "none.gguf")
