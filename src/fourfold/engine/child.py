"""One engine process as its parent sees it: start, send, receive, notice its end."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from fourfold.config import EngineConfig
from fourfold.engine.launch import DEFAULT_FACTORY, launch
from fourfold.engine.wire import Command, Report, Start, write_start

if TYPE_CHECKING:
    import asyncio

_MAX_DIRECTORY = 80
"""A Unix socket's path has at most 107 bytes."""


class EngineProcess:
    """Started at once and without an event loop, so that a model loads while its parent still imports.

    The pipe to its standard input stays open for as long as the process shall live; argv holds no secret.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        factory: str = DEFAULT_FACTORY,
        log_level: str = "info",
        launched: subprocess.Popen[bytes] | None = None,
    ) -> None:
        """factory: `module:function` that makes the backend (see launch.DEFAULT_FACTORY).

        launched: a process that launch.launch(factory) started; it is this object's from now on.
        """
        self._process = launched or launch(factory)
        base = tempfile.gettempdir()
        self._directory = tempfile.mkdtemp(
            prefix="fourfold-", dir=base if len(base) <= _MAX_DIRECTORY else "/tmp"
        )
        self._inbox = f"ipc://{self._directory}/in"
        outbox = f"ipc://{self._directory}/out"
        self._context: zmq.Context[Any] = zmq.Context()
        self._reports = self._context.socket(zmq.PULL)
        self._reports.rcvhwm = 0
        self._reports.bind(outbox)
        self._commands: zmq.Socket[bytes] | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)
        self._loop: asyncio.AbstractEventLoop | None = None
        start = Start(
            config=config,
            factory=factory,
            directory=self._directory,
            inbox=self._inbox,
            outbox=outbox,
            log_level=log_level,
        )
        if self._process.stdin is None:
            raise RuntimeError("a process started with a pipe has none")
        # A child that died at once is reported by attach, like any other death.
        with contextlib.suppress(BrokenPipeError):
            write_start(self._process.stdin, start)

    @property
    def pid(self) -> int:
        return self._process.pid

    def attach(
        self, on_report: Callable[[Report], None], on_exit: Callable[[EngineProcess, str], None]
    ) -> None:
        """From now on calls on_report for each report and on_exit(self, why) once, in the running loop."""
        import asyncio  # takes longer than all else here; the process is under way by now

        loop = self._loop = asyncio.get_running_loop()

        def read() -> None:
            # ZeroMQ's descriptor says "something changed", not "readable": read until nothing is left.
            while self._loop is not None:
                try:
                    message = self._reports.recv(zmq.NOBLOCK)
                except zmq.Again:
                    return
                on_report(self._decoder.decode(message))

        def ended(code: int) -> None:
            if self._loop is not None:
                read()
                self.detach()
                on_exit(self, _why(code))

        def wait() -> None:
            code = self._process.wait()
            # A loop that was closed meanwhile has nobody left to tell.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(ended, code)

        loop.add_reader(self._reports.fileno(), read)
        loop.call_soon(read)
        threading.Thread(target=wait, name="engine-exit", daemon=True).start()

    def detach(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._reports.fileno())
            self._loop = None

    def send(self, command: Command) -> None:
        """Never blocks; only after the engine said Ready (it listens from then on)."""
        if self._commands is None:
            self._commands = self._context.socket(zmq.PUSH)
            self._commands.sndhwm = 0  # bounded by the number of open requests
            self._commands.connect(self._inbox)
        self._commands.send(self._encoder.encode(command), zmq.NOBLOCK)

    def wait(self, timeout: float) -> bool:
        """True once the process has ended; blocks for up to `timeout` seconds."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self) -> None:
        """Kills the process if it still lives, and frees sockets and files."""
        self.detach()
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        self._context.destroy(linger=0)
        shutil.rmtree(self._directory, ignore_errors=True)


def _why(code: int) -> str:
    if code < 0:
        return f"the engine process was ended by signal {signal.Signals(-code).name}"
    return f"the engine process exited with code {code}"
