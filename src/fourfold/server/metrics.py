"""What the front counts. Recording costs well under a microsecond; `exposition` turns it into Prometheus
text."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter

from fourfold.types import FinishReason

_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)
_N = (1, 2, 5, 10, 20, 50, 100, 200)


class Histogram:
    """Counts per bucket: values[i] is how many observations were <= bounds[i] and > bounds[i - 1]; the last
    one is what lies above all bounds."""

    __slots__ = ("bounds", "name", "text", "total", "values")

    def __init__(self, name: str, text: str, bounds: tuple[float, ...]) -> None:
        self.name = name
        self.text = text
        self.bounds = bounds
        self.values = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.values[bisect_left(self.bounds, value)] += times
        self.total += value * times


class Metrics:
    """One per application; the event loop's thread is the only writer. Names are vLLM's where the meaning is
    the same."""

    def __init__(self) -> None:
        self.ttft = Histogram(
            "vllm:time_to_first_token_seconds",
            "Seconds from the arrival of a request to its first token.",
            _SECONDS,
        )
        self.inter_token = Histogram(
            "vllm:inter_token_latency_seconds", "Seconds between two tokens of one answer.", _SECONDS
        )
        self.per_token = Histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean seconds per token of an answer, after its first token.",
            _SECONDS,
        )
        self.queue = Histogram(
            "vllm:request_queue_time_seconds",
            "Seconds from the arrival of a request until it has a place in the batch.",
            _SECONDS,
        )
        self.prefill = Histogram(
            "vllm:request_prefill_time_seconds", "Seconds from there to the first token.", _SECONDS
        )
        self.decode = Histogram(
            "vllm:request_decode_time_seconds", "Seconds from the first token to the last.", _SECONDS
        )
        self.inference = Histogram(
            "vllm:request_inference_time_seconds", "Seconds with a place in the batch.", _SECONDS
        )
        self.latency = Histogram(
            "vllm:e2e_request_latency_seconds", "Seconds from the arrival of a request to its end.", _SECONDS
        )
        self.prompt = Histogram("vllm:request_prompt_tokens", "Prompt tokens per request.", _TOKENS)
        self.generation = Histogram(
            "vllm:request_generation_tokens", "Generated tokens per request.", _TOKENS
        )
        self.max_tokens = Histogram("vllm:request_params_max_tokens", "max_tokens of requests.", _TOKENS)
        self.n = Histogram("vllm:request_params_n", "n of requests.", _N)
        self.finished: Counter[FinishReason] = Counter()
        self.errors: Counter[int] = Counter()
        """Refused and failed HTTP requests by status."""
        self.refused: Counter[str] = Counter()
        """Sequences that the engine did not take, or that failed before their first token, by reason."""
        self.in_flight = 0
        """Sequences handed to the engine and not finished."""

    @property
    def histograms(self) -> tuple[Histogram, ...]:
        return (
            self.ttft, self.inter_token, self.per_token, self.latency,
            self.queue, self.prefill, self.decode, self.inference,
            self.prompt, self.generation, self.max_tokens, self.n,
        )  # fmt: skip


class SequenceTimer:
    """Times one sequence, from `arrival` (time.monotonic seconds) on."""

    __slots__ = ("_arrival", "_first", "_last", "_metrics", "_prompt_tokens", "_queue", "generated")

    def __init__(self, metrics: Metrics, arrival: float, prompt_tokens: int) -> None:
        self._metrics = metrics
        self._arrival = arrival
        self._first = 0.0
        self._last = 0.0
        self._queue = 0.0
        self._prompt_tokens = prompt_tokens
        self.generated = 0
        metrics.in_flight += 1

    def queued(self, seconds: float) -> None:
        """It waited so long for its place; only the first call counts, and it comes before any tokens."""
        if self.generated == 0:
            self._queue = seconds

    def tokens(self, count: int) -> None:
        """`count` > 0 tokens came in."""
        now = time.monotonic()
        if self.generated == 0:
            self._first = now
            self._metrics.ttft.observe(now - self._arrival)
            if count > 1:
                self._metrics.inter_token.observe(0.0, count - 1)
        else:
            self._metrics.inter_token.observe((now - self._last) / count, count)
        self._last = now
        self.generated += count

    def end(self, reason: FinishReason) -> None:
        self._metrics.in_flight -= 1
        self._metrics.finished[reason] += 1
        if reason in ("abort", "error"):
            return
        self._metrics.latency.observe(time.monotonic() - self._arrival)
        if self.generated:
            started = self._arrival + self._queue
            self._metrics.queue.observe(self._queue)
            self._metrics.prefill.observe(self._first - started)
            self._metrics.decode.observe(self._last - self._first)
            self._metrics.inference.observe(self._last - started)
        self._metrics.prompt.observe(self._prompt_tokens)
        self._metrics.generation.observe(self.generated)
        if self.generated > 1:
            self._metrics.per_token.observe((self._last - self._first) / (self.generated - 1))
