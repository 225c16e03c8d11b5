"""Greedy continuations of the float32 path against those of transformers in fp32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fourfold import LLM, SamplingParams
from fourfold.text.tokenizer import Tokenizer

from .reference import Transformers
from .text import PROMPTS

pytestmark = pytest.mark.timeout(1200)
TOKENS = 64
NEAR_TIE = 1e-3
"""Logits this close are one number to two orders of summing 30 layers in fp32."""
QUICK = 4


def _first_difference(
    reference: Transformers, prompt: list[int], answer: list[int]
) -> tuple[int, float] | None:
    """(index, how much higher the reference's own choice is) of the first token that transformers would not
    have chosen, or None.

    One pass over prompt and answer is as good as generating: while all tokens before are its own choices, its
    next choice is the argmax there.
    """
    logits = reference.logits([*prompt, *answer[:-1]])[len(prompt) - 1 :]
    best, index = logits.max(-1)
    chosen = torch.tensor(answer)
    for place in torch.nonzero(index != chosen).flatten().tolist():
        return place, float(best[place] - logits[place, chosen[place]])
    return None


def _check(
    path: Path, tokenizer: Tokenizer, reference: Transformers, prompts: tuple[str, ...], least: int
) -> None:
    ids = [tokenizer.encode(prompt) for prompt in prompts]
    with LLM(str(path), activation_dtype="float32", kv_cache_dtype="float32") as llm:
        outputs = llm.generate(ids, SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True))
    differences = {}
    for prompt, prompt_ids, output in zip(prompts, ids, outputs, strict=True):
        answer = output.outputs[0].token_ids
        assert len(answer) == TOKENS
        found = _first_difference(reference, prompt_ids, answer)
        if found is not None:
            differences[prompt] = found
    print(f"{path.stem}: {len(prompts) - len(differences)} of {len(prompts)} equal; others: {differences}")
    assert len(prompts) - len(differences) >= least, differences
    assert all(gap < NEAR_TIE for _, gap in differences.values()), differences


def test_few_prompts(path: Path, tokenizer: Tokenizer, reference: Transformers) -> None:
    _check(path, tokenizer, reference, PROMPTS[:QUICK], QUICK - 1)


@pytest.mark.slow
def test_twenty_prompts(path: Path, tokenizer: Tokenizer, reference: Transformers) -> None:
    _check(path, tokenizer, reference, PROMPTS, 18)
