"""From the start of the process to the first token over HTTP, and the memory held by then.

python -m tests.e2e.startup [MODEL ...] [--runs N] [--llama-server PATH]

Each model is started once without being measured (the artefact may have to be built, the file to be read into
the system's cache), then N times; with llama-server, of the same file and context, in turn with it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .running import children, clean_environment, command

CONTEXT = 4096
"""Tokens of KV cache that both engines hold when they are compared."""


@dataclass(frozen=True)
class Start:
    """Seconds. connected, first_token: wall, since the process began.  front, engine: CPU time by then.

    rss, pss: bytes of all processes after the first token; in pss a page that several share counts once.
    """

    connected: float
    first_token: float
    front: float
    engine: float
    rss: int
    pss: int


def measure(model: str, *flags: str, llama_server: str | None = None) -> Start:
    """One start. The client tries to connect all the time, as a user with a stop watch would."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    line = (
        command("serve", model, "--port", str(port), *flags)
        if llama_server is None
        else [llama_server, "-m", model, "--port", str(port), "-c", str(CONTEXT), *flags]
    )
    began = time.monotonic()
    process = subprocess.Popen(
        line,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=clean_environment(),
        cwd=tempfile.gettempdir(),
    )
    try:
        connected = asyncio.run(_first_token(port))
        first_token = time.monotonic()
        engines = children(process.pid)
        return Start(
            connected - began,
            first_token - began,
            _cpu_seconds(process.pid),
            sum(map(_cpu_seconds, engines)),
            sum(_memory(pid, "Rss") for pid in (process.pid, *engines)),
            sum(_memory(pid, "Pss") for pid in (process.pid, *engines)),
        )
    finally:
        process.terminate()
        process.wait(30)


async def _first_token(port: int) -> float:
    """When the answer's connection was made. A server that says it is still loading (503) is asked again."""
    body = b'{"prompt":"Hello","max_tokens":4,"stream":true}'
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    head += "Content-Type: application/json\r\nConnection: close\r\n\r\n"
    deadline = time.monotonic() + 60
    while True:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            connected = time.monotonic()
            writer.write(head.encode() + body)
            try:
                status = await reader.readline()
                if b" 200 " in status:
                    await reader.readuntil(b"data: ")
                    return connected
                if b" 503 " not in status:
                    raise RuntimeError(f"the server answered {status!r}")
            finally:
                writer.close()
        if time.monotonic() > deadline:
            raise TimeoutError("no first token within 60 s")
        await asyncio.sleep(0.003)


def _cpu_seconds(pid: int) -> float:
    """User and system time of a process, from /proc (see proc_pid_stat(5))."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _memory(pid: int, kind: str) -> int:
    """Bytes of a process, from /proc/PID/smaps_rollup."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{kind}:"))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", default=["smollm2"])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--llama-server", help="measured in turn with ours; needs paths of GGUF files")
    chosen = parser.parse_args(arguments)
    for name in chosen.models:
        model = str(Path(name).resolve()) if Path(name).exists() else name
        engines = {"fourfold": None, "llama-server": chosen.llama_server}
        if chosen.llama_server is None:
            del engines["llama-server"]
        flags = ("--max-model-len", str(CONTEXT), "--kv-cache-memory", str(_kv_bytes(model)))
        found: dict[str, list[Start]] = {engine: [] for engine in engines}
        for run in range(chosen.runs + 1):
            for engine, binary in engines.items():
                start = measure(model, *(flags if binary is None else ()), llama_server=binary)
                if run:
                    found[engine].append(start)
        for engine, starts in found.items():
            print(f"{name}, {engine}: {_summary(starts)}")
    return 0


def _kv_bytes(model: str) -> int:
    """KV cache of CONTEXT tokens of the model, as bfloat16: what llama-server holds with -c."""
    from fourfold import _native
    from fourfold.build.load import kv_block_bytes
    from fourfold.hub import resolve
    from fourfold.models.registry import load_model_definition
    from fourfold.weights.open import open_checkpoint

    program = load_model_definition(open_checkpoint(resolve(model).path), None).program
    return CONTEXT // _native.BLOCK_TOKENS * kv_block_bytes(program.kv, "bfloat16")


def _summary(starts: Sequence[Start]) -> str:
    first = [start.first_token for start in starts]
    best = min(starts, key=lambda start: start.first_token)
    return (
        f"first token after {statistics.median(first):.3f} s (median of {len(starts)}; {min(first):.3f} to "
        f"{max(first):.3f}); of the best: listening after {best.connected:.3f} s, CPU {best.front:.2f} + "
        f"{best.engine:.2f} s; memory {best.rss / 1e6:.0f} MB RSS, {best.pss / 1e6:.0f} MB PSS"
    )


if __name__ == "__main__":
    sys.exit(main())
