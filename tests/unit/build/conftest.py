from __future__ import annotations

from pathlib import Path

import pytest
from models.tiny_models import CASES, make_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a few thousand random weights; not to be changed."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    make_model(CASES["llama-tied"]).save_pretrained(folder)
    return folder
