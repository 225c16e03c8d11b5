"""What the KV cache can be asked from outside, what it answers, and its events: records that cross processes.

Without NumPy and without the cache itself: the HTTP front imports this.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from fourfold.types import PinInfo

MAX_PAGE = 1024
"""Events that are given at once."""

Tier = Literal["device", "host", "disk"]
"""Where a block lives: the pool that is computed in, memory below it, disk."""


class BlockStored(msgspec.Struct, frozen=True, tag="stored", array_like=True):
    """A full block became reusable. digest names the whole prefix up to and with this block.

    salt: whose it is.  tokens: the block's own, not those before.
    """

    digest: bytes
    parent: bytes
    salt: str
    tokens: tuple[int, ...]
    tier: Tier = "device"


class BlockRemoved(msgspec.Struct, frozen=True, tag="removed", array_like=True):
    """The block of that prefix is gone from that tier."""

    digest: bytes
    salt: str
    tier: Tier = "device"


class BlockMoved(msgspec.Struct, frozen=True, tag="moved", array_like=True):
    """A block, stored before, is (or is no more) in a tier below the pool."""

    digest: bytes
    tier: Tier
    present: bool


KVEvent = BlockStored | BlockRemoved | BlockMoved


class EventPage(msgspec.Struct, kw_only=True):
    """epoch: of this engine process; numbers begin anew with another one.
    last: number of the last event there is.  lost: how many of those asked for are not kept any more.
    numbered: (number, event), ascending; numbers are missing only where events of others were left out.
    more: whether there are further ones after the last one given.
    """

    epoch: str
    last: int
    lost: int
    numbered: list[tuple[int, KVEvent]]
    more: bool


class PinPrefix(msgspec.Struct, tag="pin"):
    """owner: who may see and end the pin.  salt: whose cache the prefix is in."""

    owner: str
    salt: str
    name: str
    tokens: list[int]


class UnpinPrefix(msgspec.Struct, tag="unpin"):
    owner: str
    name: str


class ListPins(msgspec.Struct, tag="list_pins"):
    owner: str


class ReadEvents(msgspec.Struct, tag="read_events"):
    """See EventLog.read."""

    after: int
    limit: int
    salt: str | None


CacheOperation = PinPrefix | UnpinPrefix | ListPins | ReadEvents


class CacheOutcome(msgspec.Struct, omit_defaults=True):
    """pins: the one made, those ended, or all. refused: why not, and the field at fault."""

    pins: list[PinInfo] = []
    events: EventPage | None = None
    refused: str | None = None
    param: str | None = None
