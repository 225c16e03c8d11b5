"""Hugging Face directories: single, sharded, and the ways they are incomplete (B76)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fourfold.errors import LoadError
from fourfold.weights.hf import open_hf
from fourfold.weights.metadata import get_int
from fourfold.weights.open import open_checkpoint

LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "a" * 64 + "\nsize 98362432\n"


@pytest.fixture
def single(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 8, "rope_scaling": null}')
    save_file({"a": torch.ones(2, 3), "b": torch.zeros(4).bfloat16()}, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    save_file({"a": torch.ones(2, 3)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": torch.full((4,), 2.0)}, tmp_path / "model-00002-of-00002.safetensors")
    write_index(tmp_path, {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"})
    return tmp_path


def write_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_single_file(single: Path) -> None:
    source = open_checkpoint(single)
    assert source.kind == "hf"
    assert source.path == single
    assert set(source.names()) == {"a", "b"}
    assert source.metadata["model_type"] == "llama"
    assert source.metadata["rope_scaling"] is None
    assert get_int(source.metadata, "hidden_size") == 8
    assert source.tensor("b").format == "BF16"
    assert "a" in source
    assert "c" not in source
    with pytest.raises(LoadError, match="tensor c is missing; the checkpoint has 2 tensors"):
        source.tensor("c")


def test_shards(sharded: Path) -> None:
    source = open_hf(sharded)
    assert list(source.names()) == ["a", "b"]
    assert source.tensor("b").data.view(np.float32).tolist() == [2] * 4


def test_metadata_errors_name_the_config_file(single: Path) -> None:
    with pytest.raises(LoadError, match=r"config\.json: key vocab_size is missing"):
        get_int(open_hf(single).metadata, "vocab_size")
    with pytest.raises(LoadError, match=r"config\.json: model_type must be an integer, but is str 'llama'"):
        get_int(open_hf(single).metadata, "model_type")


def test_missing_shard(sharded: Path) -> None:
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        LoadError, match=r"index\.json: names shard model-00002-of-00002\.safetensors, which is missing"
    ):
        open_hf(sharded)


def test_shard_that_is_an_lfs_pointer(sharded: Path) -> None:
    (sharded / "model-00002-of-00002.safetensors").write_text(LFS)
    with pytest.raises(LoadError, match=r"model-00002-of-00002\.safetensors: is a Git LFS pointer"):
        open_hf(sharded)


def test_index_that_is_an_lfs_pointer(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").write_text(LFS)
    with pytest.raises(LoadError, match=r"index\.json: is a Git LFS pointer"):
        open_hf(sharded)


def test_index_naming_a_tensor_its_shard_lacks(sharded: Path) -> None:
    write_index(sharded, {"a": "model-00002-of-00002.safetensors"})
    with pytest.raises(
        LoadError, match=r"says tensor a is in model-00002-of-00002\.safetensors, but it is not"
    ):
        open_hf(sharded)


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "", "a\\b", "a\0b", 3, None]
)
def test_index_must_not_lead_out_of_its_directory(sharded: Path, name: object) -> None:
    write_index(sharded, {"a": name})
    with pytest.raises(LoadError, match=r"weight_map\['a'\] must be the name of a file beside it, got"):
        open_hf(sharded)


@pytest.mark.parametrize("weight_map", [None, [], {}, "x"])
def test_index_without_a_map(sharded: Path, weight_map: object) -> None:
    write_index(sharded, weight_map)
    with pytest.raises(LoadError, match=r"index\.json: weight_map must be an object"):
        open_hf(sharded)


def test_pickle_only(single: Path) -> None:
    (single / "model.safetensors").rename(single / "pytorch_model.bin")
    with pytest.raises(LoadError, match=r"has only pytorch_model\.bin, a pickle.*convert it to safetensors"):
        open_hf(single)


def test_no_weights_and_no_config(single: Path) -> None:
    (single / "model.safetensors").unlink()
    with pytest.raises(
        LoadError, match=r"has neither model\.safetensors nor model\.safetensors\.index\.json"
    ):
        open_hf(single)
    (single / "config.json").unlink()
    with pytest.raises(LoadError, match=r"has no config\.json"):
        open_hf(single)
    with pytest.raises(LoadError, match="is not a directory"):
        open_hf(single / "nothing")


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "is not valid JSON"),
        ("[1]", "must be a JSON object, but is a list"),
        ('{"a": 1, "a": 2}', "key 'a' appears twice"),
        ('{"a": Infinity}', "holds Infinity"),
        (LFS, "Git LFS pointer"),
    ],
)
def test_bad_config(single: Path, text: str, message: str) -> None:
    (single / "config.json").write_text(text)
    with pytest.raises(LoadError, match=rf"config\.json: .*{message}"):
        open_hf(single)


def test_a_safetensors_file_alone_is_pointed_to_its_directory(single: Path) -> None:
    with pytest.raises(LoadError, match="give the directory that holds it"):
        open_checkpoint(single / "model.safetensors")
