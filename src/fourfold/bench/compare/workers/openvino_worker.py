from __future__ import annotations

from collections.abc import Callable
from typing import Any

from loop import Prompts, run


def load(settings: dict[str, Any]) -> tuple[str, Callable[[Prompts, int], int]]:
    import numpy as np
    import openvino
    import openvino_genai

    properties = {"INFERENCE_NUM_THREADS": settings["threads"]}

    def config(tokens: int) -> Any:
        wanted = openvino_genai.GenerationConfig()
        wanted.max_new_tokens = wanted.min_new_tokens = tokens
        wanted.ignore_eos, wanted.do_sample = True, False
        return wanted

    if settings["model"].endswith(".gguf"):
        pipeline = openvino_genai.LLMPipeline(settings["model"], "CPU", **properties)

        def generate(prompts: Prompts, tokens: int) -> int:
            ids = np.array(prompts, np.int64)
            inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
            return sum(len(answer) for answer in pipeline.generate(inputs, config(tokens)).tokens)

        return openvino_genai.__version__, generate

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_seqs, scheduler.max_num_batched_tokens = 3, 64, 2048
    scheduler.enable_prefix_caching = scheduler.dynamic_split_fuse = True
    batching = openvino_genai.ContinuousBatchingPipeline(settings["model"], scheduler, "CPU", properties)

    def generate_batched(prompts: Prompts, tokens: int) -> int:
        inputs = [openvino.Tensor(np.array([prompt], np.int64)) for prompt in prompts]
        answers = batching.generate(inputs, [config(tokens)] * len(prompts))
        return sum(len(answer.m_generation_ids[0]) for answer in answers)

    return openvino_genai.__version__, generate_batched


run(load)
