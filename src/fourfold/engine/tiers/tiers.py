"""The tiers below the pool as the prefix cache and the engine see them.

A full block goes to host memory when it is evicted, and (with a disk) also when it becomes known, so that it
outlives the process. The engine's thread only copies between pool and host memory; packing, checking, reading
and writing files is done by two threads with bounded queues. What does not fit a queue is left out and
counted: the tokens are computed again some day.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import numpy as np

from fourfold.config import EngineConfig
from fourfold.engine.cache.moves import BlockStore, Moves
from fourfold.engine.cache.node import Node
from fourfold.engine.tiers.choice import FetchChoice
from fourfold.engine.tiers.codec import Bytes, Codec, Int8, Raw
from fourfold.engine.tiers.disk import DiskStore
from fourfold.engine.tiers.host import HostPool
from fourfold.errors import ConfigError
from fourfold.types import TierStats

log = logging.getLogger("fourfold.engine")

MAX_QUEUED = 128
"""Blocks that may wait to be packed or written, and prefetches that may wait to be read."""

STAGING_SLOTS = 256
"""Slots of host memory where only a disk was asked for: what is on its way there and back."""

TierChange = tuple[bytes, str, bool]
"""Digest, tier, whether it is there now."""


class Prefetch:
    """Blocks of one prompt on their way from disk to host memory. done: no more will come."""

    def __init__(self, digests: list[bytes]) -> None:
        self.digests = digests
        self.done = threading.Event()


class Tiers:
    """A LowerTier. One thread calls it; it has two of its own."""

    def __init__(
        self, block_bytes: int, slots: int, codec: Codec, disk: DiskStore | None, choice: FetchChoice
    ) -> None:
        """slots: of host memory, one block each."""
        self.choice = choice
        self.changes: deque[TierChange] = deque(maxlen=1 << 16)
        self._block_bytes = block_bytes
        self._codec, self._disk = codec, disk
        self._host = HostPool(slots, codec.size, lambda digest: self.changes.append((digest, "host", False)))
        self._exact = isinstance(codec, Raw)
        self._writes: queue.Queue[Callable[[], None] | None] = queue.Queue(MAX_QUEUED)
        self._reads: queue.Queue[Prefetch | None] = queue.Queue(MAX_QUEUED)
        self._stopped = threading.Event()
        self._forgotten: set[bytes] = set()
        """Those that are still to be removed from disk."""
        self.saved_blocks = self.skipped_blocks = self.restored_blocks = self.forgone_blocks = 0
        self._threads = [
            threading.Thread(target=self._write_loop, name="kv-writer", daemon=True),
            threading.Thread(target=self._read_loop, name="kv-reader", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def stored(self, node: Node, moves: Moves) -> None:
        if self._disk is not None and node.digest not in self._disk:
            self._save(node, moves, to_disk=True)

    def leaving(self, node: Node, moves: Moves) -> None:
        if node.digest in self._host:
            return
        if self.choice.saves((node.depth - 1) * self.choice.block_size):
            self._save(node, moves, to_disk=False)
        else:
            self.forgone_blocks += 1

    def forget(self, digest: bytes) -> None:
        self._host.discard(digest)
        disk = self._disk
        if disk is not None:
            # In the writer's thread, so that it comes after a write that is under way.
            self._forgotten.add(digest)
            removal = partial(self._remove, digest, disk)
            try:
                self._writes.put_nowait(removal)
            except queue.Full:
                removal()

    def worth(self, blocks: int, context: int, rest: int) -> bool:
        return self.choice.fetches(blocks, 0, context, rest)

    def has(self, digest: bytes) -> bool:
        return digest in self._host

    def restore(self, digest: bytes, block: int, moves: Moves) -> str:
        held = self._host.hold(digest)
        if held is None:
            raise KeyError(f"block {digest.hex()} is not in host memory")
        content, source = held

        def load(store: BlockStore) -> None:
            started = time.perf_counter()
            try:
                if self._exact:
                    store.write_block(block, content)
                else:
                    raw = np.empty(self._block_bytes, np.uint8)
                    self._codec.decode(content, raw)
                    store.write_block(block, raw)
                self.choice.measured("restore", time.perf_counter() - started)
            finally:
                self._host.let_go(digest)

        moves.call(load)
        self.restored_blocks += 1
        return source

    def prefetch(
        self, digests: Iterable[bytes], worth: Callable[[int, int], bool] = lambda blocks, from_disk: True
    ) -> Prefetch | None:
        """Starts to fetch a prompt's blocks, given in order, up to the first that no tier has. None if there
        is nothing to wait for. worth: whether to fetch so many blocks, so many of which are on disk alone."""
        if self._disk is None:
            return None
        wanted: list[bytes] = []
        missing = 0
        for digest in digests:
            here = digest in self._host
            on_disk = digest in self._disk and digest not in self._forgotten
            if not (here or on_disk) or len(wanted) >= self._host.slots // 2:
                break
            wanted.append(digest)
            missing += not here
        if not missing or not worth(len(wanted), missing):
            return None
        found = Prefetch(wanted)
        try:
            self._reads.put_nowait(found)
        except queue.Full:
            return None
        return found

    def stats(self) -> TierStats:
        disk = self._disk
        return TierStats(
            host_blocks=len(self._host),
            host_capacity=self._host.slots,
            saved_blocks=self.saved_blocks,
            skipped_blocks=self.skipped_blocks,
            restored_blocks=self.restored_blocks,
            forgone_blocks=self.forgone_blocks,
            save_seconds=self.choice.seconds("save"),
            restore_seconds=self.choice.seconds("restore"),
            disk_read_seconds=self.choice.seconds("read"),
            queued_writes=self._writes.qsize(),
            queued_prefetches=self._reads.qsize(),
            disk_blocks=0 if disk is None else len(disk),
            disk_bytes=0 if disk is None else disk.used_bytes,
            disk_read_blocks=0 if disk is None else disk.counters.read_blocks,
            disk_written_blocks=0 if disk is None else disk.counters.written_blocks,
            disk_evicted_blocks=0 if disk is None else disk.counters.evicted_blocks,
            disk_bad_files=0 if disk is None else disk.counters.bad_files,
            disk_write_errors=0 if disk is None else disk.counters.write_errors,
        )

    def close(self, seconds: float = 1.0) -> None:
        """Writes for at most so long what is waiting to be written; the rest is lost."""
        deadline = time.monotonic() + seconds
        while not self._writes.empty() and time.monotonic() < deadline:
            time.sleep(0.005)
        self._stopped.set()
        for jobs in (self._writes, self._reads):
            with contextlib.suppress(queue.Full):  # the loop looks at _stopped after its next job
                jobs.put_nowait(None)
        for thread in self._threads:
            thread.join(max(0.1, deadline - time.monotonic()))

    def _save(self, node: Node, moves: Moves, *, to_disk: bool) -> None:
        digest, block = node.digest, node.block
        moves.call(lambda store: self._saving(store, digest, block, to_disk))

    def _saving(self, store: BlockStore, digest: bytes, block: int, to_disk: bool) -> None:
        """Takes the block's content out of the pool, now; what else there is to do is done elsewhere."""
        if digest in self._host:
            if to_disk:
                self._queue(lambda: self._to_disk(digest))
            return
        started = time.perf_counter()
        if self._exact:
            slot = self._host.reserve(digest)
            if slot is None:
                self.skipped_blocks += 1
                return
            store.read_block(block, slot)
            self.choice.measured("save", time.perf_counter() - started)
            self._host.commit(digest)
            self._saved(digest)
            if to_disk:
                self._queue(lambda: self._to_disk(digest))
            return
        if self._writes.full():
            self.skipped_blocks += 1
            return
        raw = np.empty(self._block_bytes, np.uint8)
        store.read_block(block, raw)
        self.choice.measured("save", time.perf_counter() - started)
        self._queue(lambda: self._pack(digest, raw, to_disk))

    def _saved(self, digest: bytes) -> None:
        self.saved_blocks += 1
        self.changes.append((digest, "host", True))

    def _queue(self, job: Callable[[], None]) -> None:
        try:
            self._writes.put_nowait(job)
        except queue.Full:
            self.skipped_blocks += 1

    def _pack(self, digest: bytes, raw: Bytes, to_disk: bool) -> None:
        slot = self._host.reserve(digest)
        if slot is None:
            self.skipped_blocks += 1
            return
        self._codec.encode(raw, slot)
        self._host.commit(digest)
        self._saved(digest)
        if to_disk:
            self._to_disk(digest)

    def _remove(self, digest: bytes, disk: DiskStore) -> None:
        if digest in disk:
            disk.remove(digest)
            self.changes.append((digest, "disk", False))
        self._forgotten.discard(digest)

    def _to_disk(self, digest: bytes) -> None:
        if self._disk is None:
            return
        held = self._host.hold(digest)
        if held is None:
            self.skipped_blocks += 1  # thrown out before its turn came
            return
        try:
            if self._disk.write(digest, held[0]):
                self.changes.append((digest, "disk", True))
        finally:
            self._host.let_go(digest)

    def _fetch(self, wanted: Prefetch, disk: DiskStore) -> None:
        for digest in wanted.digests:
            if digest in self._host:
                continue
            slot = None if digest in self._forgotten else self._host.reserve(digest, source="disk")
            if slot is None:
                break
            started = time.perf_counter()
            if not disk.read(digest, slot):
                self._host.cancel(digest)
                break
            self.choice.measured("read", time.perf_counter() - started)
            self._host.commit(digest)

    def _write_loop(self) -> None:
        # Linux gives each thread a niceness of its own: computing comes first.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        while not self._stopped.is_set():
            job = self._writes.get()
            if job is not None:
                self._guarded(job)

    def _read_loop(self) -> None:
        while not self._stopped.is_set():
            wanted = self._reads.get()
            if wanted is not None and self._disk is not None:
                self._guarded(partial(self._fetch, wanted, self._disk))
                wanted.done.set()

    def _guarded(self, job: Callable[[], None]) -> None:
        """One block that fails must not end the thread that all the others need."""
        try:
            job()
        except Exception:
            self.skipped_blocks += 1
            log.exception("a KV block could not be moved between tiers")


