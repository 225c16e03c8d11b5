from __future__ import annotations

from collections.abc import Callable
from typing import Any

from loop import Prompts, run


def load(settings: dict[str, Any]) -> tuple[str, Callable[[Prompts, int], int]]:
    from fourfold import LLM, SamplingParams, __version__

    llm = LLM(settings["model"], threads=settings["threads"])

    def generate(prompts: Prompts, tokens: int) -> int:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        return sum(len(each.outputs[0].token_ids) for each in llm.generate(prompts, params, use_tqdm=False))

    return __version__, generate


run(load)
