"""Prometheus text of the front's and the engine's numbers. Imported at the first scrape: prometheus-client
costs 50 ms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric

from fourfold.server.metrics import Histogram, Metrics
from fourfold.types import EngineStats, ModelInfo

_TIER_GAUGES = {
    "host_blocks": "KV blocks in host memory.",
    "host_capacity": "KV blocks that host memory may hold.",
    "queued_writes": "KV blocks waiting to be written to disk.",
    "queued_prefetches": "KV blocks waiting to be read from disk.",
    "save_seconds": "Seconds to copy a KV block to host memory, as measured lately.",
    "restore_seconds": "Seconds to copy a KV block back, as measured lately.",
    "disk_read_seconds": "Seconds to read a KV block from disk, as measured lately.",
    "disk_blocks": "KV blocks on disk.",
    "disk_bytes": "Their bytes.",
}
_TIER_COUNTERS = {
    "saved_blocks": "KV blocks copied from the pool to host memory.",
    "skipped_blocks": "KV blocks not saved, because a queue or the host memory was full.",
    "forgone_blocks": "KV blocks not saved, because computing them again is faster.",
    "restored_blocks": "KV blocks copied from host memory to the pool.",
    "disk_read_blocks": "KV blocks read from disk.",
    "disk_written_blocks": "KV blocks written to disk.",
    "disk_evicted_blocks": "KV blocks removed from disk for others.",
    "disk_bad_files": "Torn, altered or foreign files that were ignored.",
    "disk_write_errors": "KV blocks that could not be written to disk.",
}

CONTENT_TYPE: str = CONTENT_TYPE_LATEST


class _Snapshot:
    """A collector for one scrape."""

    def __init__(self, metrics: Metrics, model: ModelInfo, name: str, stats: EngineStats | None) -> None:
        self._metrics = metrics
        self._model = model
        self._name = name
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        for histogram in self._metrics.histograms:
            yield self._histogram(histogram)
        success = CounterMetricFamily(
            "vllm:request_success", "Finished sequences by reason.", labels=["model_name", "finished_reason"]
        )
        for reason in ("stop", "length", "abort", "error"):
            success.add_metric([self._name, reason], self._metrics.finished[reason])
        yield success
        errors = CounterMetricFamily("fourfold:http_errors", "Failed requests by status.", labels=["status"])
        for status, count in sorted(self._metrics.errors.items()):
            errors.add_metric([str(status)], count)
        yield errors
        yield self._by(
            "fourfold:refused_sequences",
            "Sequences the engine did not take, or that failed before their first token.",
            "reason",
            self._metrics.refused,
        )
        yield self._gauge(
            "fourfold:sequences_in_flight", "Sequences handed to the engine.", self._metrics.in_flight
        )
        yield self._gauge(
            "fourfold:engine_up", "1 if the engine answered this scrape.", self._stats is not None
        )
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "The KV pool.", labels=["model_name", "block_size", "num_gpu_blocks"]
        )
        info.add_metric([self._name, str(self._model.block_size), str(self._model.num_blocks)], 1)
        yield info
        if self._stats is not None:
            yield from self._engine(self._stats)

    def _engine(self, stats: EngineStats) -> Iterable[Metric]:
        gauge, counter = self._gauge, self._counter
        total = max(1, stats.total_blocks)
        yield gauge("vllm:num_requests_running", "Sequences in the running batch.", stats.running)
        yield gauge("vllm:num_requests_waiting", "Sequences that wait to be scheduled.", stats.waiting)
        yield gauge(
            "vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", stats.live_blocks / total
        )
        for state in ("free", "cached", "live", "in_transfer", "total", "pinned"):
            yield gauge(
                f"fourfold:kv_blocks_{state}", f"KV blocks: {state}.", getattr(stats, f"{state}_blocks")
            )
        yield counter("vllm:num_preemptions", "Sequences preempted for want of KV blocks.", stats.preemptions)
        yield gauge("fourfold:prefix_tree_blocks", "Blocks in the prefix tree.", stats.tree_blocks)
        yield counter("fourfold:evicted_blocks", "Blocks evicted from the prefix tree.", stats.evicted_blocks)
        yield counter(
            "fourfold:copied_tokens",
            "Tokens not recomputed thanks to copies of partly shared blocks.",
            stats.copied_tokens,
        )
        for name, text in _TIER_GAUGES.items():
            yield gauge(f"fourfold:kv_tier_{name}", text, getattr(stats.tiers, name))
        for name, text in _TIER_COUNTERS.items():
            yield counter(f"fourfold:kv_tier_{name}", text, getattr(stats.tiers, name))
        yield self._by(
            "fourfold:preemptions", "Sequences preempted, by reason.", "reason", stats.preemptions_by_reason
        )
        yield self._by(
            "fourfold:cached_tokens",
            "Tokens found in the cache by tier, also after preemptions.",
            "tier",
            stats.cached_tokens_by_tier,
        )
        yield self._by(
            "fourfold:recomputed_tokens",
            "Tokens that a lower tier had, but that were computed because that is faster, by tier.",
            "tier",
            stats.recomputed_tokens_by_tier,
        )
        yield counter(
            "fourfold:prefill_tokens",
            "Tokens computed that were known before: of prompts, and again after preemptions.",
            stats.prefill_tokens,
        )
        yield counter("vllm:prompt_tokens", "Prompt tokens of requests.", stats.prompt_tokens)
        yield counter("vllm:generation_tokens", "Tokens generated.", stats.generation_tokens)
        yield counter(
            "vllm:prefix_cache_queries", "Prompt tokens looked up in the cache.", stats.prompt_tokens
        )
        yield counter(
            "vllm:prefix_cache_hits", "Prompt tokens found in the cache.", stats.cached_prompt_tokens
        )
        yield counter("fourfold:engine_steps", "Engine steps.", stats.step)
        yield counter("fourfold:aborted_requests", "Sequences aborted in the engine.", stats.aborted)
        yield counter("fourfold:finished_requests", "Sequences finished in the engine.", stats.finished)
        yield counter("fourfold:nan_requests", "Sequences failed for non-finite logits.", stats.nan_requests)
        yield counter(
            "fourfold:forced_tokens", "Tokens that a constraint left no choice for.", stats.forced_tokens
        )
        yield counter(
            "vllm:spec_decode_num_draft_tokens", "Tokens guessed by speculation.", stats.draft_tokens
        )
        yield counter(
            "vllm:spec_decode_num_accepted_tokens",
            "Guessed tokens that came true.",
            stats.accepted_draft_tokens,
        )
        yield counter(
            "fourfold:rejected_answers", "Answers that validation took back.", stats.rejected_answers
        )
        yield counter("fourfold:step_seconds", "Seconds spent in steps.", stats.step_seconds)
        yield counter("fourfold:backend_seconds", "Seconds of those in the backend.", stats.backend_seconds)
        yield gauge("fourfold:engine_rss_bytes", "Resident memory of the engine.", stats.rss_bytes)

    def _by(self, name: str, text: str, label: str, counts: Mapping[str, int]) -> CounterMetricFamily:
        family = CounterMetricFamily(name, text, labels=["model_name", label])
        for value, count in sorted(counts.items()):
            family.add_metric([self._name, value], count)
        return family

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._name], float(value))
        return family

    def _counter(self, name: str, text: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._name], float(value))
        return family

    def _histogram(self, histogram: Histogram) -> HistogramMetricFamily:
        family = HistogramMetricFamily(histogram.name, histogram.text, labels=["model_name"])
        buckets: list[tuple[str, float]] = []
        seen = 0
        for bound, count in zip([*map(float, histogram.bounds), "+Inf"], histogram.values, strict=True):
            seen += count
            buckets.append((str(bound), seen))
        family.add_metric([self._name], buckets, histogram.total)
        return family


def render(metrics: Metrics, model: ModelInfo, name: str, stats: EngineStats | None) -> bytes:
    """stats: None if the engine did not answer; its families are then missing rather than zero."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Snapshot(metrics, model, name, stats))
    text: bytes = generate_latest(registry)
    return text
