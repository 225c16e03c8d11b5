"""The KV cache as the engine's memory: pool and tree, tiers below, pins, events; one object for the loop."""

from __future__ import annotations

from array import array

import msgspec
import zmq

from fourfold.config import EngineConfig
from fourfold.engine.batch import Backend
from fourfold.engine.cache import EventLog, KVEventSink, PlainCache, PrefixCache, RadixCache
from fourfold.engine.cache.pins import Pins
from fourfold.engine.fetching import FetchQueue
from fourfold.engine.operations import (
    BlockMoved,
    CacheOperation,
    CacheOutcome,
    KVEvent,
    ListPins,
    ReadEvents,
    UnpinPrefix,
)
from fourfold.engine.recorder import Recorder
from fourfold.engine.tiers import Tiers, make_tiers
from fourfold.engine.tiers.choice import Recompute
from fourfold.errors import ConfigError, InvalidRequestError
from fourfold.types import EngineEvent, EngineRequest, TierStats

PUBLISH_HIGH_WATER = 4096
"""Messages kept for a slow subscriber; it sees a gap in their numbers after that."""


class KVCache:
    """Used by the engine's thread alone, but for `stats` of the tiers."""

    def __init__(
        self,
        config: EngineConfig,
        num_blocks: int,
        backend: Backend,
        identity: str,
        sink: KVEventSink | None = None,
    ) -> None:
        """identity: see ModelInfo.kv_identity. sink: told of every event, beside the log.

        Raises ConfigError."""
        self.events = EventLog()
        self._sink = sink
        self._published: zmq.Socket[bytes] | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self.tiers: Tiers | None = None
        self.fetching: FetchQueue | None = None
        self.pins: Pins | None = None
        self.cache: PrefixCache
        if config.prefix_caching:
            if _wants_tiers(config):
                self.tiers = make_tiers(config, backend.block_size, backend.block_bytes, identity)
            self.cache = radix = RadixCache(
                num_blocks,
                backend.block_size,
                self._on_event,
                lower=self.tiers,
                policy=config.radix_eviction_policy,
            )
            self.pins = Pins(radix, config.kv_pinned_share)
            if self.tiers is not None:
                self.fetching = FetchQueue(radix, self.tiers)
        elif _wants_tiers(config):
            raise ConfigError("KV tiers need the prefix cache; leave --no-prefix-caching out")
        else:
            self.cache = PlainCache(num_blocks, backend.block_size)
        if config.kv_events_endpoint is not None:
            self._published = _publisher(config.kv_events_endpoint)

    @property
    def num_fetching(self) -> int:
        """Requests that wait for the disk."""
        return 0 if self.fetching is None else len(self.fetching)

    def compares_with(self, recompute: Recompute) -> None:
        """recompute: what the cost of fetching from a lower tier is held against."""
        if self.tiers is not None:
            self.tiers.choice.recompute = recompute

    def fetch(self, request: EngineRequest, recorder: Recorder) -> bool:
        """See FetchQueue.add."""
        return self.fetching is not None and self.fetching.add(request, recorder)

    def abort(self, request_id: str) -> EngineEvent | None:
        """See FetchQueue.abort."""
        return None if self.fetching is None else self.fetching.abort(request_id)

    def flush(self, backend: Backend) -> None:
        """Does the copies that were decided on. Before each step of the backend, and after its results are
        taken, so that an engine with nothing to do owes nothing."""
        self.cache.moves.run(backend)
        if self.tiers is not None:
            changes = self.tiers.changes
            while changes:
                digest, tier, present = changes.popleft()
                self._on_event(BlockMoved(digest, "disk" if tier == "disk" else "host", present))

    def operate(self, operation: CacheOperation) -> CacheOutcome:
        if isinstance(operation, ReadEvents):
            return CacheOutcome(events=self.events.read(operation.after, operation.limit, operation.salt))
        if self.pins is None:
            return CacheOutcome(refused="this engine has no prefix cache (--no-prefix-caching)")
        if isinstance(operation, ListPins):
            return CacheOutcome(self.pins.of(operation.owner))
        if isinstance(operation, UnpinPrefix):
            found = [pin for pin in self.pins.of(operation.owner) if pin.name == operation.name]
            self.pins.unpin(operation.owner, operation.name)
            return CacheOutcome(found)
        try:
            tokens = array("i", operation.tokens)
            return CacheOutcome([self.pins.pin(operation.owner, operation.salt, operation.name, tokens)])
        except InvalidRequestError as error:
            return CacheOutcome(refused=str(error), param=error.param)
        except OverflowError:
            return CacheOutcome(refused="token ids must fit 32 bits", param="prompt")

    def stats(self) -> TierStats:
        return TierStats() if self.tiers is None else self.tiers.stats()

    def close(self) -> None:
        if self.tiers is not None:
            self.tiers.close()
        if self._published is not None:
            self._published.close(0)

    def _on_event(self, event: KVEvent) -> None:
        self.events.append(event)
        if self._sink is not None:
            self._sink(event)
        if self._published is not None:
            # Topic, number (big-endian), event: a subscriber that misses a number asks for it over HTTP.
            number = self.events.last.to_bytes(8, "big")
            parts = [b"kv-events", number, self._encoder.encode((self.events.epoch, event))]
            self._published.send_multipart(parts, zmq.NOBLOCK)


def _wants_tiers(config: EngineConfig) -> bool:
    return bool(config.kv_host_cache_gib) or config.kv_disk_cache_dir is not None


def _publisher(endpoint: str) -> zmq.Socket[bytes]:
    """PUB drops for a subscriber that does not keep up and never blocks."""
    port = endpoint.rpartition(":")[2]
    if endpoint.startswith("tcp://") and port.isascii() and port.isdigit() and not int(port[:6]) < 2**16:
        # ZeroMQ takes what is left of the number in 16 bits.
        raise ConfigError(f"kv_events_endpoint {endpoint!r} cannot be bound: ports end at {2**16 - 1}")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    socket: zmq.Socket[bytes] = context.socket(zmq.PUB)
    socket.sndhwm = PUBLISH_HIGH_WATER
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        socket.close(0)
        raise ConfigError(f"kv_events_endpoint {endpoint!r} cannot be bound: {error}") from error
    return socket
