"""This engine as a peer of the others."""

from __future__ import annotations

import sys
from pathlib import Path

from fourfold.bench.compare.peer import ServerCommand, ServerNeeds
from fourfold.bench.compare.worker import Worker, WorkerPeer

NAME = "fourfold"


def fourfold_peer(model: Path, threads: int, kv_bytes_per_token: int, timeout: float) -> WorkerPeer:
    """kv_bytes_per_token: to give the server the KV cache that was asked for."""

    def start() -> Worker:
        return Worker(sys.executable, "fourfold_worker.py", {"model": str(model), "threads": threads})

    def server(needs: ServerNeeds) -> ServerCommand:
        return ServerCommand([
            sys.executable, "-m", "fourfold", "serve", str(model), "--host", "127.0.0.1",
            "--port", str(needs.port), "--threads", str(needs.threads),
            "--max-num-seqs", str(needs.sequences),
            "--kv-cache-memory", str(needs.kv_tokens * kv_bytes_per_token),
        ])  # fmt: skip

    return WorkerPeer(NAME, start, timeout, server)
