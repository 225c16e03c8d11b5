"""What is compared: anything that runs the workloads of bench.engine, or serves OpenAI's API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fourfold.bench.engine import Workload


@dataclass(frozen=True, slots=True)
class ServerNeeds:
    """What a server is started for. kv_tokens: its KV cache must hold so many."""

    port: int
    threads: int
    sequences: int
    kv_tokens: int


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """environment: changes to this process's own."""

    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)


class Peer(Protocol):
    """One engine with one model. Between calls it uses no processor."""

    @property
    def name(self) -> str: ...
    def version(self) -> str: ...
    def run(self, workload: Workload) -> float | None:
        """Tokens/s as the workload defines them; None if the engine has no way to run it.

        Raises FourfoldError with what the engine said if it fails.
        """
        ...

    def server(self, needs: ServerNeeds) -> ServerCommand | None:
        """None if it has no server."""
        ...

    def close(self) -> None: ...
