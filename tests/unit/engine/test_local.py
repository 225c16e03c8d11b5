"""The engine inside this process: synchronous generation, and the client protocol over a thread."""

from __future__ import annotations

import asyncio
import threading

import pytest

from fourfold.engine.batch import Batch
from fourfold.engine.local import LocalEngine, ThreadedEngine
from fourfold.errors import EngineDeadError, InvalidRequestError, OverloadedError
from fourfold.types import EngineEvent, EngineRequest, EngineStats

from .fake_backend import FakeBackend
from .helpers import check, make_engine, request, run, tokens


async def collect(client: ThreadedEngine, item: EngineRequest) -> list[EngineEvent]:
    return [event async for event in client.submit(item)]


def test_generate_runs_more_requests_than_the_queue_holds() -> None:
    local = LocalEngine(make_engine(max_waiting=3, max_num_seqs=2))
    items = [request(f"r{i}", [i + 1, 2, 3]) for i in range(20)]
    events: dict[str, list[EngineEvent]] = {}
    for event in local.generate(iter(items)):
        events.setdefault(event.request_id, []).append(event)
    for item in items:
        assert tokens(events[item.request_id]) == tokens(run(make_engine(), item)[item.request_id])
    assert local.stats().live_blocks == 0


def test_leaving_generate_aborts_the_rest() -> None:
    engine = make_engine()
    stream = LocalEngine(engine).generate([request(f"r{i}", [1, 2, 3], max_tokens=50) for i in range(5)])
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    check(engine)
    assert not engine.has_work
    assert engine.stats().live_blocks == 0


def test_a_bad_request_in_generate_leaves_nothing_behind() -> None:
    engine = make_engine()
    with pytest.raises(InvalidRequestError):
        list(LocalEngine(engine).generate([request("good", [1]), request("bad", [])]))
    assert engine.stats().step == 0
    assert not engine.has_work
    assert engine.stats().live_blocks == 0


def test_the_thread_gives_the_same_tokens_and_refusals() -> None:
    items = [request(f"r{i}", [i + 1, 2, 3], max_tokens=20) for i in range(10)]

    async def main() -> None:
        client = ThreadedEngine(make_engine())
        results = await asyncio.gather(*(collect(client, item) for item in items))
        for item, events in zip(items, results, strict=True):
            assert tokens(events) == tokens(run(make_engine(), item)[item.request_id])
            assert events[0].request_id == item.request_id
        with pytest.raises(InvalidRequestError):
            await collect(client, request("bad", [97]))
        assert await client.healthy() == (True, "")
        assert (await client.stats()).finished == 10
        await client.close()
        assert (await client.healthy())[0] is False
        with pytest.raises(EngineDeadError):
            await collect(client, request("late", [1]))

    asyncio.run(main())


def test_leaving_and_aborting_in_the_thread() -> None:
    async def main() -> None:
        client = ThreadedEngine(make_engine(FakeBackend(delay=0.01), max_num_seqs=1, max_waiting=2))
        stream = client.submit(request("a", [1], max_tokens=200))
        await anext(stream)
        with pytest.raises(InvalidRequestError, match="already in use"):
            await collect(client, request("a", [1]))
        waiting = [asyncio.create_task(collect(client, request(f"w{i}", [1]))) for i in range(2)]
        await asyncio.sleep(0.05)
        with pytest.raises(OverloadedError):
            await collect(client, request("w2", [1]))
        await client.abort("w0")
        assert [e.finish_reason for e in await waiting[0]] == ["abort"]
        await stream.aclose()
        assert (await asyncio.wait_for(waiting[1], 20))[-1].finish_reason == "length"
        stats = await client.stats()
        assert (stats.running, stats.waiting, stats.live_blocks, stats.aborted) == (0, 0, 0, 2)
        await client.close()

    asyncio.run(main())


def test_statistics_read_from_another_thread_always_balance() -> None:
    engine = make_engine(FakeBackend(num_blocks=30), max_num_batched_tokens=32)
    stop = threading.Event()
    wrong: list[EngineStats] = []

    def watch() -> None:
        while not stop.is_set():
            stats = engine.stats()
            if stats.free_blocks + stats.cached_blocks + stats.live_blocks != stats.total_blocks:
                wrong.append(stats)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        run(
            engine,
            *(request(f"r{i}", [i % 7, 2, 3, 4, 5, 6], max_tokens=20) for i in range(40)),
            checked=False,
        )
    finally:
        stop.set()
        watcher.join()
    assert wrong == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_crash_of_the_core_reaches_every_stream() -> None:
    class Crash(BaseException):
        """Not an Exception: nothing in the engine may take it for a failed batch."""

    def crash(batch: Batch) -> None:
        raise Crash("core")

    async def main() -> None:
        client = ThreadedEngine(make_engine(FakeBackend(hook=crash)))
        with pytest.raises(EngineDeadError, match="core"):
            await asyncio.wait_for(collect(client, request("a", [1])), 20)
        assert "core" in (await client.healthy())[1]
        await client.close()

    asyncio.run(main())
