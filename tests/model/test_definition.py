"""The two default models, read by our code and run by the NumPy interpreter, against transformers in fp32."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from fourfold.errors import FourfoldError
from fourfold.hub.names import resolve
from fourfold.models.registry import load_model_definition
from fourfold.program.interpret import interpret
from fourfold.program.passes import optimize
from fourfold.weights.gguf import open_gguf

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from models.tiny_models import load_weights

TOKENS = {
    "smollm2": [504, 3575, 282, 4649, 314, 7042, 30, 657, 314, 3807, 281, 260, 5372, 28, 284, 665],
    "gemma3-270m": [2, 818, 5279, 529, 7001, 563, 9079, 236761, 1030, 563, 5628, 528, 506, 4856, 236764, 532],
}


@pytest.mark.slow
@pytest.mark.parametrize("alias", TOKENS)
def test_logits_of_the_real_model(alias: str) -> None:
    try:
        path = resolve(alias, offline=True).path
    except FourfoldError as error:
        pytest.skip(f"{alias} is not downloaded: {error}")
    source = open_gguf(path)
    definition = load_model_definition(source, None)
    weights = load_weights(definition, source)
    found = interpret(optimize(definition.program), weights, TOKENS[alias])
    del weights

    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS[alias]]), use_cache=False).logits[0].numpy()
    np.testing.assert_allclose(found, expected, atol=1e-3, rtol=0)
    assert (found.argmax(-1) == expected.argmax(-1)).all()
