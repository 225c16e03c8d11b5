"""Requests whose prefix is on its way from disk: they wait outside the queue, as those that compile do."""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass

from fourfold.engine.cache import RadixCache
from fourfold.engine.recorder import Recorder
from fourfold.engine.tiers import Tiers
from fourfold.engine.tiers.tiers import Prefetch
from fourfold.types import EngineEvent, EngineRequest

MAX_WAIT = 2.0
"""Seconds a request waits for the disk; then it takes what came and computes the rest."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    request: EngineRequest
    prefetch: Prefetch
    until: float


class FetchQueue:
    def __init__(self, cache: RadixCache, tiers: Tiers) -> None:
        self._cache, self._tiers = cache, tiers
        self._waiting: list[_Waiting] = []

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def request_ids(self) -> list[str]:
        return [each.request.request_id for each in self._waiting]

    def add(self, request: EngineRequest, recorder: Recorder) -> bool:
        """Starts to fetch what the request can use. False if there is nothing to wait for, or computing it is
        faster, which is written down."""
        if request.sampling.prompt_logprobs is not None:
            return False
        tokens = array("i", request.prompt_ids)
        limit, size = len(tokens) - 1, self._cache.block_size
        context = self._cache.known(tokens, request.cache_salt, limit)

        def worth(blocks: int, from_disk: int) -> bool:
            rest = len(tokens) - context - blocks * size
            if self._tiers.choice.fetches(blocks, from_disk, context, rest):
                return True
            recorder.open(request).recomputed(from_disk * size, "disk")
            return False

        prefetch = self._tiers.prefetch(self._cache.lower_digests(tokens, request.cache_salt, limit), worth)
        if prefetch is None:
            return False
        self._waiting.append(_Waiting(request, prefetch, time.monotonic() + MAX_WAIT))
        return True

    def take(self) -> list[EngineRequest]:
        """Those that need not wait any more, in order of arrival here."""
        if not self._waiting:
            return []
        now = time.monotonic()
        ready = [each for each in self._waiting if each.prefetch.done.is_set() or now >= each.until]
        self._waiting = [each for each in self._waiting if each not in ready]
        return [each.request for each in ready]

    def wait(self, seconds: float) -> None:
        """Until the first of them is ready, or so long."""
        if self._waiting:
            self._waiting[0].prefetch.done.wait(seconds)

    def abort(self, request_id: str) -> EngineEvent | None:
        """The last event of a request that waits here; None if there is none of that id."""
        for each in self._waiting:
            if each.request.request_id == request_id:
                self._waiting.remove(each)
                return EngineEvent(request_id=request_id, finish_reason="abort")
        return None
