"""Which sequences an answer had and whose it is, and what became of them: the JSON of a trace."""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import msgspec

from fourfold.timeline import REASONS, Timeline
from fourfold.types import FinishReason

MAX_RECORDS = 2048
"""Answers that are remembered; the engine keeps fewer timelines."""

_GROUP = re.compile(r"([0-9a-f]{32})(?:-(\d{1,6}))?")


class Record(msgspec.Struct, frozen=True):
    """One HTTP request for answers. Its sequences are called `id`-0, `id`-1 and so on in the engine.

    id: what the response's id ends with.  tenant: whose it is.  request_id: the X-Request-Id header.
    ended: how each sequence ended, as its client sees it: a stop string is found after the engine.
    """

    id: str
    tenant: str
    request_id: str
    sequences: int
    created: float = msgspec.field(default_factory=time.time)
    ended: dict[int, FinishReason] = msgspec.field(default_factory=dict)

    @property
    def sequence_ids(self) -> list[str]:
        return [f"{self.id}-{index}" for index in range(self.sequences)]


class Records:
    """The last MAX_RECORDS requests of one application."""

    def __init__(self) -> None:
        self._by_id: OrderedDict[str, Record] = OrderedDict()
        self._by_request: dict[tuple[str, str], str] = {}

    def add(self, record: Record) -> None:
        self._by_id[record.id] = record
        self._by_request[record.tenant, record.request_id] = record.id
        while len(self._by_id) > MAX_RECORDS:
            _, old = self._by_id.popitem(last=False)
            key = (old.tenant, old.request_id)
            if self._by_request.get(key) == old.id:
                del self._by_request[key]

    def find(self, name: str, tenant: str) -> Record | None:
        """By a response's id, a sequence's id or an X-Request-Id. None if it is not there, or not theirs."""
        end = _GROUP.fullmatch(re.split("[-_]", name, maxsplit=1)[-1]) or _GROUP.fullmatch(name)
        record = None if end is None else self._by_id.get(end[1])
        if record is None:
            record = self._by_id.get(self._by_request.get((tenant, name), ""))
        return record if record is not None and record.tenant == tenant else None

    def of_sequence(self, sequence_id: str) -> Record | None:
        return self._by_id.get(sequence_id.rpartition("-")[0])


def trace_object(record: Record, timelines: Sequence[Timeline | None]) -> dict[str, Any]:
    """JSON of a trace; times in seconds. A sequence without a timeline was not started, or is forgotten."""
    return {
        "id": record.id,
        "object": "request.trace",
        "request_id": record.request_id,
        "created": record.created,
        "sequences": [
            _sequence(index, timeline, record.ended.get(index)) for index, timeline in enumerate(timelines)
        ],
    }


def _sequence(index: int, timeline: Timeline | None, ended: FinishReason | None) -> dict[str, Any]:
    if timeline is None:
        return {"index": index, "state": "unknown", "finish_reason": ended}
    data: dict[str, Any] = msgspec.to_builtins(timeline)
    del data["request_id"]
    for event in data["events"]:
        meaning = REASONS.get(event.get("reason", ""))
        if meaning is not None:
            event["meaning"] = meaning
    data["finish_reason"] = ended or timeline.finish_reason
    return {"index": index, **data}
