"""What is compared: anything that runs the workloads of bench.engine, or serves OpenAI's API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fourfold.bench.engine import Workload
from fourfold.errors import FourfoldError


class CannotRun(FourfoldError):
    """The engine has no way to do this: a gap in the table, not a failure."""


class CannotStart(FourfoldError):
    """The engine does not come up with this model; nothing more is asked of it."""


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
    def version(self) -> str:
        """Known once it ran something; "unknown" before, or if it does not say."""
        ...

    def run(self, workload: Workload) -> float:
        """Tokens/s as the workload defines them.

        Raises CannotRun, CannotStart, or FourfoldError with what the engine said if it fails; it may be
        asked again after the last.
        """
        ...

    def server(self, needs: ServerNeeds) -> ServerCommand:
        """Raises CannotRun if it has no server."""
        ...

    def close(self) -> None: ...
