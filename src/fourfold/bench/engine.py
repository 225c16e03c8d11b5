"""Speed of the engine in this process, on any model.

Prompts are random token ids, so that lengths are exact and no two share a beginning unless they are meant to;
greedy, EOS ignored.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fourfold.bench.stats import Runs
from fourfold.progress import Progress, silent
from fourfold.types import SamplingParams

if TYPE_CHECKING:
    from fourfold.llm import LLM

Kind = Literal["prefill", "decode", "batch", "shared"]


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked of the engine at once.

    prefill: prompt tokens / time to the first token. decode: tokens after the first / their time. batch and
    shared: tokens of all answers / time from the first request to the last token.

    requests: how many, all at once.  prompt, output: tokens of each.  shared: tokens at the beginning of all
    prompts, counted in `prompt`.
    """

    name: str
    kind: Kind
    requests: int
    prompt: int
    output: int
    shared: int = 0


WORKLOADS = {
    each.name: each
    for each in (
        Workload("prefill-512", "prefill", 1, 512, 1),
        Workload("prefill-2048", "prefill", 1, 2048, 1),
        Workload("decode-32", "decode", 1, 32, 129),
        Workload("decode-2048", "decode", 1, 2048, 129),
        Workload("batch-8", "batch", 8, 128, 128),
        Workload("batch-32", "batch", 32, 128, 128),
        Workload("batch-64", "batch", 64, 128, 128),
        Workload("shared-prefix", "shared", 32, 1056, 32, shared=1024),
    )
}


@dataclass(frozen=True, slots=True)
class Speed:
    """runs: tokens/s, as `workload` defines them.  seconds: of the whole workload."""

    workload: Workload
    runs: Runs
    seconds: Runs


def measure(
    llm: LLM,
    workloads: Sequence[Workload],
    repeats: int,
    seed: int = 0,
    clock: Callable[[], float] = time.perf_counter,
    progress: Progress = silent,
) -> list[Speed]:
    """Workloads that fit the model's context and KV cache, interleaved; one short request warms up."""
    jobs = [each for each in workloads if fits(llm, each)]
    rng = random.Random(seed)
    vocab = min(llm.model.vocab_size, llm.tokenizer.vocab_size)
    _run(llm, Workload("warm-up", "prefill", 1, min(64, llm.model.max_model_len - 1), 1), rng, vocab, clock)
    measured: dict[str, list[tuple[float, float]]] = {each.name: [] for each in jobs}
    for repeat in range(repeats):
        for done, job in enumerate(jobs):
            progress("measuring", repeat * len(jobs) + done, repeats * len(jobs), "runs")
            measured[job.name].append(_run(llm, job, rng, vocab, clock))
    return [
        Speed(
            job, Runs(tuple(s for s, _ in measured[job.name])), Runs(tuple(t for _, t in measured[job.name]))
        )
        for job in jobs
    ]


def _speed(workload: Workload, runs: Sequence[tuple[float, float]]) -> Speed:
    return Speed(workload, Runs(tuple(speed for speed, _ in runs)), Runs(tuple(took for _, took in runs)))


def fits(llm: LLM, workload: Workload) -> bool:
    return workload.prompt + workload.output <= llm.model.max_model_len


def prompts(workload: Workload, rng: random.Random, vocab: int) -> list[list[int]]:
    """The token ids of each request."""
    common = [rng.randrange(vocab) for _ in range(workload.shared)]
    own = workload.prompt - workload.shared
    return [common + [rng.randrange(vocab) for _ in range(own)] for _ in range(workload.requests)]


def _run(
    llm: LLM, workload: Workload, rng: random.Random, vocab: int, clock: Callable[[], float]
) -> tuple[float, float]:
    """(tokens/s, seconds)."""
    params = SamplingParams(temperature=0, max_tokens=workload.output, ignore_eos=True)
    batch = prompts(workload, rng, vocab)
    started = clock()
    if workload.kind in ("batch", "shared"):
        answers = llm.generate(batch, params, use_tqdm=False)
        seconds = clock() - started
        return sum(len(each.outputs[0].token_ids) for each in answers) / seconds, seconds
    times: list[float] = []
    with closing(llm.stream(batch[0], params)) as deltas:
        for delta in deltas:
            times.extend([clock()] * len(delta.token_ids))
    seconds = times[-1] - started
    if workload.kind == "prefill":
        return workload.prompt / (times[0] - started), seconds
    return (len(times) - 1) / (times[-1] - times[0]), seconds
