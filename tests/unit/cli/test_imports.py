"""What the entry points import, seen in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = ["torch", "transformers"]

ENTRIES = {
    "import fourfold": "import fourfold; fourfold.SamplingParams",
    "LLM": "from fourfold import LLM, SamplingParams",
    "run": "import fourfold.cli.main, fourfold.cli.run, fourfold.cli.session",
    "serve": "import fourfold.cli.main, fourfold.cli.serve, fourfold.server.run, fourfold.server.app",
    "engine process": "import fourfold.engine.process, fourfold.build.load",
}


def modules_after(code: str) -> set[str]:
    script = f"{code}\nimport sys, json\nprint(json.dumps(sorted(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    return set(json.loads(result.stdout.splitlines()[-1]))


@pytest.mark.parametrize("entry", ENTRIES)
def test_neither_torch_nor_transformers(entry: str) -> None:
    assert not modules_after(ENTRIES[entry]) & set(HEAVY)


def test_import_is_lazy() -> None:
    loaded = modules_after("import fourfold")
    assert {name for name in loaded if name.startswith("fourfold")} == {"fourfold", "fourfold._version"}


def test_serving_needs_neither_rich_nor_the_hub_client() -> None:
    loaded = modules_after(ENTRIES["serve"])
    assert not loaded & {"rich", "huggingface_hub", "fourfold.hub.packages"}


def test_help_imports_no_command() -> None:
    loaded = modules_after("from fourfold.cli.main import main; main(['--help'])")
    assert "numpy" not in loaded
    assert "msgspec" not in loaded
    assert "fourfold.cli.serve" not in loaded


def test_unknown_attribute() -> None:
    import fourfold

    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        fourfold.LMM  # noqa: B018
    assert "LLM" in dir(fourfold)
