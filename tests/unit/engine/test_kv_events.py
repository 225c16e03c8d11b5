"""The stream of KV events: complete, in order, of one's own salt; and whoever misses some can tell which."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.config import EngineConfig
from fourfold.engine import kv as kv_module
from fourfold.engine.cache import EventLog, RadixCache
from fourfold.engine.kv import KVCache
from fourfold.engine.local import ThreadedEngine
from fourfold.engine.operations import (
    BlockMoved,
    BlockRemoved,
    BlockStored,
    CacheOutcome,
    KVEvent,
    ListPins,
    PinPrefix,
    ReadEvents,
    UnpinPrefix,
)
from fourfold.engine.remote import RemoteEngine
from fourfold.errors import ConfigError, EngineDeadError

from .fake_backend import FakeBackend
from .helpers import make_engine, request
from .test_cache import fill
from .test_process import _import_path, engine, until  # noqa: F401  (a fixture that applies by itself)
from .test_questions import collect


def _event(kind: int, salt: str) -> KVEvent:
    if kind == 0:
        return BlockStored(b"d", b"p", salt, (1, 2))
    return BlockRemoved(b"d", salt) if kind == 1 else BlockMoved(b"d", "disk", True)


@given(
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from("ab")), max_size=40),
    st.integers(0, 50), st.integers(1, 5), st.sampled_from(["a", "b", None]),
)  # fmt: skip
@settings(deadline=None)
def test_pages_hold_all_that_is_kept_and_say_what_is_lost(
    made: list[tuple[int, str]], after: int, limit: int, salt: str | None
) -> None:
    log = EventLog(size=10)
    numbered = []
    for kind, whose in made:
        log.append(_event(kind, whose))
        numbered.append((len(numbered) + 1, _event(kind, whose)))
    kept = numbered[-10:]
    wanted = [
        (number, event)
        for number, event in kept
        if number > after and (salt is None or (not isinstance(event, BlockMoved) and event.salt == salt))
    ]
    page = log.read(after, limit, salt)
    assert page.lost == sum(number > after for number, _ in numbered[:-10])
    seen = list(page.numbered)
    while page.more:
        assert len(page.numbered) == limit
        page = log.read(seen[-1][0], limit, salt)
        assert page.lost == 0
        seen += page.numbered
    assert seen == wanted
    assert page.last == len(made)


def test_what_the_events_say_is_what_is_cached() -> None:
    """A router's copy of the tree, made of events alone."""
    log = EventLog()
    cache = RadixCache(12, 2, log.append)
    for i in range(40):
        cache.release(fill(cache, array("i", [i % 3, 1, i % 5, 2, i % 7, i % 2]), "ab"[i % 2]))
    for salt in "ab":
        blocks: dict[bytes, BlockStored] = {}
        for _, event in log.read(0, 10_000, salt).numbered:
            if isinstance(event, BlockStored):
                assert event.digest not in blocks
                blocks[event.digest] = event
            else:
                assert isinstance(event, BlockRemoved)
                del blocks[event.digest]
        there = {node.digest for root in cache.roots if root.salt == salt for node in root.walk()}
        assert set(blocks) == there
        # Leaves go first, so the parent of what is there is there too, or is the root.
        assert len({event.parent for event in blocks.values()} - set(blocks)) <= 1


class _Subscriber:
    def __init__(self, endpoint: str, high_water: int = 1000) -> None:
        self.socket = zmq.Context.instance().socket(zmq.SUB)
        self.socket.rcvhwm = high_water
        self.socket.rcvbuf = 4096
        self.socket.subscribe(b"kv-events")
        self.socket.connect(endpoint)
        self._decoder = msgspec.msgpack.Decoder(tuple[str, KVEvent])

    def all(self, patience: int = 200) -> list[tuple[int, str, KVEvent]]:
        """What has come, until nothing comes for so many milliseconds."""
        found = []
        while self.socket.poll(patience):
            topic, number, data = self.socket.recv_multipart()
            assert topic == b"kv-events"
            epoch, event = self._decoder.decode(data)
            found.append((int.from_bytes(number, "big"), epoch, event))
        return found


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/events"


def _kv(endpoint: str) -> KVCache:
    config = EngineConfig(model="", kv_events_endpoint=endpoint)
    return KVCache(config, 64, FakeBackend(block_size=2), "identity")


def _store(kv: KVCache, number: int) -> None:
    """One event or more."""
    assert isinstance(kv.cache, RadixCache)
    kv.cache.release(fill(kv.cache, array("i", [number, 1]), "s"))


