"""Every family against transformers, from Hugging Face and GGUF files; fused programs against unfused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fourfold.models.registry import load_model_definition
from fourfold.program.check import check
from fourfold.program.interpret import interpret
from fourfold.program.memory import plan
from fourfold.program.ops import Add, Attention, Gate, Linear, Norm, Rope
from fourfold.program.passes import PASSES, optimize
from fourfold.weights.gguf import open_gguf
from fourfold.weights.hf import open_hf
from models.tiny_models import ADMITTED, CASES, TOKENS, load_weights, make_model, reference_logits, write_gguf


@pytest.mark.parametrize("name", CASES)
def test_hugging_face_checkpoint_gives_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    model = make_model(CASES[name])
    model.save_pretrained(tmp_path)
    source = open_hf(tmp_path)
    definition = load_model_definition(source, ADMITTED.get(name))
    weights = load_weights(definition, source)
    expected = reference_logits(model)
    found = interpret(definition.program, weights, TOKENS)
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)
    assert np.abs(expected).max() > 0.5, "the model must say something for the comparison to mean something"
    assert definition.eos_token_ids == (2,)
    assert definition.bos_token_id == 1

    # Every pass alone on top of the ones before, each keeping the meaning.
    program = definition.program
    for rewrite in PASSES:
        program = rewrite(program)
        check(program)
        fused = interpret(program, weights, TOKENS)
        np.testing.assert_allclose(fused, found, atol=2e-6, rtol=1e-6, err_msg=rewrite.__name__)
    assert program == optimize(definition.program)


@pytest.mark.parametrize("name", CASES)
def test_gguf_gives_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    if name == "gemma2" or name.startswith("gemma3"):
        # GGUF does not state Gemma's attention scale, it follows from the head size.
        fields = {**CASES[name].fields, "query_pre_attn_scalar": CASES[name].fields["head_dim"]}
        model = make_model(type(CASES[name])(CASES[name].config, fields))
    elif name == "qwen2-window":
        pytest.skip("GGUF files of qwen2 have no key for windows")
    else:
        model = make_model(CASES[name])
    source = open_gguf(write_gguf(model, tmp_path / "tiny.gguf"))
    definition = load_model_definition(source, ADMITTED.get(name))
    weights = load_weights(definition, source)
    found = interpret(optimize(definition.program), weights, TOKENS)
    np.testing.assert_allclose(found, reference_logits(model), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", CASES)
def test_both_kinds_of_file_give_the_same_weights(name: str, tmp_path: Path) -> None:
    model = make_model(CASES[name])
    model.save_pretrained(tmp_path)
    hf, gg = open_hf(tmp_path), open_gguf(write_gguf(model, tmp_path / "tiny.gguf"))
    one, two = load_model_definition(hf, 64), load_model_definition(gg, 64)
    assert one.program.weights == two.program.weights
    left, right = load_weights(one, hf), load_weights(two, gg)
    for key, value in left.items():
        np.testing.assert_array_equal(value, right[key], err_msg=key)


def test_everything_that_can_be_fused_is_fused(tmp_path: Path) -> None:
    """Per layer qkv, attention, o, gated pair and down; in Gemma two norms more. No Add is left. Besides them
    the embedding, the wanted rows of the last attention and of the hidden state, and the logits."""
    for name, per_layer, norms in (
        ("llama-tied", 5, 0),
        ("qwen3", 5, 0),
        ("phi3-window", 5, 0),
        ("gemma3", 7, 2),
    ):
        make_model(CASES[name]).save_pretrained(tmp_path / name)
        definition = load_model_definition(open_hf(tmp_path / name), None)
        ops = optimize(definition.program).ops
        layers = len(definition.program.kv)
        assert len(ops) == 1 + per_layer * layers + 3
        assert not [op for op in ops if isinstance(op, Add | Gate | Rope)]
        assert sum(isinstance(op, Norm) for op in ops) == norms * layers
        assert all(op.rope is not None for op in ops if isinstance(op, Attention))
        assert sum(isinstance(op, Linear) and len(op.weights) == 3 for op in ops) == layers


def test_three_slots_are_enough_for_a_fused_decoder(tmp_path: Path) -> None:
    """Hidden state, the widest of qkv and MLP, attention output; and two for the rows with logits."""
    make_model(CASES["llama-tied"]).save_pretrained(tmp_path)
    program = optimize(load_model_definition(open_hf(tmp_path), None).program)
    layout = plan(program)
    assert sorted(
        w for w, rows in zip(layout.slot_width, layout.slot_rows, strict=True) if rows == "tokens"
    ) == [
        64,
        64,
        128,
    ]


@pytest.mark.parametrize("prefix", ["language_model.model", "model.language_model"])
def test_text_model_inside_multimodal_gemma3(prefix: str, tmp_path: Path) -> None:
    """Published multimodal checkpoints nest the config and leave most keys of text_config out."""
    model = make_model(CASES["gemma3"])
    renamed = {
        key.replace("model.", f"{prefix}.", 1): value.contiguous()
        for key, value in model.state_dict().items()
        if key != "lm_head.weight"
    }
    renamed["vision_tower.vision_model.head.weight"] = torch.zeros(2, 2)
    save_file(renamed, tmp_path / "model.safetensors")
    left_out = {"max_position_embeddings", "tie_word_embeddings", "hidden_activation"}
    text = {key: value for key, value in model.config.to_dict().items() if key not in left_out}
    config = {"model_type": "gemma3", "eos_token_id": [1, 106], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = open_hf(tmp_path)
    definition = load_model_definition(source, None)
    found = interpret(definition.program, load_weights(definition, source), TOKENS)
    np.testing.assert_allclose(found, reference_logits(model), atol=1e-4, rtol=0)
    assert definition.eos_token_ids[:2] == (1, 106)
