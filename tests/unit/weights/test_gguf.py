"""Good GGUF files: what is read is what the gguf package reads, and what it writes."""

from __future__ import annotations

import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize, quantize

from fourfold.errors import LoadError
from fourfold.quant import get_format
from fourfold.weights.gguf import open_gguf
from fourfold.weights.metadata import StringArray
from fourfold.weights.open import open_checkpoint

from . import raw_gguf as raw

VOCAB = Path(__file__).parents[3].parent / "shared" / "data" / "vocab"
VOCABULARIES = sorted(VOCAB.glob("*.gguf"))
SMALL = [
    each
    for each in VOCABULARIES
    if each.stem.removeprefix("ggml-vocab-") in ("bert-bge", "llama-spm", "phi-3")
]


def plain(value: object) -> object:
    if isinstance(value, StringArray):
        return value.tolist()
    return value.tolist() if hasattr(value, "tolist") else value


@pytest.mark.skipif(not SMALL, reason="needs ../shared/data/vocab")
@pytest.mark.parametrize("path", SMALL, ids=lambda path: path.stem)
def test_metadata_equals_that_of_the_gguf_package(path: Path) -> None:
    ours = open_gguf(path)
    theirs = gguf.GGUFReader(path)
    fields = {key: each for key, each in theirs.fields.items() if not key.startswith("GGUF.")}
    assert set(ours.metadata) == set(fields)
    for key, each in fields.items():
        if len(each.data) > 1000 and each.types[-1] == gguf.GGUFValueType.STRING:
            # contents() of the package is slow on long arrays: every 97th element will do.
            want = [str(bytes(each.parts[part]), "utf-8") for part in each.data[::97]]
            assert ours.metadata[key].tolist()[::97] == want
            assert len(ours.metadata[key]) == len(each.data)
        elif len(each.data) > 1000:
            assert ours.metadata[key].tolist() == [each.parts[part][0].item() for part in each.data]
        else:
            assert plain(ours.metadata[key]) == each.contents()


@pytest.mark.skipif(not VOCABULARIES, reason="needs ../shared/data/vocab")
def test_opening_is_quick() -> None:
    """100,000 strings (50,000 tokens and as many merges) are checked in about 10 ms: no loop in Python."""
    path = max(VOCABULARIES, key=lambda each: each.stat().st_size)
    best = 1.0
    for _ in range(3):
        start = time.thread_time()
        open_gguf(path)
        best = min(best, time.thread_time() - start)
    assert best < 0.2


