"""vLLM for CPUs, in the Python it is installed for."""

from __future__ import annotations

from pathlib import Path

from fourfold.bench.compare.peer import ServerCommand, ServerNeeds
from fourfold.bench.compare.worker import Worker, WorkerPeer

KV_GIB = 3


def vllm_peer(python: str, model: Path, threads: int, environment: dict[str, str]) -> WorkerPeer:
    """model: a Hugging Face folder.  environment: wins over what is set here."""
    changes = {
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(threads),
    } | environment
    settings = {"model": str(model), "threads": threads}

    def server(needs: ServerNeeds) -> ServerCommand:
        command = [
            python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1",
            "--port", str(needs.port), "--served-model-name", "m", "--dtype", "bfloat16",
            "--max-model-len", "4096", "--max-num-seqs", str(needs.sequences),
            "--max-num-batched-tokens", "4096",
        ]  # fmt: skip
        return ServerCommand(command, changes)

    return WorkerPeer("vLLM", lambda: Worker(python, "vllm_worker.py", settings, changes), server)
