"""The server as operators meet it: start, signals, a killed engine, keys, taken ports, wrong names."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import httpx
import pytest

from .running import Server, clean_environment, command, rss_bytes, running, wait_for


def _fails(*arguments: str, **env: str) -> tuple[int, str]:
    done = subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=60, env=clean_environment(**env)
    )
    assert done.stdout == ""
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    "arguments, code, words",
    [
        (("serve", "smolm2"), 1, ("smolm2", "smollm2")),
        (("serve", "nowhere/model.gguf"), 1, ("nowhere/model.gguf",)),
        (("run", "smollm2", "hi", "--temprature", "1"), 2, ("--temprature", "--temperature")),
        (("serve", "--gpu-layers", "3"), 2, ("--gpu-layers",)),
        (("srve",), 2, ("srve", "serve")),
        (("serve", "--port", "99999"), 2, ("99999",)),
    ],
)
def test_mistakes(arguments: tuple[str, ...], code: int, words: tuple[str, ...]) -> None:
    """One line that says what is wrong and what is near."""
    returned, error = _fails(*arguments)
    assert returned == code
    assert error.count("\n") == 1, error
    for word in words:
        assert word in error


def test_taken_port(tiny_model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        code, error = _fails("serve", str(tiny_model), "--port", port)
    assert code == 1
    assert port in error
    assert "Traceback" not in error


def test_not_a_model(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF" + bytes(100))
    code, error = _fails("serve", str(path), "--port", "0", FOURFOLD_CACHE_DIR=str(tmp_path / "cache"))
    assert code == 1
    assert str(path) in error
    assert "Traceback" not in error


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains(tiny_model: Path, tmp_path: Path, number: signal.Signals) -> None:
    with running(tiny_model, env=[("FOURFOLD_CACHE_DIR", str(tmp_path))]) as server:
        body = {"prompt": "ab", "max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.process.send_signal(number)
            rest = list(lines)
        assert rest[-2:] == ["data: [DONE]", ""]
        assert '"finish_reason":"length"' in "".join(rest)
        assert server.process.wait(20) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health")


def test_the_engine_is_restarted(tiny_model: Path, tmp_path: Path) -> None:
    """Who was answered gets an error, who was not yet is answered by the new engine; the front stays."""
    with running(tiny_model, env=[("FOURFOLD_CACHE_DIR", str(tmp_path))]) as server:
        url = f"{server.url}/v1/completions"
        body = {"prompt": "ab", "max_tokens": 480, "temperature": 0, "ignore_eos": True}
        waiting: list[httpx.Response] = []
        with httpx.stream("POST", url, json={**body, "stream": True}, timeout=30) as answer:
            lines = answer.iter_lines()
            next(lines)
            thread = threading.Thread(
                target=lambda: waiting.append(httpx.post(url, json={**body, "max_tokens": 3}, timeout=30))
            )
            first = server.engine_pid
            # Halted, so that neither answer is over before the end comes.
            os.kill(first, signal.SIGSTOP)
            thread.start()
            time.sleep(0.5)
            os.kill(first, signal.SIGKILL)
            rest = "".join(lines)
        assert '"error"' in rest
        assert rest.endswith("data: [DONE]")
        wait_for(lambda: httpx.get(f"{server.url}/health").status_code == 200, 20)
        assert server.engine_pid != first
        thread.join(20)
        assert waiting[0].status_code == 200
        assert waiting[0].json()["usage"]["completion_tokens"] == 3
        assert server.await_idle()["balanced"]


def test_the_engine_does_not_outlive_a_killed_front(tiny_model: Path, tmp_path: Path) -> None:
    with running(tiny_model, env=[("FOURFOLD_CACHE_DIR", str(tmp_path))]) as server:
        engine = server.engine_pid
        server.process.kill()
        wait_for(lambda: not Path(f"/proc/{engine}").exists(), 30)


def test_api_key(tiny_model: Path, tmp_path: Path) -> None:
    env = [("FOURFOLD_CACHE_DIR", str(tmp_path))]
    with running(tiny_model, "--api-key", "secret", env=env) as server:
        assert httpx.get(f"{server.url}/health").status_code == 200
        for path in ("/v1/models", "/metrics", "/docs", "/debug/kv", "/version"):
            assert httpx.get(server.url + path).status_code == 401
            headers = {"Authorization": "Bearer secret"}
            assert httpx.get(server.url + path, headers=headers).status_code == 200
        log = " ".join(server.log)
        assert "secret" not in log
        assert "API keys: 1" in log
        assert "threads: " in log
        command_line = Path(f"/proc/{server.engine_pid}/cmdline").read_bytes()
        assert b"secret" not in command_line


def test_memory_stays(tiny_server: Server) -> None:
    """Absurd requests cost nothing (B19)."""
    before = rss_bytes(tiny_server.process.pid), rss_bytes(tiny_server.engine_pid)
    for body in ({"n": 10**6}, {"max_tokens": 10**9}, {"n": 128, "best_of": 10**9}):
        answer = httpx.post(f"{tiny_server.url}/v1/completions", json={"prompt": "a", **body})
        assert answer.status_code == 400
    after = rss_bytes(tiny_server.process.pid), rss_bytes(tiny_server.engine_pid)
    assert all(new - old < 20e6 for old, new in zip(before, after, strict=True))