def _joined(kv: KVCache, subscriber: _Subscriber) -> int:
    """Events made until the first came through: who subscribes late misses the beginning."""
    for number in range(1000):
        _store(kv, number)
        if subscriber.socket.poll(20):
            return number + 1
    raise AssertionError("nothing came")


def test_a_subscriber_gets_every_event_with_its_number(endpoint: str) -> None:
    kv = _kv(endpoint)
    subscriber = _Subscriber(endpoint)
    made = _joined(kv, subscriber)
    for number in range(200):
        _store(kv, 10_000 + made + number)
    got = subscriber.all()
    numbers = [number for number, _, _ in got]
    assert numbers == list(range(numbers[0], kv.events.last + 1))
    assert {epoch for _, epoch, _ in got} == {kv.events.epoch}
    # The same events as the log has under the same numbers.
    page = kv.operate(ReadEvents(numbers[0] - 1, 1024, None)).events
    assert page is not None
    assert page.numbered == [(number, event) for number, _, event in got]
    subscriber.socket.close(0)
    kv.close()


def test_a_slow_subscriber_sees_the_gap_and_reads_it_elsewhere(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_module, "PUBLISH_HIGH_WATER", 4)
    kv = _kv(endpoint)
    kv.events = EventLog(size=20_000)
    slow = _Subscriber(endpoint, high_water=1)
    _joined(kv, slow)
    for number in range(8000):
        _store(kv, 10_000 + number)
    # The publisher did not wait for it. What is published now finds it with room again.
    before = {number: event for number, _, event in slow.all()}
    _store(kv, 1)
    after = {number: event for number, _, event in slow.all()}
    got = before | after
    numbers = sorted(got)
    gaps = [(a, b) for a, b in itertools.pairwise(numbers) if b != a + 1]
    assert gaps, "nothing was dropped"
    for a, b in gaps:
        at = a
        while at < b - 1:
            page = kv.operate(ReadEvents(at, min(1024, b - 1 - at), None)).events
            assert page is not None
            assert page.lost == 0
            got.update(page.numbered)
            at = page.numbered[-1][0]
    assert sorted(got) == list(range(numbers[0], kv.events.last + 1))
    slow.socket.close(0)
    kv.close()


@pytest.mark.parametrize("bad", ["nonsense", "tcp://127.0.0.1:99999", "ipc:///no/such/folder/x"])
def test_an_endpoint_that_cannot_be_bound(bad: str) -> None:
    with pytest.raises(ConfigError, match="kv_events_endpoint"):
        _kv(bad)


async def _operate(client: RemoteEngine | ThreadedEngine) -> str:
    """Pins and events through a client. The epoch."""
    prompt = list(range(8))
    await collect(client, request("a", prompt, max_tokens=1, salt="t"))
    made = await client.operate(PinPrefix("t", "t", "p", prompt))
    assert [(pin.name, pin.tokens) for pin in made.pins] == [("p", 8)]
    assert (await client.view(None)).stats.pinned_blocks == 2
    assert (await client.operate(ListPins("t"))).pins == made.pins
    assert (await client.operate(ListPins("other"))).pins == []
    page = (await client.operate(ReadEvents(0, 10, "t"))).events
    assert page is not None
    first, second = (event for _, event in page.numbered)
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert (first.tokens + second.tokens, second.parent) == (tuple(prompt), first.digest)
    assert (await client.operate(ReadEvents(0, 10, "other"))).events == msgspec.structs.replace(
        page, numbered=[]
    )
    refused = await client.operate(PinPrefix("t", "t", "q", [2**40]))
    assert refused.param == "prompt"
    assert (await client.operate(UnpinPrefix("t", "p"))).pins == made.pins
    assert await client.operate(UnpinPrefix("t", "p")) == CacheOutcome()
    return page.epoch


def test_in_a_thread() -> None:
    async def main() -> None:
        client = ThreadedEngine(make_engine(FakeBackend()))
        await _operate(client)
        await client.close()
        with pytest.raises(EngineDeadError):
            await client.operate(ListPins(""))

    asyncio.run(main())


def test_in_a_process_and_in_the_one_after_it() -> None:
    async def main() -> None:
        async with engine() as client:
            epoch = await _operate(client)
            os.kill(client.pid, signal.SIGKILL)

            async def back() -> bool:
                return client.restarts == 1 and (await client.healthy())[0]

            await until(back, 20)
            assert await client.operate(ListPins("t")) == CacheOutcome()
            page: Any = (await client.operate(ReadEvents(2, 10, None))).events
            assert (page.last, page.lost, page.numbered) == (0, 0, [])
            assert page.epoch != epoch

    asyncio.run(main())