def write_with_package(path: Path, tensors: dict[str, tuple[np.ndarray, str]], **pairs: int) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in pairs.items():
        writer.add_uint32(key.replace("__", "."), value)
    for name, (array, kind) in tensors.items():
        qtype = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, quantize(array, qtype), raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_tensors_of_a_file_written_by_the_gguf_package(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    rng = np.random.default_rng(0)
    arrays = {
        "norm": (rng.standard_normal(7).astype(np.float32), "F32"),
        "half": (rng.standard_normal((3, 5)).astype(np.float32), "F16"),
        "brain": (rng.standard_normal((3, 6)).astype(np.float32), "BF16"),
        "q": (rng.standard_normal((5, 96)).astype(np.float32), "Q4_1"),
        "experts": (rng.standard_normal((2, 3, 64)).astype(np.float32), "Q8_0"),
    }
    write_with_package(path, arrays)
    file = open_checkpoint(path)
    assert file.kind == "gguf"
    assert list(file.names()) == list(arrays)
    reader = {each.name: each for each in gguf.GGUFReader(path).tensors}
    for name, (array, kind) in arrays.items():
        tensor = file.tensor(name)
        assert (tensor.name, tensor.shape, tensor.format) == (name, array.shape, kind)
        want = dequantize(reader[name].data, reader[name].tensor_type).reshape(array.shape)
        assert np.array_equal(get_format(kind).decode(tensor.data, tensor.shape), want)
        assert not tensor.data.flags.writeable
    assert "norm" in file
    assert "norms" not in file


def test_tensor_data_outlives_the_file_object(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_with_package(path, {"a": (np.arange(64, dtype=np.float32), "F32")})
    data = open_gguf(path).tensor("a").data
    path.unlink()
    assert data.view(np.float32)[63] == 63


def test_every_value_type(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    values = {
        raw.UINT8: 255, raw.INT8: -128, raw.UINT16: 65535, raw.INT16: -32768, raw.UINT32: 2**32 - 1,
        raw.INT32: -(2**31), raw.FLOAT32: 0.5, raw.BOOL: True, raw.STRING: "grüß 日本", raw.UINT64: 2**64 - 1,
        raw.INT64: -(2**63), raw.FLOAT64: 0.1,
    }  # fmt: skip
    pairs = [raw.pair(f"k{kind}", kind, value) for kind, value in values.items()]
    pairs += [raw.array(f"a{kind}", kind, [value] * 3) for kind, value in values.items()]
    pairs += [raw.array(f"e{kind}", kind, []) for kind in values]
    nested = raw.string("nested") + b"\x09\0\0\0" + b"\x09\0\0\0" + (2).to_bytes(8, "little")
    for each in ([1, 2], [3]):
        nested += b"\x04\0\0\0" + len(each).to_bytes(8, "little")
        nested += b"".join(raw.scalar(raw.UINT32, number) for number in each)
    path.write_bytes(raw.File(pairs=[*pairs, nested]).bytes())
    metadata = open_gguf(path).metadata
    for kind, value in values.items():
        assert metadata[f"k{kind}"] == value
        assert type(metadata[f"k{kind}"]) is type(value)
        assert plain(metadata[f"a{kind}"]) == [value] * 3
        assert plain(metadata[f"e{kind}"]) == []
    assert [each.tolist() for each in metadata["nested"]] == [[1, 2], [3]]
    assert memoryview(metadata["a4"]).format == "I"


def test_string_arrays_are_sequences(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(raw.File(pairs=[raw.array("s", raw.STRING, ["a", "", "ccc"])]).bytes())
    strings = open_gguf(path).metadata["s"]
    assert len(strings) == 3
    assert list(strings) == ["a", "", "ccc"]
    assert strings[-1] == "ccc"
    assert strings[:2] == ["a", ""]
    assert "ccc" in strings
    assert strings == ["a", "", "ccc"]
    assert strings != ["a"]


def test_version_2_and_alignment(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    file = raw.File(
        pairs=[raw.pair("general.alignment", raw.UINT32, 256)],
        tensors=[raw.Tensor("a", (2, 3)), raw.Tensor("b", (1,), 0, 256)],
        data=np.arange(6, dtype=np.float32).tobytes() + bytes(232) + np.float32(7).tobytes(),
        version=2,
        alignment=256,
    )
    path.write_bytes(file.bytes())
    opened = open_gguf(path)
    assert (opened.version, opened.alignment) == (2, 256)
    assert opened.tensor("a").shape == (3, 2)
    assert opened.tensor("a").data.view(np.float32).tolist() == [0, 1, 2, 3, 4, 5]
    assert opened.tensor("b").data.view(np.float32).tolist() == [7]


def shards(folder: Path, count: int = 3) -> list[Path]:
    paths = []
    for number in range(count):
        path = folder / f"m-{number + 1:05d}-of-{count:05d}.gguf"
        pairs = [
            raw.pair("split.no", raw.UINT16, number),
            raw.pair("split.count", raw.UINT16, count),
            raw.pair("split.tensors.count", raw.INT32, count),
        ]
        if number == 0:
            pairs.append(raw.pair("general.architecture", raw.STRING, "llama"))
        data = np.full(8, number, np.float32).tobytes()
        path.write_bytes(raw.File(pairs, [raw.Tensor(f"t{number}", (8,))], data).bytes())
        paths.append(path)
    return paths


def test_split_files(tmp_path: Path) -> None:
    paths = shards(tmp_path)
    file = open_gguf(paths[0])
    assert file.files == tuple(paths)
    assert list(file.names()) == ["t0", "t1", "t2"]
    assert file.metadata["general.architecture"] == "llama"
    assert file.tensor("t2").data.view(np.float32).tolist() == [2] * 8


def test_split_files_that_do_not_fit_together(tmp_path: Path) -> None:
    paths = shards(tmp_path)
    with pytest.raises(LoadError, match=r"00002-of-00003.gguf: is not the first shard.*-00001-of-00003"):
        open_gguf(paths[1])
    other = tmp_path / "other"
    other.mkdir()
    strange = shards(other, 2)[1]
    kept = paths[1].read_bytes()
    paths[1].write_bytes(strange.read_bytes())
    with pytest.raises(LoadError, match=r"00002-of-00003.gguf: split.no and split.count do not match"):
        open_gguf(paths[0])
    paths[1].write_bytes(kept.replace(b"t1", b"t0"))
    with pytest.raises(LoadError, match=r"00002-of-00003.gguf: tensor t0 is already in an earlier shard"):
        open_gguf(paths[0])
    paths[1].unlink()
    with pytest.raises(LoadError, match=r"shard m-00002-of-00003.gguf is missing"):
        open_gguf(paths[0])
    renamed = paths[0].rename(tmp_path / "model.gguf")
    with pytest.raises(LoadError, match=r"split.count is 3, so the file must be named NAME-00001-of-00003"):
        open_gguf(renamed)


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(raw.File(tensors=[raw.Tensor("a", (8,))], data=bytes(32)).bytes())
    with pytest.raises(LoadError, match=r"m\.gguf: tensor output\.weight is missing; the file has 1 tensors"):
        open_gguf(path).tensor("output.weight")
