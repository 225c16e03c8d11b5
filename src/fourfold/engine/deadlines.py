"""When requests must have begun to answer, and when they must have ended."""

from __future__ import annotations

import heapq

from fourfold.engine.sequence import Sequence, SequenceState


class Deadlines:
    """Times are seconds of the clock that EngineRequest.arrival is of."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, bool, Sequence]] = []

    def add(self, seq: Sequence, now: float) -> None:
        request = seq.request
        since = request.arrival or now
        for limit, first_token in ((request.timeout, False), (request.ttft_timeout, True)):
            if limit is not None:
                heapq.heappush(self._heap, (since + limit, seq.rank[2], first_token, seq))

    def passed(self, now: float) -> list[tuple[Sequence, str]]:
        """Sequences that are too late, each once, and what to tell who asked."""
        heap = self._heap
        late: dict[Sequence, str] = {}
        while heap and heap[0][0] <= now:
            _, _, first_token, seq = heapq.heappop(heap)
            if seq.state != SequenceState.FINISHED and not (first_token and seq.output_len):
                late.setdefault(seq, _message(seq, first_token))
        return list(late.items())

    def prune(self, open_sequences: int) -> None:
        """Forgets what has ended, when that is most of it."""
        if len(self._heap) > 64 + 4 * open_sequences:
            self._heap = [entry for entry in self._heap if entry[3].state != SequenceState.FINISHED]
            heapq.heapify(self._heap)


def _message(seq: Sequence, first_token: bool) -> str:
    if first_token:
        return (
            f"no token within {seq.request.ttft_timeout:g} s (ttft_timeout): the request was "
            f"{'being computed' if seq.state == SequenceState.RUNNING else 'still waiting'}; "
            "allow more time, or send it again when there is less load"
        )
    return (
        f"the answer was not complete within {seq.request.timeout:g} s (timeout): {seq.output_len} tokens "
        "had been generated; allow more time, or ask for fewer tokens"
    )
