"""`fourfold.server.run.serve` with the fake engine, as a program.

Arguments: seconds to load, per token, and to drain.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fourfold.config import EngineConfig
from fourfold.engine import remote
from fourfold.server import run
from fourfold.server.settings import ServerSettings
from fourfold.types import ModelInfo
from server.fakes import MODEL, FakeClient, tiny_tokenizer

load, step, drain = map(float, sys.argv[1:4])


class Engine(FakeClient):
    def __init__(self, config: EngineConfig, **_: object) -> None:
        super().__init__(tiny_tokenizer(), lambda _: "abcd" * 5)
        self.step = step

    async def ready(self) -> ModelInfo:
        await asyncio.sleep(load)
        return MODEL

    async def close(self) -> None:
        print(f"closed with {len(self.active)} active, {len(self.aborted)} aborted", flush=True)


remote.RemoteEngine = Engine  # type: ignore[misc, assignment]
run.EngineProcess = lambda *_, **__: None  # type: ignore[misc, assignment]
run._load_tokenizer = lambda _: tiny_tokenizer()
print("started", flush=True)
sys.exit(run.serve(EngineConfig(model="x"), ServerSettings(port=0, drain_timeout=drain)))
