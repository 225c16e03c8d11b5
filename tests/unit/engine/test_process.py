"""The engine in a process of its own: life, death, retry, abort. All with a fake backend."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from fourfold.config import EngineConfig
from fourfold.engine.child import EngineProcess
from fourfold.engine.launch import discard, launch
from fourfold.engine.remote import RemoteEngine, add_counters
from fourfold.errors import EngineDeadError, InvalidRequestError, LoadError, OverloadedError
from fourfold.types import EngineEvent, EngineRequest, EngineStats

from .helpers import make_engine, request, run, tokens
from .process_backend import KILL_TOKEN

ROOT = Path(__file__).parents[3]
FACTORY = "tests.unit.engine.process_backend:make"


@pytest.fixture(autouse=True)
def _import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine process must find the test's factory."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "src"), *filter(None, sys.path)]))


@contextlib.asynccontextmanager
async def engine(model: str = "fake", **config: object) -> AsyncIterator[RemoteEngine]:
    client = RemoteEngine(EngineConfig(model=model, seed=1, **config), factory=FACTORY)  # type: ignore[arg-type]
    try:
        await asyncio.wait_for(client.ready(), 60)
        yield client
    finally:
        await client.close()


async def collect(client: RemoteEngine, item: EngineRequest) -> list[EngineEvent]:
    return [event async for event in client.submit(item)]


async def until(condition: Callable[[], Awaitable[bool]], seconds: float = 20.0) -> float:
    """Seconds until it held."""
    start = time.monotonic()
    while not await condition():
        assert time.monotonic() - start < seconds, "it did not happen"
        await asyncio.sleep(0.02)
    return time.monotonic() - start


async def quiet(client: RemoteEngine) -> bool:
    stats = await client.stats()
    return stats.step > 0 and not (stats.running or stats.waiting or stats.live_blocks)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_same_tokens_as_in_this_process() -> None:
    items = [request(f"r{i}", [i + 1, 2, 3, 4, 5, 6], max_tokens=20, logprobs=2) for i in range(8)]

    async def main() -> list[list[EngineEvent]]:
        async with engine() as client:
            assert client.model.max_model_len == 512
            return await asyncio.gather(*(collect(client, item) for item in items))

    results = asyncio.run(main())
    for item, events in zip(items, results, strict=True):
        assert events[-1].finish_reason == "length"
        alone = run(make_engine(max_model_len=512), item)[item.request_id]
        assert tokens(events) == tokens(alone)
        assert [e.logprobs for e in events] == [e.logprobs for e in alone]


def test_bad_requests_are_refused_as_in_this_process_and_the_engine_lives() -> None:
    async def main() -> None:
        async with engine() as client:
            for prompt in ([-1], [97], [4294967295], []):  # B16
                with pytest.raises(InvalidRequestError):
                    await collect(client, request("bad", prompt))
            with pytest.raises(InvalidRequestError, match="512") as caught:
                await collect(client, request("long", [1] * 513))
            assert caught.value.code == "context_length_exceeded"
            assert len(tokens(await collect(client, request("good", [1, 2])))) == 8
            assert await client.healthy() == (True, "")

    asyncio.run(main())


def test_load_errors_reach_the_caller() -> None:
    async def ready(model: str) -> None:
        async with engine(model):
            pass

    with pytest.raises(LoadError, match=r"broken.gguf: tensor 'x'"):
        asyncio.run(ready("broken"))
    with pytest.raises(EngineDeadError, match="RuntimeError: surprise"):
        asyncio.run(ready("bug"))
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        asyncio.run(ready("crash"))


def test_progress_is_forwarded() -> None:
    seen: list[tuple[str, float]] = []

    async def main() -> None:
        client = RemoteEngine(
            EngineConfig(), factory=FACTORY, on_progress=lambda *progress: seen.append(progress)
        )
        await client.ready()
        await client.close()

    asyncio.run(main())
    assert seen == [("weights", 0.5)]


def test_an_unknown_factory_is_a_load_error() -> None:
    async def main() -> None:
        client = RemoteEngine(EngineConfig(), factory="tests.nowhere:make")
        try:
            await client.ready()
        finally:
            await client.close()

    with pytest.raises(LoadError, match=r"tests.nowhere:make"):
        asyncio.run(main())


def test_leaving_early_aborts_in_the_engine() -> None:
    async def main() -> None:
        async with engine("slow") as client:
            for _ in range(3):
                stream = client.submit(request("left", [1, 2, 3], max_tokens=400))
                await anext(stream)
                await stream.aclose()
            task = asyncio.create_task(collect(client, request("cancelled", [1, 2, 3], max_tokens=400)))
            await asyncio.sleep(0.1)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

            async def all_left() -> bool:
                return (await client.stats()).aborted == 4 and await quiet(client)

            await until(all_left)

    asyncio.run(main())


def test_many_requests_with_random_aborts_leave_nothing_live() -> None:
    rng = random.Random(3)

    async def one(client: RemoteEngine, i: int) -> int:
        leave_after = rng.choice([0, 1, 5, None, None])
        await asyncio.sleep(rng.random() / 2)
        stream = client.submit(request(f"r{i}", [i % 7, 2, 3, 4, 5, 6, 7], max_tokens=rng.randint(1, 30)))
        count = 0
        async for event in stream:
            count += len(event.token_ids)
            if leave_after is not None and count > leave_after:
                break
        await stream.aclose()  # type: ignore[attr-defined]
        return count

    async def main() -> None:
        async with engine("none", num_kv_blocks=150) as client:
            counts = await asyncio.gather(*(one(client, i) for i in range(500)))
            assert min(counts) >= 1

            async def all_ended() -> bool:
                stats = await client.stats()
                return stats.finished + stats.aborted == 500

            await until(all_ended)
            stats = await client.stats()
            assert stats.free_blocks + stats.cached_blocks == stats.total_blocks == 150
            assert (stats.running, stats.waiting, stats.live_blocks) == (0, 0, 0)

    asyncio.run(main())


def test_abort_by_id_ends_the_stream() -> None:
    async def main() -> None:
        async with engine("slow") as client:
            task = asyncio.create_task(collect(client, request("a", [1, 2, 3], max_tokens=400)))
            await asyncio.sleep(0.2)
            await client.abort("a")
            await client.abort("nobody")
            events = await asyncio.wait_for(task, 20)
            assert events[-1].finish_reason == "abort"

    asyncio.run(main())


def test_kill_9_fails_what_was_seen_retries_what_was_not_and_restarts() -> None:
    async def main() -> None:
        async with engine("slow", max_num_seqs=1) as client:
            seen = client.submit(request("seen", [1, 2, 3], max_tokens=400))
            await anext(seen)
            unseen = asyncio.create_task(collect(client, request("unseen", [4, 5, 6], max_tokens=5)))
            await asyncio.sleep(0.1)
            before = (await client.stats()).step
            first = client.pid
            os.kill(first, signal.SIGKILL)
            started = time.monotonic()
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                async for _ in seen:
                    pass
            assert time.monotonic() - started < 5.0
            assert (await client.healthy())[0] is False
            events = await asyncio.wait_for(unseen, 30)
            alone = run(make_engine(), request("unseen", [4, 5, 6], max_tokens=5))["unseen"]
            assert tokens(events) == tokens(alone)
            assert client.restarts == 1
            assert client.pid != first
            assert not alive(first)
            assert await client.healthy() == (True, "")
            assert (await client.stats()).step >= before

    asyncio.run(main())


def test_a_request_that_kills_engines_is_retried_once_only() -> None:
    async def main() -> None:
        async with engine() as client:
            with pytest.raises(EngineDeadError):
                await asyncio.wait_for(collect(client, request("poison", [KILL_TOKEN, 1])), 30)
            good = await asyncio.wait_for(collect(client, request("good", [1, 2])), 30)
            assert good[-1].finish_reason == "length"
            assert client.restarts == 2

    asyncio.run(main())


def test_backpressure_in_the_engine_and_in_the_front() -> None:
    async def main() -> None:
        async with engine("slow", max_num_seqs=1, max_waiting=4) as client:
            tasks = [
                asyncio.create_task(collect(client, request(f"r{i}", [1, 2], max_tokens=100)))
                for i in range(20)
            ]
            done, pending = await asyncio.wait(tasks, timeout=0.5)
            errors = [task.exception() for task in done]
            assert errors
            assert all(isinstance(error, OverloadedError) and error.retry_after >= 1 for error in errors)
            assert 1 <= len(pending) <= 5
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
            await until(lambda: quiet(client))

    asyncio.run(main())


def test_a_stuck_step_is_unhealthy_though_the_process_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fourfold.engine.remote.STALL_SECONDS", 0.5)

    async def main() -> None:
        async with engine("stuck") as client:
            assert await client.healthy() == (True, "")
            task = asyncio.create_task(collect(client, request("a", [1])))

            async def sick() -> bool:
                return "finished no step" in (await client.healthy())[1]

            await until(sick)
            task.cancel()

    asyncio.run(main())


def test_a_stopped_process_is_unhealthy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fourfold.engine.remote.HEARTBEAT_LIMIT", 0.6)

    async def main() -> None:
        async with engine() as client:
            os.kill(client.pid, signal.SIGSTOP)

            async def sick() -> bool:
                return "sign of life" in (await client.healthy())[1]

            await until(sick)

    asyncio.run(main())


def test_drain_lets_open_requests_end_and_takes_no_new_ones() -> None:
    async def main() -> None:
        async with engine("slow") as client:
            task = asyncio.create_task(collect(client, request("a", [1], max_tokens=20)))
            await asyncio.sleep(0.1)
            drained = asyncio.create_task(client.drain(5))
            await asyncio.sleep(0)
            with pytest.raises(EngineDeadError, match="shut down"):
                await collect(client, request("b", [1]))
            assert await drained
            assert len(tokens(await task)) == 20
            pid = client.pid
        assert not alive(pid)

    asyncio.run(main())


def test_the_engine_does_not_survive_its_parent(tmp_path: Path) -> None:
    script = (
        "import asyncio, os, signal\n"
        "from fourfold.config import EngineConfig\n"
        "from fourfold.engine.remote import RemoteEngine\n"
        "async def main():\n"
        f"    client = RemoteEngine(EngineConfig(model='fake'), factory={FACTORY!r})\n"
        "    await client.ready()\n"
        "    print(client.pid, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=30, env=environment
    )
    assert result.returncode == -signal.SIGKILL
    pid = int(result.stdout)
    deadline = time.monotonic() + 20
    while alive(pid):
        assert time.monotonic() < deadline, "the engine outlived its parent"
        time.sleep(0.02)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [[], [FACTORY]])
def test_started_by_hand_it_says_how_it_is_meant(arguments: list[str]) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "fourfold.engine.process", *arguments],
        input=b"what is typed",
        capture_output=True,
        timeout=20,
    )
    assert result.returncode != 0
    assert b"start message" in result.stderr


def test_launched_for_nothing_it_ends_without_a_word() -> None:
    process = launch(FACTORY)
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(20) == 0


def test_a_launched_process_becomes_the_engine() -> None:
    async def main() -> None:
        launched = launch(FACTORY)
        child = EngineProcess(EngineConfig(), factory=FACTORY, launched=launched)
        client = RemoteEngine(EngineConfig(), factory=FACTORY, child=child)
        await client.ready()
        assert client.pid == launched.pid
        await client.close()
        discard(launched)  # as the command line does at its end
        assert launched.returncode is not None

    asyncio.run(main())


def test_an_idle_engine_uses_no_cpu() -> None:
    def cpu(pid: int) -> float:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    async def main() -> None:
        async with engine() as client:
            await collect(client, request("a", [1]))
            await asyncio.sleep(0.3)  # what follows an answer: imports that could wait, garbage
            before = cpu(client.pid)
            await asyncio.sleep(1.0)
            assert cpu(client.pid) - before < 0.1

    asyncio.run(main())


def test_the_engine_process_imports_no_server_no_asyncio_no_torch() -> None:
    code = (
        "import sys, fourfold.engine.process\n"
        "banned = ('asyncio', 'fastapi', 'torch', 'transformers', 'pydantic', 'ssl')\n"
        "print([m for m in banned if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=20, check=True
    )
    assert result.stdout.strip() == "[]"


def test_counters_add_and_states_stay() -> None:
    total = add_counters(
        EngineStats(step=3, running=2, finished=1, preemptions_by_reason={"a": 1, "b": 2}),
        EngineStats(step=4, running=9, finished=5, forced_tokens=3, preemptions_by_reason={"b": 5, "c": 1}),
    )
    assert (total.step, total.running, total.finished, total.forced_tokens) == (7, 2, 6, 3)
    assert total.preemptions_by_reason == {"a": 1, "b": 7, "c": 1}
