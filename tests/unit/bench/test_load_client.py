"""The load client against a server that cuts, delays, fails and lies."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.bench.load.dataset import RandomItems, RequestShape
from fourfold.bench.load.http import Server, is_loopback
from fourfold.bench.load.measure import Answer, Prepared, send
from fourfold.bench.load.models import served_models
from fourfold.bench.load.run import Arrivals, LoadRun, run_load
from fourfold.errors import ConfigError, FourfoldError

from .fake_server import Reply, Seen, completion, event, serving

USAGE = {"completion_tokens": 3, "prompt_tokens": 7, "prompt_tokens_details": {"cached_tokens": 4}}


def ask(pieces: Sequence[bytes | float], status: int = 200, timeout: float | None = 5) -> Answer:
    async def main() -> Answer:
        async with serving(lambda path, body: (status, pieces)) as (server, _):
            return await send(server, Prepared("/v1/completions", {"prompt": [1]}, 9), timeout)

    return asyncio.run(main())


def test_times() -> None:
    first, *rest = completion(["a", "b", "c"], USAGE)
    answer = ask([0.05, first, 0.03, *rest])
    assert answer.error is None
    assert (answer.text, answer.finish_reason) == ("abc", "length")
    assert (answer.output_tokens, answer.prompt_tokens, answer.cached_tokens) == (3, 7, 4)
    assert answer.ttft >= 0.05
    assert answer.gaps[0] >= 0.03
    assert answer.tpot is not None
    assert answer.tpot == pytest.approx(sum(answer.gaps) / 2)
    assert answer.e2e >= answer.ttft + sum(answer.gaps)


STREAM = b"".join(completion(["a", "", "é", "c"], USAGE | {"completion_tokens": 4}))


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, len(STREAM) - 1), max_size=12))
def test_any_cut(cuts: list[int]) -> None:
    edges = sorted({0, *cuts, len(STREAM)})
    answer = ask([STREAM[a:b] for a, b in itertools.pairwise(edges)])
    assert (answer.error, answer.text, answer.output_tokens, len(answer.arrivals)) == (None, "aéc", 4, 4)


def test_chat_counts_no_role_and_no_end() -> None:
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "hm"},
        {"content": "yes"},
        {"tool_calls": [{"index": 0}]},
        {},
    ]
    answer = ask([event({"choices": [{"delta": delta}]}) for delta in deltas] + [event("[DONE]")])
    assert (answer.output_tokens, answer.text, answer.prompt_tokens) == (3, "yes", 9)


@pytest.mark.parametrize(
    "pieces,status,message",
    [
        ([b'{"error": {"message": "too long"}}'], 400, 'HTTP 400: {"error": {"message": "too long"}}'),
        ([event({"error": {"message": "engine died"}}), event("[DONE]")], 200, "engine died"),
        (completion(["a"])[:-1], 200, "without .DONE."),
        ([event("[DONE]")], 200, "no tokens"),
        ([event("{not json}")], 200, "malformed"),
        ([event('{"choices": [{"text": 5}]}')], 200, "Expected"),
        ([*completion(["a"])[:1], b""], 200, "closed the connection"),
        ([1.0], 200, "within 0.2 s"),
    ],
)
def test_failures(pieces: list[bytes | float], status: int, message: str) -> None:
    answer = ask(pieces, status, timeout=0.2)
    assert not answer.ok
    assert answer.error is not None
    assert re.search(message, answer.error), answer.error


def test_not_http() -> None:
    async def main() -> Answer:
        async def nonsense(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"SSH-2.0-x\r\n")
            writer.close()

        listener = await asyncio.start_server(nonsense, "127.0.0.1", 0)
        async with listener:
            port = listener.sockets[0].getsockname()[1]
            return await send(Server("127.0.0.1", port, False, ""), Prepared("/", {}))

    assert "not HTTP" in (asyncio.run(main()).error or "")


def test_nobody_listens() -> None:
    server = Server("127.0.0.1", 1, False, "")
    assert not asyncio.run(send(server, Prepared("/", {}))).ok
    with pytest.raises(FourfoldError, match=r"127.0.0.1:1/v1/models.*is the server running"):
        asyncio.run(served_models(server))


def load(reply: Reply, count: int, arrivals: Arrivals) -> tuple[LoadRun, Seen]:
    async def main() -> tuple[LoadRun, Seen]:
        async with serving(reply) as (server, seen):
            requests = RequestShape("m").prepare(RandomItems(4, 2).items(count, 0))
            return await run_load(server, requests, arrivals), seen

    return asyncio.run(main())


def test_concurrency_is_kept() -> None:
    run, seen = load(lambda path, body: (200, [0.01, *completion(["x"])]), 12, Arrivals(3))
    assert seen.most == 3
    assert [answer.error for answer in run.answers] == [None] * 12
    assert run.seconds >= 0.04
    prompts = [body["prompt"] for _, _, body in seen.requests]
    assert len({tuple(prompt) for prompt in prompts}) == 12


def test_rate_is_kept() -> None:
    run, seen = load(lambda path, body: (200, completion(["x"])), 40, Arrivals(rate=200))
    sent = [answer.sent for answer in run.answers]
    assert sent == sorted(sent)
    # 39 exponential gaps of 5 ms on average: a factor of two is more than six standard deviations away.
    assert sent[-1] - sent[0] > 39 * 0.005 / 2
    assert len(seen.requests) == 40


def test_one_failure_is_one() -> None:
    def reply(path: str, body: dict[str, Any]) -> tuple[int, list[bytes]]:
        return (500, [b"boom"]) if body["prompt"][0] % 2 else (200, completion(["x"]))

    run, seen = load(reply, 10, Arrivals(2))
    odd = sum(body["prompt"][0] % 2 for _, _, body in seen.requests)
    assert sum(not answer.ok for answer in run.answers) == odd


def test_key_and_path() -> None:
    async def main() -> Seen:
        async with serving(lambda path, body: (200, completion(["x"]))) as (server, seen):
            with_key = Server(server.host, server.port, False, "/proxy", "secret")
            await send(with_key, Prepared("/v1/completions", {}))
            return seen

    ((path, headers, _),) = asyncio.run(main()).requests
    assert path == "/proxy/v1/completions"
    assert headers["authorization"] == "Bearer secret"


def test_models() -> None:
    async def main(status: int, body: str) -> list[str]:
        async with serving(lambda path, _: (status, [body.encode()])) as (server, _seen):
            return await served_models(server)

    assert asyncio.run(main(200, json.dumps({"data": [{"id": "a"}, {"id": "b"}]}))) == ["a", "b"]
    with pytest.raises(FourfoldError, match="status 200, no models"):
        asyncio.run(main(200, '{"data": []}'))
    with pytest.raises(FourfoldError, match="status 401"):
        asyncio.run(main(401, "{}"))


@pytest.mark.parametrize(
    "url,host,port,path",
    [
        ("http://127.0.0.1:8000", "127.0.0.1", 8000, ""),
        ("http://localhost:9/v1", "localhost", 9, ""),
        ("http://[::1]:9/a/v1/", "::1", 9, "/a"),
        ("localhost:81", "localhost", 81, ""),
        ("https://example.com", "example.com", 443, ""),
    ],
)
def test_urls(url: str, host: str, port: int, path: str) -> None:
    server = Server.parse(url)
    assert (server.host, server.port, server.path) == (host, port, path)


@pytest.mark.parametrize("url", ["", "ftp://x", "http://", "http://x:99999", "http://x:port"])
def test_bad_urls(url: str) -> None:
    with pytest.raises(ConfigError, match="not the URL of a server"):
        Server.parse(url)


def test_only_this_machine() -> None:
    assert is_loopback("127.0.0.1")
    assert is_loopback("::1")
    for host in ("192.0.2.1", "0.0.0.0", "no-such-host.invalid"):
        assert not is_loopback(host)
    with pytest.raises(ConfigError, match="--allow-remote"):
        Server.parse("http://192.0.2.1").require_loopback()
