"""Making Constraints beside the event loop: small ones in a thread, large ones in a process of their own."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec

from fourfold.errors import InvalidRequestError, OverloadedError
from fourfold.types import Constraint

if TYPE_CHECKING:
    from fourfold.grammar.sources import Kind

SMALL = 64 * 1024
"""Characters that take some ten milliseconds, a part of them without the GIL."""
MAX_WAITING = 8
"""Large ones that wait for their turn."""
CHECK_SECONDS = 20.0


class Checker:
    """The process is started for the first large source, and again when it had to be ended: a source that
    takes too long, or whose client leaves, does not keep the next one waiting."""

    def __init__(self, most_seconds: float = CHECK_SECONDS) -> None:
        """most_seconds: for a large source."""
        self._threads = ThreadPoolExecutor(2, "fourfold-constraints")
        self._most_seconds = most_seconds
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._process: Process | None = None

    async def make(self, kind: Kind, content: Any, param: str) -> Constraint:
        """See sources.make_constraint. Raises InvalidRequestError, or OverloadedError if many large ones
        wait already."""
        # All about schemas, which a start need not wait for.
        from fourfold.grammar.sources import make_constraint, text_of

        text = text_of(content, param)
        if len(text) <= SMALL:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, make_constraint, kind, text, param)
        if self._waiting >= MAX_WAITING:
            raise OverloadedError(f"{MAX_WAITING} large constraints wait to be checked; try again later")
        self._waiting += 1
        try:
            async with self._turn:
                return await self._ask(kind, text, param)
        finally:
            self._waiting -= 1

    async def _ask(self, kind: Kind, text: str, param: str) -> Constraint:
        from fourfold.grammar.worker import LENGTH, MAX_MEMORY, Job, Made

        why = ""
        try:
            async with asyncio.timeout(self._most_seconds):
                process = await self._started()
                assert process.stdin is not None
                assert process.stdout is not None
                job = msgspec.msgpack.encode(Job(kind, text, param))
                process.stdin.write(LENGTH.pack(len(job)) + job)
                await process.stdin.drain()
                (size,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
                made = msgspec.msgpack.decode(await process.stdout.readexactly(size), type=Made)
        except TimeoutError:
            why = f"checking it takes more than {self._most_seconds:g} s"
        except (asyncio.IncompleteReadError, ConnectionError):
            why = f"the process that checks it ended; it may need more than {MAX_MEMORY >> 20} MiB of memory"
        except asyncio.CancelledError:
            await self.close()
            raise
        if why:
            await self.close()
            raise InvalidRequestError(f"{param}: {why}; make it smaller", param, "invalid_constraint")
        if made.constraint is None:
            raise InvalidRequestError(made.error, param, made.code)
        return made.constraint

    async def _started(self) -> Process:
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "fourfold.grammar.worker",
                stdin=PIPE, stdout=PIPE,
                start_new_session=True,  # a Ctrl-C in the terminal is this process's affair
            )  # fmt: skip
        return self._process

    async def close(self) -> None:
        """Ends the process; the next large source gets another."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()
