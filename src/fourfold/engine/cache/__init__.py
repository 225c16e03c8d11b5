"""KV blocks: who owns which (ledger), and which prefixes are in them (radix tree)."""

from fourfold.engine.cache.events import BlockRemoved, BlockStored, KVEvent, KVEventSink
from fourfold.engine.cache.ledger import BlockState, Ledger, LedgerCounts, LedgerError
from fourfold.engine.cache.plain import PlainCache
from fourfold.engine.cache.radix import RadixCache
from fourfold.engine.cache.table import BlockTable, PrefixCache

__all__ = [
    "BlockRemoved", "BlockState", "BlockStored", "BlockTable", "KVEvent", "KVEventSink", "Ledger",
    "LedgerCounts", "LedgerError", "PlainCache", "PrefixCache", "RadixCache",
]  # fmt: skip
