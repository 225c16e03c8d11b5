"""Timelines and views asked for from outside the engine's thread or process."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from fourfold.engine import streams
from fourfold.engine.client import EngineClient
from fourfold.engine.local import ThreadedEngine
from fourfold.engine.remote import RemoteEngine
from fourfold.errors import EngineDeadError
from fourfold.types import EngineEvent, EngineRequest

from .fake_backend import FakeBackend
from .helpers import make_engine, request
from .test_process import _import_path, engine, until  # noqa: F401  (a fixture that applies by itself)
from .test_recorder import check_timeline


async def collect(client: EngineClient, item: EngineRequest) -> list[EngineEvent]:
    return [event async for event in client.submit(item)]


async def _ask_while_and_after(client: RemoteEngine | ThreadedEngine) -> None:
    stream = client.submit(request("a", list(range(20)), max_tokens=100))
    events = [await anext(stream)]
    live, missing = await client.timelines(["a", "nobody"])
    assert missing is None
    assert live is not None
    assert (live.request_id, live.state, live.finish_reason) == ("a", "decode", None)
    view = await client.view(None)
    assert [(line.request_id, line.state) for line in view.requests] == [("a", "decode")]
    assert view.open_requests == 1
    stats = view.stats
    assert stats.free_blocks + stats.cached_blocks + stats.live_blocks == stats.total_blocks
    assert stats.prefill_tokens == 20
    async for event in stream:
        events.append(event)
    (line,) = await client.timelines(["a"])
    assert line is not None
    check_timeline(line, events)
    assert line.totals.generated_tokens == 100
    assert events[0].queue_seconds == line.totals.queue_seconds
    assert (await client.view([])).requests == []


def test_in_a_thread() -> None:
    async def main() -> None:
        client = ThreadedEngine(make_engine(FakeBackend(delay=0.001)))
        await _ask_while_and_after(client)
        await client.close()
        for question in (client.timelines(["a"]), client.view(None)):
            with pytest.raises(EngineDeadError):
                await question

    asyncio.run(main())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_crash_of_the_core_ends_questions() -> None:
    async def main() -> None:
        core = make_engine(FakeBackend(delay=0.1))
        client = ThreadedEngine(core)
        stream = client.submit(request("a", [1, 2], max_tokens=100))
        await anext(stream)
        core.step = lambda: 1 / 0  # type: ignore[method-assign, assignment, return-value]

        async def ask_on() -> None:
            while True:
                await client.view(None)

        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(ask_on(), 20)
        await stream.aclose()

    asyncio.run(main())


def test_in_a_process() -> None:
    async def main() -> None:
        async with engine() as client:
            await _ask_while_and_after(client)
            # Left early: aborted in the engine, and the question comes after that.
            stream = client.submit(request("b", [1, 2, 3], max_tokens=400))
            await anext(stream)
            await stream.aclose()
            (line,) = await client.timelines(["b"])
            assert line is not None
            assert line.finish_reason == "abort"

    asyncio.run(main())


def test_an_engine_that_dies_ends_questions_and_keeps_its_counters() -> None:
    async def main() -> None:
        async with engine("slow") as client:
            await collect(client, request("a", [1, 2, 3], max_tokens=5))

            async def counted() -> bool:
                return (await client.stats()).finished == 1

            await until(counted)
            os.kill(client.pid, signal.SIGSTOP)
            question = asyncio.create_task(client.timelines(["a"]))
            await asyncio.sleep(0.05)
            os.kill(client.pid, signal.SIGKILL)
            with pytest.raises(EngineDeadError):
                await asyncio.wait_for(question, 20)
            with pytest.raises(EngineDeadError):
                await client.view(None)

            async def back() -> bool:
                return (await client.healthy())[0]

            await until(back, 20)
            assert await client.timelines(["a"]) == [None]
            stats = (await client.view(None)).stats
            assert (stats.finished, stats.prefill_tokens) == (1, 3)

    asyncio.run(main())


def test_who_gives_up_a_question_leaves_nothing() -> None:
    async def main() -> None:
        async with engine("fake") as client:
            os.kill(client.pid, signal.SIGSTOP)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.view(None), 0.05)
            assert not client._questions
            os.kill(client.pid, signal.SIGCONT)
            assert (await asyncio.wait_for(client.view(None), 20)).open_requests == 0

    asyncio.run(main())


def test_keys_of_ended_requests_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "REMEMBERED_KEYS", 2)

    async def main() -> None:
        client = ThreadedEngine(make_engine())
        for name in "abc":
            await collect(client, request(name, [1]))
        known = [line and line.request_id for line in await client.timelines(["a", "b", "c"])]
        assert known == [None, "b", "c"]
        await client.close()

    asyncio.run(main())
