from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import httpx
import pytest
import uvloop

from fourfold.server.app import create_app
from fourfold.server.host import Host
from fourfold.server.run import listen
from fourfold.server.settings import ServerSettings
from fourfold.text.tokenizer import Tokenizer

from .fakes import FakeClient, tiny_tokenizer


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return tiny_tokenizer()


@pytest.fixture
def engine(tokenizer: Tokenizer) -> FakeClient:
    return FakeClient(tokenizer)


@pytest.fixture
async def http(engine: FakeClient, tokenizer: Tokenizer) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(engine, tokenizer, ServerSettings())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        yield client


@dataclass(frozen=True)
class Live:
    url: str
    host: Host
    engine: FakeClient
    thread: threading.Thread


Start = Callable[..., Live]


@contextmanager
def _running(engine: FakeClient, settings: ServerSettings) -> Iterator[Live]:
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    started = threading.Event()
    host = Host(create_app(engine, engine.tokenizer, settings), settings, started.set)

    loops: list[asyncio.AbstractEventLoop] = []

    async def main() -> None:
        loops.append(asyncio.get_running_loop())
        await host.serve(sockets=[listener])

    def run() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())

    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(10)
    try:
        yield Live(f"http://127.0.0.1:{port}", host, engine, thread)
    finally:
        for _ in range(2):
            loops[0].call_soon_threadsafe(host.stop)
        thread.join(10)
        assert not thread.is_alive()


@pytest.fixture
def live(engine: FakeClient) -> Iterator[Start]:
    """Starts real servers on loopback."""
    with ExitStack() as stack:

        def start(settings: ServerSettings | None = None) -> Live:
            return stack.enter_context(_running(engine, settings or ServerSettings(drain_timeout=5)))

        yield start
