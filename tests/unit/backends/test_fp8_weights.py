"""Checkpoints with fp8 weights: the logits of the same weights decoded, in half of bfloat16's memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models.tiny_models import CASES, VOCAB, Case, make_model
from safetensors.torch import load_file, save_file

from backends.driver import LIMITS, Floats, Model, in_chunks, pack
from fourfold.errors import LoadError
from fourfold.models.registry import load_model_definition
from fourfold.program.passes import optimize
from fourfold.weights.hf import open_hf

FLOAT32: dict[str, Any] = {"activation_dtype": "float32", "kv_dtype": "float32"}
BLOCK = (32, 16)
TOKENS = [int(t) for t in np.random.default_rng(2).integers(3, VOCAB, 50)]

FINE_GRAINED: dict[str, Any] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": list(BLOCK),
    "modules_to_not_convert": ["lm_head"],
}
PER_TENSOR: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "static"}


def compressed(strategy: str, **weights: Any) -> dict[str, Any]:
    described = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {**described, **weights}}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "sparsity_config": {},
    }


SCHEMES: dict[str, tuple[dict[str, Any], str]] = {
    "block": (FINE_GRAINED, "weight_scale_inv"),
    "tensor": (PER_TENSOR, "weight_scale"),
    "channel": (compressed("channel"), "weight_scale"),
    "compressed-block": (compressed("block", block_structure=list(BLOCK)), "weight_scale"),
}


def quantize(
    weight: torch.Tensor, scheme: str, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales as the checkpoint has them, and the decoded weight in float32."""
    n, k = weight.shape
    rows, columns = {"tensor": (n, k), "channel": (1, k)}.get(scheme, BLOCK)
    high, wide = -(-n // rows), -(-k // columns)
    padded = torch.zeros(high * rows, wide * columns)
    padded[:n, :k] = weight
    largest = padded.reshape(high, rows, wide, columns).abs().amax((1, 3))
    scale = largest / torch.finfo(dtype).max
    full = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[:n, :k]
    codes = (weight / full).to(dtype)
    return codes, scale.reshape(()) if scheme == "tensor" else scale, codes.float() * full


def checkpoints(folder: Path, case: Case, scheme: str, dtype: torch.dtype) -> tuple[Path, Path]:
    """Folders of the fp8 checkpoint and of the same numbers in float32."""
    paths = (folder / "fp8", folder / "plain")
    state = {k: v.clone().contiguous() for k, v in make_model(case).state_dict().items()}
    if case.fields.get("tie_word_embeddings"):
        state.pop("lm_head.weight", None)
    fp8, plain = dict(state), dict(state)
    config, suffix = SCHEMES[scheme]
    for name, weight in state.items():
        if name.endswith("_proj.weight"):
            scale_name = name.removesuffix("weight") + suffix
            fp8[name], fp8[scale_name], plain[name] = quantize(weight, scheme, dtype)
            if scheme == "tensor":
                fp8[name.removesuffix("weight") + "input_scale"] = torch.tensor(0.5)
    for path, tensors, extra in zip(paths, (fp8, plain), ({"quantization_config": config}, {}), strict=True):
        make_model(case).config.save_pretrained(path)
        written = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**written, **extra}))
        save_file(tensors, path / "model.safetensors")
    return paths


def model_of(path: Path, **options: Any) -> Model:
    source = open_hf(path)
    definition = load_model_definition(source, None)
    packed = pack(definition, source, exact=options["activation_dtype"] == "float32")
    return Model(optimize(definition.program), packed, options)


def logits(model: Model, **options: Any) -> Floats:
    return in_chunks(model.backend(LIMITS, **options), TOKENS, 128)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_logits_are_those_of_the_decoded_weights(scheme: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Bit for bit with float32 activations; otherwise apart by the rounding of activations to bf16."""
    fp8, plain = checkpoints(tmp_path, CASES["llama-tied"], scheme, dtype)
    want = logits(model_of(plain, **FLOAT32))
    np.testing.assert_array_equal(logits(model_of(fp8, **FLOAT32)), want)
    fast = model_of(fp8, activation_dtype="int8", kv_dtype="float32")
    found = logits(fast)
    assert 0 < np.sqrt(((found - want) ** 2).mean()) < 0.02 * want.std()
    np.testing.assert_array_equal(in_chunks(fast.backend(threads=2), TOKENS, 7), found)


def test_weights_take_one_byte_and_their_scales(tmp_path: Path) -> None:
    fp8, plain = checkpoints(tmp_path, CASES["llama-tied"], "channel", torch.float8_e4m3fn)
    small, large = (model_of(p, **FLOAT32).weights.matrices["layers.0.gate.weight"] for p in (fp8, plain))
    assert large.data.nbytes == 96 * 64 * 4
    assert small.data.nbytes == 96 * (64 + 4)


def test_rows_of_a_fused_tensor_have_their_own_scales(tmp_path: Path) -> None:
    """Phi-3's qkv_proj: blocks of scales begin within q, k and v."""
    fp8, plain = checkpoints(tmp_path, CASES["phi3-window"], "block", torch.float8_e4m3fn)
    np.testing.assert_array_equal(logits(model_of(fp8, **FLOAT32)), logits(model_of(plain, **FLOAT32)))


def changed(path: Path, config: dict[str, Any]) -> None:
    written = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**written, "quantization_config": config}))


@pytest.mark.parametrize(
    "config, message",
    [
        ({"quant_method": "gptq", "bits": 4}, r"quantization_config is .*gptq.*supported are .* 'fp8'"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "quantization_config is"),
        ({"bits": 8}, r"quantization_config\.quant_method is missing"),
        ("fp8", r"quantization_config must be a mapping"),
        ({**FINE_GRAINED, "weight_block_size": [128]}, r"weight_block_size must be two multiples of 4"),
        ({**FINE_GRAINED, "weight_block_size": [64, 64]}, r"weight_scale_inv of shape .* blocks of 64 x 64"),
        ({**FINE_GRAINED, "rotation": "hadamard"}, r"quantization_config\.rotation"),
        (compressed("channel", num_bits=4), r"weights\.num_bits is 4, supported is 8"),
        (compressed("group"), r"weights\.strategy is 'group'"),
        ({**compressed("channel"), "config_groups": {}}, r"config_groups is missing"),
        ({**compressed("channel"), "sparsity_config": {"format": "dense"}}, r"sparsity_config"),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_refused_by_name(config: Any, message: str, tmp_path: Path) -> None:
    fp8, _ = checkpoints(tmp_path, CASES["llama-tied"], "block", torch.float8_e4m3fn)
    changed(fp8, config)
    with pytest.raises(LoadError, match=message):
        load_model_definition(open_hf(fp8), None)


def test_missing_and_damaged_scales_are_named(tmp_path: Path) -> None:
    fp8, _ = checkpoints(tmp_path, CASES["llama-tied"], "tensor", torch.float8_e4m3fn)
    name = "model.layers.0.mlp.up_proj.weight_scale"
    state = load_file(fp8 / "model.safetensors")
    save_file({**state, name: torch.tensor(float("nan"))}, fp8 / "model.safetensors")
    with pytest.raises(LoadError, match=rf"{name} has scales that are not finite"):
        model_of(fp8, **FLOAT32)
    del state[name]
    save_file(state, fp8 / "model.safetensors")
    with pytest.raises(LoadError, match=r"up_proj\.weight is fp8, but .* is missing"):
        load_model_definition(open_hf(fp8), None)
