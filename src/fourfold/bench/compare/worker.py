"""An engine held by a process of its own, in whatever Python it is installed for.

The process runs one of the scripts in workers/, which take a JSON line per batch of prompts and answer with
one that says how long it took. Between batches the process is stopped, so that its threads do not spin. It is
in a process group of its own, to be stopped with its children, but in this session: there the kernel's
autogroups give both the same priority.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from fourfold.bench.compare.commands import SAID_CHARACTERS
from fourfold.bench.compare.peer import CannotRun, CannotStart, ServerCommand, ServerNeeds
from fourfold.bench.engine import Workload, prompts
from fourfold.config import child_environment
from fourfold.errors import FourfoldError

WORKERS = Path(__file__).parent / "workers"
LOW, HIGH = 1000, 30000
"""Token ids of prompts; any model has them."""
LOAD_SECONDS = 600.0


class Worker:
    """A script of workers/ running under `python`. A context; its end is the process's end."""

    def __init__(
        self,
        python: str,
        script: str,
        settings: Mapping[str, Any],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Waits until the model is loaded. Raises CannotStart if it cannot be, or not within ten minutes."""
        self._errors: IO[bytes] = TemporaryFile()  # noqa: SIM115 (closed by close)
        self._what = script
        try:
            self._process = subprocess.Popen(
                [python, str(WORKERS / script), json.dumps(dict(settings))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=child_environment(**(environment or {})),
                process_group=0,
            )
        except OSError as error:
            raise CannotStart(f"{python} cannot be run: {error.strerror or error}") from error
        try:
            self.version = str(self._read(LOAD_SECONDS)["version"])
        except FourfoldError as error:
            self.close()
            raise CannotStart(str(error)) from error
        except BaseException:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def generate(self, batch: Sequence[Sequence[int]], tokens: int, timeout: float) -> float:
        """Seconds to answer all prompts with `tokens` each.

        Raises FourfoldError if that fails or takes longer than `timeout` seconds: the worker is of no use
        then.
        """
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"prompts": batch, "tokens": tokens}).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._failure() from error
        answer = self._read(timeout)
        self._signal(signal.SIGSTOP)
        if answer["tokens"] != len(batch) * tokens:
            raise FourfoldError(
                f"{self._what} answered {len(batch)} prompts with {answer['tokens']} tokens, "
                f"not with {tokens} each"
            )
        return float(answer["seconds"])

    def close(self) -> None:
        if self._process.poll() is None:
            self._signal(signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                stream.close()

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError as error:
            raise self._failure() from error

    def _read(self, timeout: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        # A line is all that is written before the next job, so nothing waits in the buffer.
        if not select.select([self._process.stdout], [], [], timeout)[0]:
            raise FourfoldError(f"{self._what} took longer than {timeout:g} s")
        line = self._process.stdout.readline()
        if not line:
            raise self._failure()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _failure(self) -> FourfoldError:
        self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, self._errors.tell() - SAID_CHARACTERS))
        said = self._errors.read().decode(errors="replace").strip()
        return FourfoldError(f"{self._what} ended: {said}")


def no_server(needs: ServerNeeds) -> ServerCommand:
    raise CannotRun("it has no server")


class WorkerPeer:
    """A Peer around a Worker, which is started when first needed, and again after it failed.

    timeout: seconds of a run.
    """

    def __init__(
        self,
        name: str,
        start: Callable[[], Worker],
        timeout: float,
        server: Callable[[ServerNeeds], ServerCommand] = no_server,
        seed: int = 0,
    ) -> None:
        self.name = name
        self._start = start
        self._timeout = timeout
        self._server = server
        self._worker: Worker | None = None
        self._version = "unknown"
        self._rng = random.Random(seed)

    def version(self) -> str:
        return self._version

    def run(self, workload: Workload) -> float:
        if workload.kind == "prefill":
            return workload.prompt / self._seconds(workload, 1)
        if workload.kind == "decode":
            first, all_of_them = self._seconds(workload, 1), self._seconds(workload, workload.output)
            if all_of_them <= first:
                raise FourfoldError(f"{workload.output} tokens took no longer than one")
            return (workload.output - 1) / (all_of_them - first)
        return workload.requests * workload.output / self._seconds(workload, workload.output)

    def server(self, needs: ServerNeeds) -> ServerCommand:
        return self._server(needs)

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def _seconds(self, workload: Workload, tokens: int) -> float:
        batch = [[LOW + token for token in prompt] for prompt in prompts(workload, self._rng, HIGH - LOW)]
        return self._generate(batch, tokens)

    def _generate(self, batch: Sequence[Sequence[int]], tokens: int) -> float:
        fresh = self._worker is None
        if self._worker is None:
            self._worker = self._start()
            self._version = self._worker.version
        try:
            if fresh:
                self._worker.generate([[LOW] * 32], 4, LOAD_SECONDS)  # the first is slower
            return self._worker.generate(batch, tokens, self._timeout)
        except FourfoldError:
            self.close()
            raise
