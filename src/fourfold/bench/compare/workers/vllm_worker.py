from __future__ import annotations

from collections.abc import Callable
from typing import Any

from loop import Prompts, run


def load(settings: dict[str, Any]) -> tuple[str, Callable[[Prompts, int], int]]:
    import vllm

    llm = vllm.LLM(
        model=settings["model"],
        dtype="bfloat16",
        max_model_len=4096,
        max_num_seqs=64,
        max_num_batched_tokens=4096,
        enable_prefix_caching=True,
    )

    def generate(prompts: Prompts, tokens: int) -> int:
        params = vllm.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        batch = [{"prompt_token_ids": prompt} for prompt in prompts]
        return sum(len(each.outputs[0].token_ids) for each in llm.generate(batch, params, use_tqdm=False))

    return str(vllm.__version__), generate


if __name__ == "__main__":  # its engine's process imports this file again
    run(load)
