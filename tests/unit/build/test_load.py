"""Sizes decided at load: the longest sequence and the KV pool, and the errors that give both numbers."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, get_args

import pytest
from models.tiny_models import CASES, make_model

from fourfold.build import load
from fourfold.build.load import kv_block_bytes, load_engine_backend
from fourfold.config import EngineConfig, KVDtype
from fourfold.errors import ConfigError, LoadError
from fourfold.program.ops import KVSpec, Program

BLOCK = 32
# 2 layers of 2 heads of 16 columns, K and V, 2 bytes: 256 bytes a token, 8192 a block.
PROGRAM = Program("test", (), {}, (KVSpec(0, 2, 16), KVSpec(1, 2, 16)), 10, 32, max_position=4096)
PER_BLOCK = 8192


def sizes(**fields: Any) -> tuple[int, int]:
    return load._sizes(EngineConfig(**fields), PROGRAM, BLOCK)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(load, "available_memory", lambda: 2**40)
    return monkeypatch


def test_bytes_of_a_block_are_those_of_keys_and_values_and_their_scales() -> None:
    assert kv_block_bytes(PROGRAM.kv, "bfloat16") == BLOCK * 256
    assert kv_block_bytes((KVSpec(0, 3, 64),), "float32") == BLOCK * 2 * 3 * 64 * 4
    for kv in get_args(KVDtype)[2:]:
        assert kv_block_bytes((KVSpec(0, 3, 64),), kv) == BLOCK * 2 * 3 * (64 + 4)
    assert get_args(KVDtype)[2:] == ("int8", "fp8")


def test_with_memory_enough_the_pool_is_of_its_usual_size(memory: pytest.MonkeyPatch) -> None:
    assert sizes() == (4096, 65536 // BLOCK)
    assert sizes(max_model_len=100) == (100, 65536 // BLOCK)
    assert sizes(num_kv_blocks=200) == (4096, 200)
    assert sizes(kv_cache_bytes=200 * PER_BLOCK + 5) == (4096, 200)
    assert sizes(kv_cache_bytes=200 * PER_BLOCK, kv_cache_dtype="float32", max_model_len=3200) == (3200, 100)
    assert sizes(kv_cache_bytes=200 * PER_BLOCK, kv_cache_dtype="fp8") == (4096, 200 * 32 // (16 + 4))
    assert sizes(num_kv_blocks=150, kv_cache_bytes=1) == (4096, 150)


def test_a_length_beyond_the_model_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"max_model_len 4097 .* 4096 tokens"):
        sizes(max_model_len=4097)
    with pytest.raises(ConfigError, match=r"2147483647 .* 4096"):
        sizes(max_model_len=2**31 - 1)


def test_a_length_that_the_pool_cannot_hold_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=rf"max_model_len 65 .* 64 tokens \({2 * PER_BLOCK} bytes\)"):
        sizes(max_model_len=65, num_kv_blocks=2)
    assert sizes(max_model_len=64, num_kv_blocks=2) == (64, 2)


def test_little_memory_shortens_the_longest_sequence_and_says_so(
    memory: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    memory.setattr(load, "available_memory", lambda: 4 * 10 * PER_BLOCK)
    with caplog.at_level(logging.WARNING):
        assert sizes() == (320, 10)
    assert "320 tokens, not the model's 4096" in caplog.text
    with pytest.raises(ConfigError, match=r"max_model_len 1000 .* 320 tokens"):
        sizes(max_model_len=1000)


@pytest.mark.parametrize("fields", [{"kv_cache_bytes": 8191}, {"kv_cache_bytes": 0}, {}])
def test_a_pool_of_no_block_is_refused(memory: pytest.MonkeyPatch, fields: dict[str, Any]) -> None:
    memory.setattr(load, "available_memory", lambda: 1000)
    with pytest.raises(ConfigError, match=rf"at least one block of {PER_BLOCK} bytes.*--kv-cache-memory"):
        sizes(**fields)


def test_loading_builds_the_artefact_once_per_precision(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOURFOLD_CACHE_DIR", str(tmp_path))
    for activation in ("float32", "int8", "bfloat16"):
        for expected in ("built", "mapped"):
            config = EngineConfig(
                model=str(model), activation_dtype=activation, num_kv_blocks=8, max_num_batched_tokens=64
            )
            backend, info = load_engine_backend(config, lambda what, share: None)
            if activation == "bfloat16":  # the same weights as int8
                expected = "mapped"
            assert f"({expected})" in info.description["artefact"]
            assert (info.vocab_size, info.max_model_len, info.num_blocks) == (131, 128, 8)
            assert (backend.vocab_size, backend.num_blocks, backend.max_batch_tokens) == (131, 8, 64)
            backend.close()
    assert len(list((tmp_path / "artefacts").iterdir())) == 2


def test_parameters_count_tied_weights_once(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOURFOLD_CACHE_DIR", str(tmp_path))
    config = EngineConfig(model=str(model), num_kv_blocks=8)
    info = load_engine_backend(config, lambda what, share: None)[1]
    assert info.parameters == make_model(CASES["llama-tied"]).num_parameters()


def test_a_truncated_checkpoint_is_a_load_error(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOURFOLD_CACHE_DIR", str(tmp_path / "cache"))
    for share in (0.1, 0.5, 0.999):
        copy = tmp_path / f"cut{share}"
        copy.mkdir()
        for path in model.iterdir():
            data = path.read_bytes()
            keep = int(len(data) * share) if path.suffix == ".safetensors" else len(data)
            (copy / path.name).write_bytes(data[:keep])
        with pytest.raises(LoadError, match="safetensors"):
            load_engine_backend(EngineConfig(model=str(copy)), lambda what, share: None)
