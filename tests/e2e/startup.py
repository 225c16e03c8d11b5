"""From the start of the process to the first token over HTTP, with an artefact that was built before.

python -m tests.e2e.startup [MODEL]
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from .running import children, clean_environment, command

RUNS = 5


@dataclass(frozen=True)
class Start:
    """Seconds. connected, first_token: wall, since the process began.  front, engine: CPU time by then."""

    connected: float
    first_token: float
    front: float
    engine: float


def measure(model: str) -> Start:
    """One start. The client tries to connect all the time, as a user with a stop watch would."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    began = time.monotonic()
    process = subprocess.Popen(
        command("serve", model, "--port", str(port)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=clean_environment(),
        cwd=tempfile.gettempdir(),
    )
    try:
        connected = asyncio.run(_first_token(port))
        first_token = time.monotonic()
        (engine,) = children(process.pid)
        return Start(connected - began, first_token - began, _cpu_seconds(process.pid), _cpu_seconds(engine))
    finally:
        process.terminate()
        process.wait(30)


async def _first_token(port: int) -> float:
    body = b'{"prompt":"Hello","max_tokens":4,"stream":true}'
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    deadline = time.monotonic() + 60
    while True:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.003)
    connected = time.monotonic()
    writer.write(head.encode() + body)
    await reader.readuntil(b"data: ")
    writer.close()
    return connected


def _cpu_seconds(pid: int) -> float:
    """User and system time of a process, from /proc (see proc_pid_stat(5))."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> int:
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
    path = Path(model)
    model = str(path.resolve()) if path.exists() else model
    runs = [measure(model) for _ in range(RUNS + 1)][1:]  # the first one may build the artefact
    for run in runs:
        print(
            f"first token after {run.first_token:.3f} s (listening after {run.connected:.3f} s); "
            f"CPU: front {run.front:.2f} s, engine {run.engine:.2f} s"
        )
    print(f"best: {min(run.first_token for run in runs):.3f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
