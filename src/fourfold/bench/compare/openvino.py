"""OpenVINO GenAI, in the Python it is installed for. It has no server of its own."""

from __future__ import annotations

from pathlib import Path

from fourfold.bench.compare.worker import Worker, WorkerPeer


def openvino_peer(python: str, model: Path, threads: int, environment: dict[str, str]) -> WorkerPeer:
    """model: a folder of optimum-cli, or a GGUF file of Q4_0 or Q8_0."""
    settings = {"model": str(model), "threads": threads}
    return WorkerPeer("OpenVINO", lambda: Worker(python, "openvino_worker.py", settings, environment))
