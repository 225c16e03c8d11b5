"""The server as a process: ready line, drain, exit codes, what it imports."""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from fourfold.config import EngineConfig
from fourfold.errors import ConfigError
from fourfold.server import run
from fourfold.server.settings import ServerSettings

from .sse import events, texts

Program = subprocess.Popen[str]


@pytest.fixture
def program() -> Iterator[Callable[..., Program]]:
    running: list[Program] = []

    def start(load: float = 0, step: float = 0, drain: float = 10) -> Program:
        script = Path(__file__).with_name("serve_fake.py")
        process = subprocess.Popen(
            [sys.executable, str(script), str(load), str(step), str(drain)], stdout=subprocess.PIPE, text=True
        )
        running.append(process)
        assert _line(process) == "started"
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate()


def _line(process: Program) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def _ready(process: Program) -> tuple[str, str]:
    """URL and example of the ready line."""
    first = _line(process)
    assert first.startswith("Fourfold serves tiny on http://127.0.0.1:")
    return first.split(" on ")[1].split()[0], _line(process)


def test_ready_line_has_a_command_that_works(program: Callable[..., Program]) -> None:
    process = program()
    url, example = _ready(process)
    assert httpx.get(f"{url}/health").status_code == 200
    words = shlex.split(example)
    assert words[:2] == ["curl", f"{url}/v1/chat/completions"]
    body = json.loads(words[-1])
    answer = httpx.post(words[1], json=body, headers=dict([words[3].split(": ")])).json()
    assert answer["choices"][0]["message"]["content"] == "abcd" * 5
    if shutil.which("curl"):
        done = subprocess.run(["curl", "-s", *words[1:]], capture_output=True, check=True)
        assert json.loads(done.stdout)["object"] == "chat.completion"
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 0


def test_sigterm_drains(program: Callable[..., Program]) -> None:
    """A running answer is finished, nothing new is taken, the exit code is 0."""
    process = program(step=0.1)
    url, _ = _ready(process)
    received: list[str] = []

    def read() -> None:
        body = {"prompt": "a", "stream": True, "max_tokens": 50}
        received.append(httpx.post(f"{url}/v1/completions", json=body, timeout=20).text)

    reader = threading.Thread(target=read)
    reader.start()
    time.sleep(0.4)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.4)
    assert process.poll() is None
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")
    reader.join(20)
    assert texts(events(received[0])) == {0: "abcd" * 5}
    assert process.wait(10) == 0
    assert _line(process) == "closed with 0 active, 0 aborted"


@pytest.mark.parametrize("twice", [False, True])
def test_drain_ends(program: Callable[..., Program], twice: bool) -> None:
    """What does not finish in time, or before a second signal, ends with an error; the exit code is 0."""
    process = program(step=0.3, drain=30 if twice else 1)
    url, _ = _ready(process)
    received: dict[bool, httpx.Response] = {}

    def ask(stream: bool) -> None:
        body = {"prompt": "a", "stream": stream, "max_tokens": 100, "ignore_eos": True}
        received[stream] = httpx.post(f"{url}/v1/completions", json=body, timeout=20)

    readers = [threading.Thread(target=ask, args=(stream,)) for stream in (False, True)]
    for reader in readers:
        reader.start()
    time.sleep(0.8)
    process.send_signal(signal.SIGTERM)
    if twice:
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0
    assert _line(process) == "closed with 0 active, 2 aborted"
    for reader in readers:
        reader.join(10)
    assert received[False].status_code == 503
    assert received[False].json()["error"]["code"] == "shutting_down"
    assert received[True].status_code == 200
    assert events(received[True].text)[-1]["error"]["code"] == "shutting_down"


def test_sigterm_while_loading(program: Callable[..., Program]) -> None:
    process = program(load=60)
    time.sleep(1.5)
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0
    assert _line(process) == "closed with 0 active, 0 aborted"


def test_taken_port_is_noticed_before_loading() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}.*--port"):
            run.serve(EngineConfig(model="/nonexistent"), ServerSettings(port=port))


def test_bad_host() -> None:
    with pytest.raises(ConfigError, match="--host"):
        run.listen("no.such.host.invalid", 0)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("", "http://127.0.0.1:8000"),
        ("::", "http://[::1]:8000"),
        ("::1", "http://[::1]:8000"),
        ("box.local", "http://box.local:8000"),
    ],
)
def test_address(host: str, url: str) -> None:
    assert run.address(host, 8000) == url


def test_example_survives_a_shell_and_hides_the_key() -> None:
    name = 'it\'s "a" $model'
    words = shlex.split(run.example("http://x", name, chat=False, keyed=True))
    assert json.loads(words[-1])["model"] == name
    assert "Authorization: Bearer $FOURFOLD_API_KEY" in words


def _imported(statement: str, names: tuple[str, ...]) -> list[str]:
    code = f"import sys; {statement}; print(*[name for name in {names!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_the_engine_starts_before_the_framework_is_imported() -> None:
    heavy = ("fastapi", "uvicorn", "pydantic", "tokenizers", "jinja2", "numpy", "torch", "transformers")
    assert _imported("import fourfold.server.run", heavy) == []


def test_the_front_is_lean() -> None:
    heavy = ("torch", "transformers", "prometheus_client", "jinja2", "huggingface_hub", "rich")
    assert _imported("import fourfold.server.app, fourfold.server.host", heavy) == []
