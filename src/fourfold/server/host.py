"""Uvicorn as this server wants it: one process, its socket bound beforehand, signals left to the caller."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Generator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from fourfold.server.settings import ServerSettings

KEEP_ALIVE_SECONDS = 75
"""Longer than the 60 s of common proxies, so that a connection is not closed just as one reuses it."""


class Host(uvicorn.Server):
    """Serves until `stop` is called; then takes no connection, lets running answers finish, and returns."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, on_started: Callable[[], None]) -> None:
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
            timeout_graceful_shutdown=max(1, math.ceil(settings.drain_timeout)),
        )
        super().__init__(config)
        self._on_started = on_started

    def stop(self) -> None:
        """The second call does not wait for answers any more."""
        self.force_exit = self.should_exit
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Uvicorn would raise the signal anew after a clean end, and the exit code would not be 0."""
        yield
