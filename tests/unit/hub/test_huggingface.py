"""The Hub client against a cache laid out by hand and against a server that is not there: no network."""

from __future__ import annotations

import socket
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from fourfold.config import child_environment

SCRIPT = """
import sys
from fourfold.errors import FourfoldError
from fourfold.hub import resolve
try:
    print(resolve(sys.argv[1]).path)
except FourfoldError as error:
    print(type(error).__name__, error)
"""


def cached(home: Path, repo: str, files: dict[str, str]) -> Path:
    """A snapshot in the layout that huggingface_hub documents for its cache."""
    base = home / "hub" / f"models--{repo.replace('/', '--')}"
    commit = "0123456789abcdef0123456789abcdef01234567"
    (base / "refs").mkdir(parents=True)
    (base / "refs" / "main").write_text(commit)
    snapshot = base / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for name, text in files.items():
        (snapshot / name).write_text(text)
    return snapshot


def ask(name: str, home: Path, **env: str) -> str:
    """In a process of its own: the client reads its environment once, when imported."""
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, name],
        env=child_environment(HF_HOME=str(home), FOURFOLD_CACHE_DIR=str(home / "ours"), **env),
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return result.stdout.strip()


def test_cached_models_are_used_offline(tmp_path: Path) -> None:
    folder = cached(tmp_path, "org/hf", {"config.json": "{}", "model.safetensors": "x"})
    assert ask("org/hf", tmp_path, HF_HUB_OFFLINE="1") == str(folder)
    folder = cached(tmp_path, "org/gguf", {"a-Q4_0.gguf": "x", "a-Q8_0.gguf": "x"})
    assert ask("org/gguf:Q8_0", tmp_path, HF_HUB_OFFLINE="1") == str(folder / "a-Q8_0.gguf")
    assert "a-Q4_0.gguf, a-Q8_0.gguf" in ask("org/gguf", tmp_path, HF_HUB_OFFLINE="1")


def test_not_cached_and_offline(tmp_path: Path) -> None:
    answer = ask("org/none", tmp_path, HF_HUB_OFFLINE="1")
    assert answer.startswith("ModelNotFoundError org/none is not (wholly) in the Hugging Face cache")
    assert "HF_HUB_OFFLINE" in answer


@pytest.mark.parametrize("name", ["org/none", "org/none:x.gguf"])
def test_unreachable_hub(tmp_path: Path, name: str) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}"
    answer = ask(name, tmp_path, HF_ENDPOINT=endpoint, HF_HUB_OFFLINE="0")
    assert answer.startswith("DownloadError cannot fetch org/none"), answer
    assert f"tried {endpoint}/org/none" in answer


def test_unreachable_hub_falls_back_on_the_cache(tmp_path: Path) -> None:
    folder = cached(tmp_path, "org/hf", {"config.json": "{}", "model.safetensors": "x"})
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}"
    assert ask("org/hf", tmp_path, HF_ENDPOINT=endpoint, HF_HUB_OFFLINE="0") == str(folder)


@pytest.mark.parametrize(
    "status,code,words",
    [
        (401, "RepoNotFound", "no repository org/none"),
        (403, "GatedRepo", "org/none is gated"),
        (500, "", "cannot fetch"),
    ],
)
def test_what_the_hub_answers_is_told(tmp_path: Path, status: int, code: str, words: str) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, *args: object) -> None:
            """Quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        assert words in ask("org/none", tmp_path, HF_ENDPOINT=endpoint, HF_HUB_OFFLINE="0")
        server.shutdown()
