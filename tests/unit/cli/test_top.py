"""`fourfold top`: what it makes of a status, of servers that are none, and of terminals of any width."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from fourfold.cli.main import main
from fourfold.cli.top_source import History, NoStatusError, Source, Status, server_url
from fourfold.cli.top_view import BARS, bar, frame, sparkline

NUMBERS = {
    "running": 2, "waiting": 1, "preemptions": 3, "prompt_tokens": 100, "cached_prompt_tokens": 40,
    "generation_tokens": 50, "prefill_tokens": 60, "finished": 4, "aborted": 1, "step": 9,
    "step_seconds": 1.5, "rss_bytes": 200 << 20,
}  # fmt: skip


def status_of(clock: float = 10.0, text: str = "You are a helpful", **numbers: float) -> dict[str, Any]:
    prefix = {
        "tokens": 64, "hits": 12, "text": text, "last_text": "end", "pinned": True, "in_use": True,
        "token_ids": [1], "last_token_ids": [2],
    }  # fmt: skip
    request = {
        "id": "0123456789abcdef0123456789abcdef-0", "request_id": "x", "state": "decode", "age": 1.25,
        "prompt_tokens": 100, "cached_tokens": 40, "computed_tokens": 70, "generated_tokens": 11,
        "preemptions": 1, "tokens_per_second": 8.0,
    }  # fmt: skip
    return {
        "model": "smol", "version": "1.2", "clock": clock, "max_num_seqs": 8, "stale": None,
        "engine": {**NUMBERS, **numbers},
        "kv": {
            "free": 10, "cached": 20, "live": 30, "in_transfer": 4, "total": 64, "balanced": True,
            "block_size": 32,
            "tree": {"nodes": 50, "tokens": 1600, "domains": 1, "pinned_tokens": 64, "hottest": [prefix] * 3},
        },
        "requests": [request, {**request, "state": "held"}], "others": 5,
    }  # fmt: skip


Answer = Callable[[BaseHTTPRequestHandler], None]


@contextmanager
def serving(answer: Answer, port: int = 0) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self)

        def log_message(self, *_: object) -> None:
            pass

    ThreadingHTTPServer.allow_reuse_address = True
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def reply(code: int, body: bytes, length: int | None = None) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(code)
        handler.send_header("Content-Length", str(len(body) if length is None else length))
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def growing(seen: list[str] | None = None) -> Answer:
    """Each status one second later: 30 known and 10 new tokens, 20 of prompts of which 15 were cached."""
    calls = [0]

    def answer(handler: BaseHTTPRequestHandler) -> None:
        if seen is not None:
            seen.append(f"{handler.path} {handler.headers.get('Authorization')}")
        calls[0] += 1
        n = calls[0]
        status = status_of(
            10.0 + n, prefill_tokens=30 * n, generation_tokens=10 * n, prompt_tokens=20 * n,
            cached_prompt_tokens=15 * n, step=n,
        )  # fmt: skip
        reply(200, json.dumps(status).encode())(handler)

    return answer


def typed(raw: dict[str, Any]) -> Status:
    return msgspec.convert(raw, Status)


@pytest.mark.parametrize(
    "given_url, url",
    [
        ("http://h:1", "http://h:1"), ("http://h:1/", "http://h:1"), ("http://h:1/v1", "http://h:1"),
        ("h:8000", "http://h:8000"), (":81", "http://127.0.0.1:81"), ("https://h", "https://h"),
        ("http://[::1]:80", "http://[::1]:80"), ("localhost", "http://localhost"),
    ],
)  # fmt: skip
def test_urls(given_url: str, url: str) -> None:
    assert server_url(given_url) == url


@pytest.mark.parametrize(
    "bad", ["", "ftp://h", "http://", "h:port", "h:99999", "http://h/path", "http://h?a"]
)
def test_bad_urls(bad: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError):
        server_url(bad)
    assert main(["top", bad]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_once(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    monkeypatch.setenv("FORCE_COLOR", "")
    seen: list[str] = []
    with serving(growing(seen)) as url:
        assert main(["top", url, "--once", "-d", "0.1", "--api-key", "sesame"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out, "no colour where there is no terminal"
    assert seen == ["/debug/status Bearer sesame"] * 2
    for wanted in ("smol", "running 2/8", "queue 1", "preempted 3", "live 30", "free 10  of 64 blocks",
                   "50 blocks, 1600 tokens", "prompt hits 75 %", "0123456789ab", "decode", "held",
                   "5 of other API keys", "pinned You are a helpful ... end"):  # fmt: skip
        assert wanted in out
    assert re.search(r"prefill +30\.0 tok/s", out)
    assert re.search(r"decode +10\.0 tok/s", out)


def test_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOURFOLD_API_KEY", "from-env")
    seen: list[str] = []
    with serving(growing(seen)) as url:
        assert main(["top", url, "--once", "--json", "-d", "0.1"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    data = json.loads(line)
    assert data["rates"] == {
        "prefill_tokens_per_second": 30, "generation_tokens_per_second": 10, "requests_per_second": 0,
        "cached_share": 0.75,
    }  # fmt: skip
    assert data["kv"]["tree"]["hottest"][0]["token_ids"] == [1]
    assert seen[0].endswith("Bearer from-env")


@pytest.mark.parametrize(
    "answer, words, final",
    [
        (reply(401, b"{}"), "API key", True),
        (reply(404, b"nothing"), "no Fourfold server", True),
        (reply(503, b'{"error":{"message":"the engine is loading"}}'), "the engine is loading", False),
        (reply(500, b"<html>"), "500", False),
        (reply(502, b'{"error": 3}'), "502", False),
        (reply(200, b"<html>"), "not as a Fourfold server", True),
        (reply(200, b"\xff\xfe"), "not as a Fourfold server", True),
        (reply(200, b"[]"), "not as a Fourfold server", True),
        (reply(200, b'{"model": 3}'), "not as a Fourfold server", True),
        (reply(200, b"{", 1000), "no server answers", False),
        (lambda handler: handler.connection.close(), "no server answers", False),
    ],
)
def test_servers_that_give_no_status(answer: Answer, words: str, final: bool) -> None:
    with serving(answer) as url:
        with pytest.raises(NoStatusError, match=words) as caught:
            Source(url, timeout=2).status()
        assert caught.value.final is final


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(reply(200, b"")) as url:
        pass
    for flags in (["--once"], ["--json"], []):
        assert main(["top", url, *flags]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert url in line
        assert "fourfold serve" in line


def test_a_server_that_hangs_is_given_up() -> None:
    with serving(lambda handler: time.sleep(0.6)) as url:
        with pytest.raises(NoStatusError, match="timed out"):
            Source(url, timeout=0.1).status()


@given(st.lists(st.floats(0, 1e9), max_size=50))
def test_sparkline(values: list[float]) -> None:
    line = sparkline(values)
    assert len(line) == len(values)
    assert set(line) <= set(BARS)
    # In the order of the values, and the largest is the highest.
    heights = [BARS.index(c) for c in line]
    assert all(a <= b for (x, a) in zip(values, heights, strict=True)
               for (y, b) in zip(values, heights, strict=True) if x <= y)  # fmt: skip
    assert max(values, default=0) <= 0 or max(heights) == len(BARS) - 1


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=4), st.integers(0, 10**6), st.integers(4, 200))
def test_bar(counts: list[int], free: int, width: int) -> None:
    columns = bar(counts, sum(counts) + free, width)
    assert sum(columns) <= width
    for count, column in zip(counts, columns, strict=True):
        assert (column > 0) == (count > 0)
        assert column <= max(1, count / max(1, sum(counts) + free) * width + 1)


def drawn(raw: dict[str, Any], width: int, height: int = 40, **options: Any) -> list[str]:
    status = typed(raw)
    history = History()
    for n in range(5):
        history.add(typed(status_of(float(n), step=n, generation_tokens=n * n)))
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=False, highlight=False)
    console.print(frame(status, history, width, height, url="http://h:1", **options))
    return out.getvalue().splitlines()


@pytest.mark.parametrize("width", [20, 33, 49, 50, 75, 76, 200])
def test_any_width(width: int) -> None:
    lines = drawn(status_of(), width)
    assert all(len(line) <= width for line in lines)
    text = "\n".join(lines)
    assert "tok/s" in text
    assert ("prompt" in text and "cached" in text) or width < 50
    assert all(ord(c) < 128 for line in drawn(status_of(), width, unicode=False) for c in line)


@pytest.mark.parametrize("height", [1, 5, 10, 24, 60])
def test_many_requests_fit_the_height(height: int) -> None:
    raw = status_of()
    raw["requests"] *= 100
    lines = drawn(raw, 100, height)
    assert len(lines) <= max(height, 16)
    assert "more" in "\n".join(lines)


def test_what_a_prompt_holds_does_not_reach_the_terminal() -> None:
    """B: a prefix with escape sequences would move the cursor of who watches."""
    lines = drawn(status_of(text="\x1b[2J\x1b]0;gotcha\x07\r\nnext [bold]line"), 120)
    text = "\n".join(lines)
    assert not any(ord(c) < 32 and c != "\n" for c in text)
    assert "[bold]line" in text


def test_an_old_or_unbalanced_status_says_so() -> None:
    raw = status_of()
    raw["stale"], raw["kv"]["balanced"], raw["kv"]["tree"] = "the engine did not answer", False, None
    text = "\n".join(drawn(raw, 100))
    assert "last heartbeat: the engine did not answer" in text
    assert "NOT BALANCED" in text


def test_a_restarted_server_begins_a_new_history() -> None:
    history = History()
    for clock, step, tokens in ((1.0, 1, 10), (2.0, 2, 20), (3.0, 3, 40)):
        history.add(typed(status_of(clock, step=step, generation_tokens=tokens)))
    assert [rate.decode for rate in history.rates] == [10, 20]
    history.add(typed(status_of(4.0, step=0, generation_tokens=0)))
    assert not history.rates
    for n in range(300):
        history.add(typed(status_of(5.0 + n, step=n + 1)))
    assert len(history.rates) == 120


def test_live_view_waits_for_a_server_that_goes_away() -> None:
    """In a terminal of its own: shown, lost, found again, left with Ctrl-C."""
    leader, follower = pty.openpty()
    screen = b""

    def until(words: bytes, seconds: float = 30.0) -> None:
        nonlocal screen
        end = time.monotonic() + seconds
        while words not in screen:
            assert time.monotonic() < end, screen[-2000:]
            if select.select([leader], [], [], 0.1)[0]:
                screen += os.read(leader, 65536)
        screen = b""

    with serving(growing()) as url:
        # What a shell starts in the background, these tests perhaps, ignores Ctrl-C, and so would the child.
        code = (
            "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler);"
            f"from fourfold.cli.main import main; sys.exit(main(['top', {url!r}, '-d', '0.1']))"
        )
        child = subprocess.Popen(
            [sys.executable, "-c", code], stdin=follower, stdout=follower, stderr=subprocess.PIPE,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"},
        )  # fmt: skip
        until(b"running")
        until(b"tok/s")
    try:
        until(b"waiting for it")
        with serving(growing(), int(url.rpartition(":")[2])):
            until(b"50 blocks")
            child.send_signal(signal.SIGINT)
            end = time.monotonic() + 30
            while child.poll() is None:  # it cannot end while it has to write to a terminal that nobody reads
                assert time.monotonic() < end
                if select.select([leader], [], [], 0.1)[0]:
                    os.read(leader, 65536)
            assert child.returncode == 130
        assert child.stderr is not None
        assert child.stderr.read() == b""
    finally:
        child.kill()
        os.close(leader)
        os.close(follower)
