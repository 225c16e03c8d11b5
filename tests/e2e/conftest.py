from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from fourfold.errors import FourfoldError
from fourfold.hub import resolve

from .running import Server, running
from .tiny import write_tiny_model


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny.gguf")


@pytest.fixture(scope="session")
def real_model() -> Path:
    try:
        return resolve("smollm2", offline=True).path
    except FourfoldError as error:
        pytest.skip(f"smollm2 is not on this machine (`fourfold pull smollm2` fetches it): {error}")


@pytest.fixture(scope="session")
def tiny_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    cache = tmp_path_factory.mktemp("cache")
    with running(tiny_model, "--threads", "1", env=[("FOURFOLD_CACHE_DIR", str(cache))]) as server:
        yield server


@pytest.fixture(scope="session")
def real_server(real_model: Path) -> Iterator[Server]:
    with running(real_model, "--served-model-name", "smollm2") as server:
        yield server


@pytest.fixture
def tiny(tiny_server: Server) -> OpenAI:
    return OpenAI(base_url=f"{tiny_server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def real(real_server: Server) -> OpenAI:
    return OpenAI(base_url=f"{real_server.url}/v1", api_key="none", max_retries=0)
