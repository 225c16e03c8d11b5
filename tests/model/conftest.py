from __future__ import annotations

from pathlib import Path

import pytest

from fourfold.errors import FourfoldError
from fourfold.hub import resolve
from fourfold.text.tokenizer import Tokenizer, load_tokenizer
from fourfold.weights.open import open_checkpoint

from .reference import Transformers


@pytest.fixture(scope="session", params=["smollm2", pytest.param("gemma3-270m", marks=pytest.mark.slow)])
def path(request: pytest.FixtureRequest) -> Path:
    """Every test of a real model runs on each; the second one only in `make test-all`."""
    alias: str = request.param
    try:
        return resolve(alias, offline=True).path
    except FourfoldError as error:
        pytest.skip(f"{alias} is not on this machine (`fourfold pull {alias}` fetches it): {error}")


@pytest.fixture(scope="session")
def tokenizer(path: Path) -> Tokenizer:
    return load_tokenizer(open_checkpoint(path))


@pytest.fixture(scope="session")
def reference(path: Path) -> Transformers:
    return Transformers(path)
