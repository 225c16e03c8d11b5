"""Constraints made to hurt: refused within limits while a neighbour's stream goes on as before."""

from __future__ import annotations

import json
import statistics
import threading
import time
from typing import Any

import httpx
import pytest

from .running import Server

DEEP: Any = {"type": "object"}
for _ in range(500):
    DEEP = {"type": "array", "items": DEEP}

HOSTILE: dict[str, dict[str, Any]] = {
    "catastrophic regex": {"guided_regex": "((a{1,1000}){1,1000}){1,1000}"},
    "nested repeats in a pattern": {"guided_json": {"type": "string", "pattern": "^(((x?){99}){99}){99}$"}},
    "nested repeats in a regex": {"guided_regex": "((((((x?){10}){10}){10}){10}){10}){10}"},
    "deep recursion": {"guided_json": DEEP},
    "a reference to nothing but itself": {"guided_json": {"$ref": "#"}},
    "10 MB schema": {"guided_json": {"description": "x" * (10 << 20), "type": "string"}},
    "1e6-item enum": {"guided_json": {"enum": list(range(1_000_000))}},
    "20,000 long names": {"guided_json": {"enum": [f"{'y' * 45}{i}" for i in range(20_000)]}},
    "remote $ref": {"guided_json": {"$ref": "http://127.0.0.1:9/schema.json"}},
    "1000 tools of 10 kB": {"tools": [
        {"type": "function", "function": {"name": f"f{i}", "parameters": {
            "type": "object", "properties": {f"p{n}": {"enum": ["a", "b"]} for n in range(300)}}}}
        for i in range(1000)]},
    "10,000 objects": {"guided_json": {"type": "object", "properties": {
        f"p{n}": {"type": "object", "properties": {"a": {"type": "string"}}} for n in range(10_000)}}},
    "a grammar of references": {"structured_outputs": {"grammar": "start: a a a a\n" + "\n".join(
        f"{chr(97 + i)}: " + " ".join([chr(98 + i)] * 30) for i in range(20)) + "\nu: /x/"}},
}  # fmt: skip
MAY_BE_SERVED = {
    "catastrophic regex", "20,000 long names", "a grammar of references",
}  # fmt: skip
"""Large, but within the limits: nothing here backtracks."""


TEXT, CHAT = {"prompt": "a"}, {"messages": [{"role": "user", "content": "a"}]}
BODIES = {
    name: json.dumps({"max_tokens": 4, **(CHAT if "tools" in each else TEXT), **each})
    for name, each in HOSTILE.items()
}
"""Written beforehand: what writing them takes is not to count as the neighbour's wait."""


class Neighbour(threading.Thread):
    """A stream that notes when its chunks come."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        self.server, self.times, self.stop, self.started = server, [], threading.Event(), threading.Event()

    def run(self) -> None:
        body = {"prompt": "Go", "max_tokens": 200, "stream": True, "ignore_eos": True, "temperature": 1}
        while not self.stop.is_set():
            with httpx.stream("POST", f"{self.server.url}/v1/completions", json=body, timeout=60) as response:
                last = None
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        now = time.perf_counter()
                        if last is not None:
                            self.times.append((now, now - last))
                        last = now
                        self.started.set()
                    if self.stop.is_set():
                        return

    def gaps(self, begin: float, end: float) -> list[float]:
        return [gap for at, gap in self.times if begin <= at <= end]


def test_hostile_constraints(tiny_server: Server) -> None:
    ok = {"prompt": "a", "max_tokens": 2, "guided_choice": ["x"]}
    assert httpx.post(f"{tiny_server.url}/v1/completions", json=ok, timeout=60).status_code == 200
    neighbour = Neighbour(tiny_server)
    neighbour.start()
    try:
        assert neighbour.started.wait(20)
        begin = time.perf_counter()
        time.sleep(2)
        alone = neighbour.gaps(begin, time.perf_counter())
        begin = time.perf_counter()
        took: dict[str, tuple[int, float]] = {}
        for name, content in BODIES.items():
            path = "/v1/chat/completions" if "tools" in HOSTILE[name] else "/v1/completions"
            sent = time.perf_counter()
            response = httpx.post(f"{tiny_server.url}{path}", content=content, timeout=60)
            took[name] = response.status_code, time.perf_counter() - sent
            if name not in MAY_BE_SERVED:
                assert response.status_code == 400, (name, response.text[:300])
                assert response.json()["error"]["message"]
            else:
                assert response.status_code in (200, 400), (name, response.text[:300])
        beside = neighbour.gaps(begin, time.perf_counter())
    finally:
        neighbour.stop.set()
        neighbour.join(30)
    middle, typical = statistics.median(alone), statistics.median(beside)
    print({name: (status, round(seconds, 3)) for name, (status, seconds) in took.items()})
    print(
        f"ITL alone: median {middle * 1e3:.2f} ms, max {max(alone) * 1e3:.1f} ms; beside hostile "
        f"constraints: median {typical * 1e3:.2f} ms, max {max(beside) * 1e3:.1f} ms, {len(beside)} gaps"
    )
    assert max(seconds for _, seconds in took.values()) < 10, took
    assert typical < 2 * middle + 0.005
    assert max(beside) < max(1.0, 5 * max(alone))  # a machine that is busy otherwise stalls both
    tiny_server.await_idle()


def test_logprobs_under_a_grammar_are_finite_numbers(tiny_server: Server) -> None:
    """B24: what the grammar forbids has a probability of the model's, and -inf never reaches the JSON."""
    body = {
        "prompt": "a", "max_tokens": 30, "temperature": 1, "top_k": 1, "logprobs": 5,
        "response_format": {"type": "json_object"},
    }  # fmt: skip
    response = httpx.post(f"{tiny_server.url}/v1/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    found = json.loads(response.text, parse_constant=pytest.fail)["choices"][0]["logprobs"]
    assert all(value > -1e6 for value in found["token_logprobs"])
