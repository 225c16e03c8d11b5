"""Starting a server, putting load on it, stopping it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import IO, Any

from fourfold.bench.compare.commands import SAID_CHARACTERS
from fourfold.bench.compare.peer import CannotStart, ServerCommand
from fourfold.bench.load.dataset import RECORD_SCHEMA, RandomItems, RequestShape, schema_items
from fourfold.bench.load.http import Server
from fourfold.bench.load.measure import Prepared, send
from fourfold.bench.load.models import served_models
from fourfold.bench.load.report import LoadReport, report
from fourfold.bench.load.run import Arrivals, LoadRun, run_load
from fourfold.bench.process import peak_memory, proportional_memory
from fourfold.config import child_environment
from fourfold.errors import FourfoldError

START_SECONDS = 600.0
STOP_SECONDS = 20.0
POLL_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """Requests of prompt tokens, the first `shared` of them the same for all, `concurrency` at a time.

    schema: instead, chats that ask for records (about `prompt` tokens), whose answers must follow it and are
    of `output` tokens at most; {} for the same chats with free answers of full length. Temperature 0.8.
    """

    name: str
    requests: int
    concurrency: int
    prompt: int
    output: int
    shared: int = 0
    schema: Mapping[str, Any] | None = None


SERVER_LOADS = {
    each.name: each
    for each in (
        ServerLoad("serve-1", 4, 1, 128, 128),
        ServerLoad("serve-8", 24, 8, 128, 128),
        ServerLoad("serve-32", 64, 32, 128, 128),
        ServerLoad("serve-shared", 32, 32, 1056, 32, shared=1024),
        ServerLoad("serve-free", 32, 16, 64, 160, schema={}),
        ServerLoad("serve-json", 32, 16, 64, 160, schema=RECORD_SCHEMA),
    )
}


ONE_STREAM = ServerLoad("one stream", 1, 1, 512, 128)
"""What a server answers before its memory is read."""
ONE_STREAM_KV_TOKENS = 4096


def kv_tokens(load: ServerLoad) -> int:
    """Tokens of a KV cache that holds all requests in flight, in pages of up to 32 tokens, with one spare."""
    return load.concurrency * (-(-(load.prompt + load.output) // 32) * 32 + 32)


def requests_of(load: ServerLoad, model: str, seed: int) -> list[Prepared]:
    """seed: the same requests for the same one."""
    if load.schema is None:
        items = RandomItems(load.prompt - load.shared, load.output, prefix_len=load.shared)
        return RequestShape(model).prepare(items.items(load.requests, seed))
    shape = RequestShape(model, "chat", 0.8, seed=seed * load.requests, schema=load.schema or None)
    # Prompts that no load before asked: what is cached of them would make this one cheaper.
    first = 1000 * (2 * seed + bool(load.schema)) + 1
    return shape.prepare(schema_items(load.requests, load.output, first))


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class RunningServer:
    """A server that answered its first request. A context; its end is the server's.

    start_seconds: from starting the process to the end of an answer of one token.
    """

    def __init__(self, command: ServerCommand, port: int, timeout: float) -> None:
        """timeout: seconds that a load may take.

        Raises CannotStart with what the server said if it ends, or does not answer for ten minutes.
        """
        self._timeout = timeout
        self._said: IO[bytes] = TemporaryFile()  # noqa: SIM115 (closed by close)
        self._server = Server("127.0.0.1", port, False, "")
        started = time.perf_counter()
        try:
            self._process = subprocess.Popen(
                command.command,
                stdin=subprocess.DEVNULL,
                stdout=self._said,
                stderr=subprocess.STDOUT,
                env=child_environment(**command.environment),
                process_group=0,
            )
        except OSError as error:
            raise CannotStart(f"{command.command[0]} cannot be run: {error.strerror or error}") from error
        try:
            self._model = asyncio.run(self._first_answer(started + START_SECONDS))
        except BaseException:
            self.close()
            raise
        self.start_seconds = time.perf_counter() - started

    def __enter__(self) -> RunningServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def peak_memory(self) -> int:
        """Bytes, the peaks of all its processes added up."""
        return peak_memory(self._process.pid)

    @property
    def memory(self) -> int:
        """Bytes now, of all its processes; what they share counts once."""
        return proportional_memory(self._process.pid)

    def measure(self, load: ServerLoad, seed: int) -> LoadReport:
        """Raises FourfoldError if a request fails, for the others' figures would mean nothing, or if all take
        longer than the timeout."""
        run = asyncio.run(self._run(load, requests_of(load, self._model, seed)))
        measured = report(run)
        if measured.errors:
            raise FourfoldError(f"{load.name}: {', '.join(measured.errors)}")
        return measured

    async def _run(self, load: ServerLoad, requests: Sequence[Prepared]) -> LoadRun:
        try:
            async with asyncio.timeout(self._timeout):
                return await run_load(self._server, requests, Arrivals(load.concurrency))
        except TimeoutError as error:
            raise FourfoldError(f"{load.name} took longer than {self._timeout:g} s") from error

    def warm_up(self, seed: int) -> None:
        self.measure(ServerLoad("warm-up", 2, 2, 32, 16), seed)

    def close(self) -> None:
        """SIGINT, and SIGKILL to all its processes for what is left of it."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._said.close()

    async def _first_answer(self, deadline: float) -> str:
        """The model's name, once it answered. Asked again and again: a server may listen before it can."""
        model, problem = "", "no answer"
        while time.perf_counter() < deadline:
            if self._process.poll() is not None:
                raise CannotStart(f"the server ended with {self._process.returncode}: {self._last_words()}")
            try:
                model = model or (await served_models(self._server))[0]
                (request,) = RequestShape(model).prepare(RandomItems(32, 1).items(1, 0))
                answer = await send(self._server, request, START_SECONDS)
                if answer.ok:
                    return model
                problem = answer.error or problem
            except FourfoldError as error:
                problem = str(error)
            await asyncio.sleep(POLL_SECONDS)
        raise CannotStart(f"the server did not answer within {START_SECONDS:g} s: {problem}")

    def _last_words(self) -> str:
        self._said.seek(0, os.SEEK_END)
        self._said.seek(max(0, self._said.tell() - SAID_CHARACTERS))
        return self._said.read().decode(errors="replace").strip()
