"""Uvicorn as this server wants it: one process, its socket bound beforehand, signals left to the caller."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Callable, Generator
from contextlib import contextmanager

import uvicorn
from starlette.applications import Starlette

from fourfold.server.front import Front
from fourfold.server.settings import ServerSettings

KEEP_ALIVE_SECONDS = 75
"""Longer than the 60 s of common proxies, so that a connection is not closed just as one reuses it."""


BACKSTOP_SECONDS = 3
"""After the drain timeout answers are ended with an error; what has not ended by then is cut off."""


class Host(uvicorn.Server):
    """Serves until `stop` is called; then takes no connection, lets running answers finish, and returns."""

    def __init__(self, app: Starlette, settings: ServerSettings, on_started: Callable[[], None]) -> None:
        config = uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=math.ceil(settings.drain_timeout) + BACKSTOP_SECONDS,
        )
        super().__init__(config)
        self._on_started = on_started
        self._drain_timeout = settings.drain_timeout
        self._front: Front = app.state.front
        self._deadline: asyncio.TimerHandle | None = None

    def stop(self) -> None:
        """In the server's loop. The second call does not wait for answers any more, but ends them."""
        if self._deadline is not None:
            self._front.open_work.end()
            return
        self.should_exit = True
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(self._drain_timeout, self._front.open_work.end)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Uvicorn would raise the signal anew after a clean end, and the exit code would not be 0."""
        yield
