"""Requests whose constraints are being compiled, in a thread beside the steps."""

from __future__ import annotations

import logging
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

import msgspec

from fourfold.errors import EngineFaultError, FourfoldError, InvalidRequestError
from fourfold.grammar.compile import Compiler
from fourfold.types import Constraint, EngineEvent, EngineRequest

if TYPE_CHECKING:
    from fourfold.grammar.guide import Guide

logger = logging.getLogger("fourfold.engine")

LARGE = 64 * 1024
"""Characters of a grammar that may take seconds: 8,000 objects take two, and it grows with their square."""


class Compiled(msgspec.Struct, frozen=True):
    """A request whose compilation has ended, well or not."""

    request: EngineRequest
    future: Future[Guide]

    def guide(self) -> Guide:
        """Raises InvalidRequestError (the constraint's fault) or EngineFaultError (anything else)."""
        try:
            return self.future.result()
        except FourfoldError:
            raise
        except Exception as error:
            raise EngineFaultError(
                f"the constraint could not be compiled: {type(error).__name__}: {error}"
            ) from error


def _complain(warmed: Future[None]) -> None:
    error = None if warmed.cancelled() else warmed.exception()
    if error is not None:
        logger.warning("the tokenizer for constraints cannot be loaded: %s: %s", type(error).__name__, error)


class CompileQueue:
    """A thread compiles, mostly without the GIL, so no step waits for it; another compiles those that are
    large, so that nobody else waits for them."""

    def __init__(self, compiler: Compiler | None) -> None:
        """compiler: None if the engine cannot constrain answers."""
        self._compiler = compiler
        self._pending: dict[str, Compiled] = {}
        self._thread = ThreadPoolExecutor(1, "fourfold-grammar")
        self._large = ThreadPoolExecutor(1, "fourfold-large-grammar")

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, request: EngineRequest, constraint: Constraint) -> Guide | None:
        """A guide at once if that constraint was compiled before; otherwise it comes with `take`.

        Raises InvalidRequestError.
        """
        if self._compiler is None:
            raise InvalidRequestError(
                "this engine was started without a tokenizer and cannot constrain answers", constraint.param
            )
        if request.request_id in self._pending:
            raise InvalidRequestError(f"request id {request.request_id!r} is already in use", "request_id")
        guide = self._compiler.cached(constraint, request.cache_salt)
        if guide is None:
            thread = self._large if len(constraint.grammar) > LARGE else self._thread
            future = thread.submit(self._compiler.compile, constraint, request.cache_salt)
            self._pending[request.request_id] = Compiled(request, future)
        return guide

    def warm(self) -> None:
        """Loads in the background what the first constraint would have to wait for."""
        if self._compiler is not None:
            self._thread.submit(self._compiler.warm).add_done_callback(_complain)

    def take(self) -> list[Compiled]:
        """Those that are done since the last call, in the order they came."""
        done = [item for item in self._pending.values() if item.future.done()]
        for item in done:
            del self._pending[item.request.request_id]
        return done

    def wait(self, seconds: float) -> None:
        """Until one is done, at most `seconds`."""
        if self._pending:
            wait([item.future for item in self._pending.values()], seconds, FIRST_COMPLETED)

    def abort(self, request_id: str) -> EngineEvent | None:
        """None if no request of that id is being compiled."""
        item = self._pending.pop(request_id, None)
        if item is None:
            return None
        item.future.cancel()
        return EngineEvent(request_id=request_id, finish_reason="abort")

    def close(self) -> None:
        for thread in (self._thread, self._large):
            thread.shutdown(wait=True, cancel_futures=True)
