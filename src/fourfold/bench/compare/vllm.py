"""vLLM for CPUs, in the environment it is installed in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from fourfold.bench.compare.peer import ServerCommand, ServerNeeds
from fourfold.bench.compare.worker import Worker, WorkerPeer

ENGINE = "vLLM"
KV_GIB = 3


def vllm_peer(
    python: Path, model: Path, cpus: Sequence[int], environment: Mapping[str, str], timeout: float
) -> WorkerPeer:
    """model: a Hugging Face folder.  cpus: one thread runs on each.  environment: wins over what is set
    here."""
    changes = {
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cpus)),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(len(cpus)),
        **environment,
    }

    def start() -> Worker:
        return Worker(str(python), "vllm_worker.py", {"model": str(model)}, changes)

    def server(needs: ServerNeeds) -> ServerCommand:
        command = [
            str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
            "--host", "127.0.0.1", "--port", str(needs.port), "--served-model-name", "m",
            "--dtype", "bfloat16", "--max-model-len", "4096", "--max-num-seqs", str(needs.sequences),
            "--max-num-batched-tokens", "4096",
        ]  # fmt: skip
        return ServerCommand(command, changes)

    return WorkerPeer(ENGINE, start, timeout, server)
