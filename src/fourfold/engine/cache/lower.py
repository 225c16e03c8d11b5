"""What the prefix cache asks of the tiers below the pool."""

from __future__ import annotations

from typing import Protocol

from fourfold.engine.cache.moves import Moves
from fourfold.engine.cache.node import Node


class LowerTier(Protocol):
    """Keeps full blocks by their digests. Copies are queued as moves, so none of this waits for anything."""

    def stored(self, node: Node, moves: Moves) -> None:
        """A full block became known."""
        ...

    def leaving(self, node: Node, moves: Moves) -> None:
        """A full block is about to be evicted; its content is intact until the moves before it ran."""
        ...

    def forget(self, digest: bytes) -> None:
        """That content may be wrong: it must not come back."""
        ...

    def worth(self, blocks: int, context: int, rest: int) -> bool:
        """Whether to restore `blocks` blocks that begin behind `context` tokens, instead of computing them
        together with the `rest` tokens behind them."""
        ...

    def has(self, digest: bytes) -> bool:
        """Whether that content is here and can be had at once."""
        ...

    def restore(self, digest: bytes, block: int, moves: Moves) -> str:
        """Fills `block` with that content, which is here. The tier that it came from."""
        ...
