"""What a step computes that others want too: they wait for it instead of computing it again."""

from __future__ import annotations

from fourfold.engine.cache.node import common_tokens
from fourfold.engine.cache.table import Unknown


class InFlight:
    """The blocks that sequences begin or go on with in one step."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._keys: dict[tuple[str, int], list[bytes]] = {}

    def __bool__(self) -> bool:
        return bool(self._keys)

    def add(self, unknown: Unknown) -> None:
        self._keys.setdefault(unknown.place, []).append(unknown.key)

    def worth_waiting(self, unknown: Unknown | None, length: int) -> bool:
        """Whether a sequence of `length` tokens should wait a step: its next block is being computed whole,
        or so much of it that half of the sequence's work is spared."""
        if unknown is None:
            return False
        least = min(self._block_size, (length - unknown.start + 1) // 2)
        keys = self._keys.get(unknown.place, ())
        return any(common_tokens(key, unknown.key) >= least for key in keys)
