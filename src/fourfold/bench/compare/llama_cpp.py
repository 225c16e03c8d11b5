"""llama.cpp: llama-bench for one stream, llama-batched-bench for many, llama-server over HTTP."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fourfold.bench.compare.commands import output_of
from fourfold.bench.compare.peer import CannotRun, ServerCommand, ServerNeeds
from fourfold.bench.engine import Workload
from fourfold.errors import ConfigError, FourfoldError

VERSION_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class LlamaCpp:
    """programs: name → path of llama-bench, llama-batched-bench, llama-server.  timeout: seconds of a run."""

    programs: Mapping[str, str]
    model: Path
    threads: int
    timeout: float
    name: str = "llama.cpp"

    @staticmethod
    def find(folder: Path | None, model: Path, threads: int, timeout: float) -> LlamaCpp | None:
        """In `folder`, or on the PATH. None if there is no llama-bench there.

        Raises ConfigError if a folder was named and has none.
        """
        names = ("llama-bench", "llama-batched-bench", "llama-server")
        where = None if folder is None else str(folder)
        found = {name: path for name in names if (path := shutil.which(name, path=where)) is not None}
        if "llama-bench" in found:
            return LlamaCpp(found, model, threads, timeout)
        if folder is not None:
            raise ConfigError(f"{folder} has no llama-bench; name the folder of llama.cpp's programs")
        return None

    def version(self) -> str:
        if "llama-server" not in self.programs:
            return "unknown"
        # It says so on standard error.
        command = ["sh", "-c", '"$0" --version 2>&1', self.programs["llama-server"]]
        return llama_version(output_of(command, VERSION_SECONDS))

    def run(self, workload: Workload) -> float:
        threads = ["-m", str(self.model), "-t", str(self.threads)]
        if workload.kind in ("prefill", "decode"):
            lengths = (
                ["-p", str(workload.prompt), "-n", "0"]
                if workload.kind == "prefill"
                else ["-p", "0", "-n", str(workload.output - 1), "-d", str(workload.prompt)]
            )
            command = [self.programs["llama-bench"], *threads, *lengths, "-r", "1", "-o", "jsonl"]
            return llama_bench_speed(output_of(command, self.timeout))
        if workload.kind == "batch":
            if "llama-batched-bench" not in self.programs:
                raise CannotRun("there is no llama-batched-bench beside llama-bench")
            each = workload.prompt + workload.output
            command = [
                self.programs["llama-batched-bench"], *threads,
                "-c", str(workload.requests * each + 256), "-b", "2048", "-ub", "512",
                "-npp", str(workload.prompt), "-ntg", str(workload.output), "-npl", str(workload.requests),
                "--output-format", "jsonl",
            ]  # fmt: skip
            return batched_bench_speed(output_of(command, self.timeout))
        raise CannotRun(
            "llama-batched-bench shares whole prompts only; its server is asked for a shared prefix"
        )

    def server(self, needs: ServerNeeds) -> ServerCommand:
        """Without its cache of prompts in memory beside the KV cache (--cache-ram, up to 8 GiB)."""
        if "llama-server" not in self.programs:
            raise CannotRun("there is no llama-server beside llama-bench")
        threads = str(needs.threads)
        return ServerCommand([
            self.programs["llama-server"], "-m", str(self.model), "-t", threads, "-tb", threads,
            "--host", "127.0.0.1", "--port", str(needs.port), "--parallel", str(needs.sequences),
            "-c", str(needs.kv_tokens), "--no-warmup", "--cache-ram", "0",
        ])  # fmt: skip

    def close(self) -> None:
        """Nothing runs between calls."""


def llama_version(text: str) -> str:
    """Of what `llama-server --version` says: "0.6.0-dev (unknown)" of "version: 0.6.0-dev (unknown)"."""
    for line in text.splitlines():
        if line.startswith("version"):
            return line.removeprefix("version").lstrip(": ")
    return text.strip()[:80] or "unknown"


def llama_bench_speed(output: str) -> float:
    """Tokens/s of the one test in llama-bench's JSON lines. Raises FourfoldError if it is not there."""
    for record in _records(output):
        match record:
            case {"samples_ts": [float() | int() as speed]}:
                return float(speed)
    raise FourfoldError(f"llama-bench gave no speed: {output[-300:]!r}")


def batched_bench_speed(output: str) -> float:
    """Tokens/s of all answers over the whole time of the one test in llama-batched-bench's JSON lines."""
    for record in _records(output):
        match record:
            case {"tg": int(tokens), "pl": int(sequences), "t": float() | int() as seconds} if seconds > 0:
                return tokens * sequences / seconds
    raise FourfoldError(f"llama-batched-bench gave no speed: {output[-300:]!r}")


def _records(output: str) -> Iterator[Any]:
    """The JSON objects among lines of other output."""
    for line in output.splitlines():
        if line.startswith("{"):
            try:
                yield json.loads(line)
            except ValueError as error:
                raise FourfoldError(f"not the JSON that was expected: {line[:200]!r}") from error