def make_tiers(config: EngineConfig, block_size: int, block_bytes: int, identity: str) -> Tiers:
    """The tiers that the configuration asks for. Raises ConfigError for what cannot be had.

    identity: of model, artefact, dtypes and instruction set: blocks of another one mean something else.
    """
    codec: Codec = Raw(block_bytes)
    if config.kv_offload_compression == "int8":
        if config.kv_cache_dtype != "bfloat16":
            raise ConfigError(
                "kv_offload_compression int8 packs bfloat16 blocks, but kv_cache_dtype is "
                f"{config.kv_cache_dtype}"
            )
        codec = Int8(block_bytes)
    slots = STAGING_SLOTS
    if config.kv_host_cache_gib:
        slots = int(config.kv_host_cache_gib * 2**30) // codec.size
        if slots < 1:
            raise ConfigError(
                f"kv_host_cache_gib {config.kv_host_cache_gib:g} holds no KV block of {codec.size} bytes"
            )
    disk = None
    if config.kv_disk_cache_dir is not None:
        disk = DiskStore(
            Path(config.kv_disk_cache_dir).expanduser(),
            f"{identity}|{codec.name}",
            codec.size,
            int(config.kv_disk_cache_gib * 2**30),
        )
    return Tiers(block_bytes, slots, codec, disk, FetchChoice(block_size))
