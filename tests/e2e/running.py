"""A real server in a process of its own, as `fourfold serve` starts it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

START_SECONDS = 120
"""A first start packs the weights."""


@dataclass
class Server:
    """log: standard error so far.  name: what the model is called."""

    url: str
    name: str
    process: subprocess.Popen[str]
    log: list[str] = field(default_factory=list)

    @property
    def engine_pid(self) -> int:
        """Of the front's children the one that runs engine.process; another may be checking constraints."""
        (pid,) = (
            child
            for child in children(self.process.pid)
            if b"fourfold.engine.process" in Path(f"/proc/{child}/cmdline").read_bytes()
        )
        return pid

    def kv(self, headers: dict[str, str] | None = None) -> dict[str, Any]:
        """The ledger of the KV blocks, and what runs and waits."""
        answer: dict[str, Any] = httpx.get(f"{self.url}/debug/kv", headers=headers).json()
        return answer

    def await_idle(self, seconds: float = 20.0) -> dict[str, Any]:
        """The ledger once nothing runs or waits and no block is live."""
        wait_for(lambda: _idle(self.kv()), seconds, lambda: f"the engine is not idle: {self.kv()}")
        return self.kv()

    def metrics(self) -> dict[str, float]:
        """Samples without histogram buckets, by name without labels; sums over labels."""
        found: dict[str, float] = {}
        for line in httpx.get(f"{self.url}/metrics").text.splitlines():
            if not line.startswith("#") and "_bucket" not in line:
                name = re.split(r"[{ ]", line, maxsplit=1)[0]
                found[name] = found.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
        return found


def _idle(kv: dict[str, Any]) -> bool:
    return kv.get("running") == kv.get("waiting") == kv.get("live") == 0


def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(each) for each in text.split()]


def rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def wait_for(
    condition: Callable[[], bool], seconds: float, complaint: Callable[[], str] = lambda: "it did not happen"
) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"after {seconds:g} s: {complaint()}"
        time.sleep(0.02)


def clean_environment(**changes: str) -> dict[str, str]:
    """This process's environment without what would change a server's behaviour."""
    env = {name: value for name, value in os.environ.items() if name != "FOURFOLD_API_KEY"}
    return {**env, "HF_HUB_OFFLINE": "1", **changes}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "fourfold", *arguments]


@contextmanager
def running(model: Path | str, *flags: str, env: Sequence[tuple[str, str]] = ()) -> Iterator[Server]:
    """Stops with SIGTERM; what the server wrote is shown by pytest if the test fails."""
    process = subprocess.Popen(
        command("serve", str(model), "--port", "0", *flags),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environment(**dict(env)),
        # Not the checkout: the package must be found as it is installed, and nothing be written there.
        cwd=tempfile.gettempdir(),
    )
    assert process.stdout is not None
    assert process.stderr is not None
    log: list[str] = []
    stderr = process.stderr

    def read() -> None:
        for line in stderr:
            log.append(line)
            print(line, end="", file=sys.stderr)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    timer = threading.Timer(START_SECONDS, process.kill)
    timer.start()
    try:
        line = process.stdout.readline()
        timer.cancel()
        match = re.match(r"Fourfold serves (\S+) on (http\S+) after", line)
        assert match, f"no ready line but {line!r}; {''.join(log)}"
        yield Server(match[2], match[1], process, log)
    finally:
        timer.cancel()
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
        process.kill()
        process.wait()
        reader.join(5)
        process.stdout.close()
        process.stderr.close()
