"""What changed in the prefix cache, for routers and other tiers that want to know what is where."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Literal

import msgspec

Tier = Literal["device"]
"""Where a block lives. More names come with more tiers."""

DIGEST_BYTES = 16


class BlockStored(msgspec.Struct, frozen=True, tag="stored", array_like=True):
    """A full block became reusable. digest names the whole prefix up to and with this block."""

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


KVEvent = BlockStored | BlockRemoved
KVEventSink = Callable[[KVEvent], None]


def root_digest(salt: str) -> bytes:
    """Digest of the empty prefix of one salt. BLAKE2b: the same in every process and machine."""
    return hashlib.blake2b(
        salt.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES, person=b"fourfold-root"
    ).digest()


def block_digest(parent: bytes, key: bytes) -> bytes:
    """Digest of a prefix: BLAKE2b of the parent's digest and the block's token ids (int32, native order)."""
    return hashlib.blake2b(parent + key, digest_size=DIGEST_BYTES, person=b"fourfold-block").digest()
