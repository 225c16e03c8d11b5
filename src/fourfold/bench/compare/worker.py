"""An engine held by a process of its own, in whatever Python it is installed for.

The process runs one of the scripts in workers/, which take a JSON line per batch of prompts and answer with
one that says how long it took. Between batches the process is stopped, so that its threads do not spin.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from fourfold.bench.compare.commands import SAID_CHARACTERS
from fourfold.bench.compare.peer import ServerCommand, ServerNeeds
from fourfold.bench.engine import Workload, prompts
from fourfold.config import child_environment
from fourfold.errors import FourfoldError

WORKERS = Path(__file__).parent / "workers"
LOW, HIGH = 1000, 30000
"""Token ids of prompts; any model has them."""


class Worker:
    """A script of workers/ running under `python`. A context; its end is the process's end."""

    def __init__(
        self,
        python: str,
        script: str,
        settings: Mapping[str, Any],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Waits until the model is loaded. Raises FourfoldError if it cannot be."""
        self._errors: IO[bytes] = TemporaryFile()  # noqa: SIM115 (closed by close)
        self._what = script
        try:
            self._process = subprocess.Popen(
                [python, str(WORKERS / script), json.dumps(dict(settings))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=child_environment(**(environment or {})),
                start_new_session=True,
            )
        except OSError as error:
            raise FourfoldError(f"{python} cannot be run: {error.strerror or error}") from error
        self.version = str(self._read()["version"])
        self._signal(signal.SIGSTOP)

    def generate(self, batch: Sequence[Sequence[int]], tokens: int) -> float:
        """Seconds to answer all prompts with `tokens` each. Raises FourfoldError."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"prompts": batch, "tokens": tokens}).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._failure() from error
        answer = self._read()
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

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
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


class WorkerPeer:
    """A Peer around a Worker, which is started when first needed."""

    def __init__(
        self,
        name: str,
        start: Callable[[], Worker],
        server: Callable[[ServerNeeds], ServerCommand | None] = lambda needs: None,
        seed: int = 0,
    ) -> None:
        self.name = name
        self._start = start
        self._server = server
        self._worker: Worker | None = None
        self._rng = random.Random(seed)

    def version(self) -> str:
        return self._started().version

    def run(self, workload: Workload) -> float | None:
        if workload.kind == "prefill":
            return workload.prompt / self._seconds(workload, 1)
        if workload.kind == "decode":
            return (workload.output - 1) / (
                self._seconds(workload, workload.output) - self._seconds(workload, 1)
            )
        return workload.requests * workload.output / self._seconds(workload, workload.output)

    def server(self, needs: ServerNeeds) -> ServerCommand | None:
        return self._server(needs)

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()

    def _seconds(self, workload: Workload, tokens: int) -> float:
        batch = [[LOW + token for token in prompt] for prompt in prompts(workload, self._rng, HIGH - LOW)]
        return self._started().generate(batch, tokens)

    def _started(self) -> Worker:
        if self._worker is None:
            self._worker = self._start()
            self._worker.generate([[LOW] * 32], 4)  # the first is slower
        return self._worker
