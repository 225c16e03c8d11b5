"""KV blocks: who owns which (ledger), and which prefixes are in them (radix tree)."""

from fourfold.engine.cache.events import EventLog, KVEventSink
from fourfold.engine.cache.ledger import BlockState, Ledger, LedgerCounts, LedgerError
from fourfold.engine.cache.moves import BlockStore, Moves
from fourfold.engine.cache.plain import PlainCache
from fourfold.engine.cache.radix import RadixCache
from fourfold.engine.cache.table import BlockTable, PrefixCache, Unknown

__all__ = [
    "BlockState", "BlockStore", "BlockTable", "EventLog", "KVEventSink", "Ledger", "LedgerCounts",
    "LedgerError", "Moves", "PlainCache", "PrefixCache", "RadixCache", "Unknown",
]  # fmt: skip
