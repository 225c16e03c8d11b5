"""The masks of one batch, computed in a thread while the backend computes the logits they are for."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec
import numpy as np
from numpy.typing import NDArray

from fourfold.grammar.guide import Guide


class Guided(msgspec.Struct, frozen=True):
    """The rows of one sequence: a mask after the first places[i] tokens of `draft` for each i."""

    guide: Guide
    draft: Sequence[int]
    places: Sequence[int]


class Masks:
    """rows: uint32 [n, ceil(vocab / 32)], bit set = token allowed; final once ready[0] is 1.
    ready: uint8 [1].

    A backend calls `wait`, or reads `rows` itself after `ready`, which is set in any case: the work of a mask
    is bounded (see grammar.compile.parser_limits), and a guide that fails leaves rows that allow nothing.
    Until then nobody else may use the guides.
    """

    __slots__ = ("_future", "_guided", "ready", "rows")

    def __init__(self, guided: Sequence[Guided]) -> None:
        self._guided = guided
        self.rows: NDArray[np.uint32] = np.zeros(
            (sum(len(one.places) for one in guided), guided[0].guide.words), np.uint32
        )
        self.ready: NDArray[np.uint8] = np.zeros(1, np.uint8)
        self._future: Future[None] | None = None

    def start(self, thread: ThreadPoolExecutor) -> None:
        """Begins in `thread`. Without this call the first `wait` computes them."""
        self._future = thread.submit(self._fill)

    def wait(self) -> NDArray[np.uint32]:
        """The finished rows."""
        if self._future is not None:
            self._future.result()
        elif not self.ready[0]:
            self._fill()
        return self.rows

    def _fill(self) -> None:
        at = 0
        try:
            for one in self._guided:
                end = at + len(one.places)
                try:
                    one.guide.fill_masks(self.rows[at:end], one.draft, one.places)
                except Exception as error:
                    one.guide.error = f"{type(error).__name__}: {error}"
                    self.rows[at:end] = 0
                at = end
        finally:
            self.ready[0] = 1
