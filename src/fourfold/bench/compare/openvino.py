"""OpenVINO GenAI, in the environment it is installed in. It has no server of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fourfold.bench.compare.worker import Worker, WorkerPeer

ENGINE = "OpenVINO"


def openvino_peer(
    python: Path, model: Path, threads: int, environment: Mapping[str, str], timeout: float
) -> WorkerPeer:
    """model: a folder of optimum-cli, or a GGUF file of Q4_0 or Q8_0."""
    settings = {"model": str(model), "threads": threads}

    def start() -> Worker:
        return Worker(str(python), "openvino_worker.py", settings, environment)

    return WorkerPeer(f"{ENGINE} {model.stem if model.suffix == '.gguf' else model.name}", start, timeout)
