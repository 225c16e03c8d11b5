"""The engine as the server and the offline API see it: one protocol, local, in another process or remote."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from fourfold.engine.operations import CacheOperation, CacheOutcome
from fourfold.timeline import EngineView, Timeline
from fourfold.types import EngineEvent, EngineRequest, EngineStats, ModelInfo


class EngineClient(Protocol):
    """Who submits owns the iterator; leaving it early (aclose, cancel) aborts the request in the engine."""

    @property
    def model(self) -> ModelInfo: ...

    def submit(self, request: EngineRequest) -> AsyncIterator[EngineEvent]:
        """Events of one sequence; the last one has a finish_reason.

        Raises InvalidRequestError (does not fit), OverloadedError (queue full), DeadlineError (cannot be
        answered in the time it allows), EngineDeadError (engine died
        after something was sent; a request nothing was sent for is retried once on the new engine).
        """
        ...

    async def abort(self, request_id: str) -> None: ...

    async def stats(self) -> EngineStats: ...

    async def timelines(self, request_ids: Sequence[str]) -> list[Timeline | None]:
        """Of open requests and of the last finished ones; None where the engine has none (any more).

        Raises EngineDeadError. Comes when the running step ends.
        """
        ...

    async def view(self, salts: Sequence[str] | None) -> EngineView:
        """The engine as it is when the running step ends. salts: whose prefixes it may name; None: all.

        Raises EngineDeadError.
        """
        ...

    async def operate(self, operation: CacheOperation) -> CacheOutcome:
        """Pins a prefix, ends or lists pins, or reads the log of KV events.

        Raises EngineDeadError. Comes when the running step ends. Pins, and the numbers of events, end with
        the engine's process.
        """
        ...

    async def healthy(self) -> tuple[bool, str]:
        """True when the engine is alive and, if it has work, making progress; else False and why."""
        ...

    async def close(self) -> None: ...
