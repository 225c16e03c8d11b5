"""`fourfold bench serve` against the made-up server: table, JSON, plot, exit codes."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from fourfold.cli.main import main

from .fake_server import Seen, completion, serving

Capture = pytest.CaptureFixture[str]


def reply(path: str, body: dict[str, Any]) -> tuple[int, list[bytes]]:
    if path == "/v1/models":
        return 200, [b'{"data": [{"id": "fake"}]}']
    if body.get("top_k") == 13:
        return 400, [b"unlucky"]
    usage = {"completion_tokens": body["max_tokens"], "prompt_tokens": 5}
    return 200, completion(["x"] * body["max_tokens"], usage)


@pytest.fixture
def server() -> Iterator[tuple[str, Seen]]:
    """A URL, and what was asked of it. The server has a thread of its own."""
    started, stop = threading.Event(), asyncio.Event()
    found: list[Any] = []

    async def serve() -> None:
        async with serving(reply) as (where, seen):
            found.extend([f"http://127.0.0.1:{where.port}", seen, asyncio.get_running_loop()])
            started.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert started.wait(10)
    yield found[0], found[1]
    found[2].call_soon_threadsafe(stop.set)
    thread.join(10)


def test_table_and_json(server: tuple[str, Seen], tmp_path: Path, capsys: Capture) -> None:
    url, seen = server
    out = tmp_path / "run.json"
    arguments = [
        "bench",
        "serve",
        "--base-url",
        url,
        "-n",
        "6",
        "--concurrency",
        "2",
        "--goodput",
        "ttft:5000",
    ]
    arguments += ["--random-input-len", "3", "--random-output-len", "4", "--shared-prefix", "2"]
    assert main([*arguments, "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "6 of 6 requests" in printed
    assert "TTFT" in printed
    record = json.loads(out.read_text())
    (run,) = record["runs"]
    assert (record["model"], run["completed"], run["output_tokens"], run["concurrency"]) == ("fake", 6, 24, 2)
    assert run["goodput_requests_per_second"] == pytest.approx(run["requests_per_second"])
    asked = [body for path, _, body in seen.requests if path == "/v1/completions"]
    assert len(asked) == 7  # and one to warm up
    assert {len(body["prompt"]) for body in asked} == {5}


def test_sweep_and_plot(server: tuple[str, Seen], tmp_path: Path, capsys: Capture) -> None:
    plot = tmp_path / "sweep.svg"
    arguments = ["bench", "serve", "--url", server[0], "-n", "4", "--sweep", "1,2", "--plot", str(plot)]
    assert main([*arguments, "--random-output-len", "3", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [run["concurrency"] for run in record["runs"]] == [1, 2]
    circles = ElementTree.parse(plot).getroot().findall("{http://www.w3.org/2000/svg}circle")
    assert len(circles) == 8  # two metrics, two percentiles, two runs


def test_failures_fail(server: tuple[str, Seen], capsys: Capture) -> None:
    arguments = ["bench", "serve", "--url", server[0], "-n", "2", "--warmups", "0"]
    assert main([*arguments, "--extra-body", '{"top_k": 13}']) == 1
    assert "2 failed: HTTP 400: unlucky" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments,status,message",
    [
        (["--url", "http://192.0.2.1:80"], 1, "--allow-remote"),
        (["--url", "http://127.0.0.1:1"], 1, "is the server running"),
        (["--plot", "x.svg"], 2, "--plot needs --sweep"),
        (["--sweep", "1,x"], 2, "list of positive numbers"),
        (["--model", "m", "--goodput", "speed:1"], 1, "like ttft:500"),
        (["--model", "m", "--extra-body", "{"], 1, "is not JSON"),
        (["--model", "m", "--extra-body", "[]"], 1, "must be a JSON object"),
        (["--model", "m", "--random-ids", "9", "3"], 2, "must be smaller"),
        (["--model", "m", "--dataset", "/no/such/file", "--warmups", "0"], 1, "cannot be read"),
        (["--model", "m", "--request-rat", "3"], 2, "--request-rate"),
    ],
)
def test_mistakes(arguments: list[str], status: int, message: str, capsys: Capture) -> None:
    assert main(["bench", "serve", *arguments]) == status
    assert message in capsys.readouterr().err
