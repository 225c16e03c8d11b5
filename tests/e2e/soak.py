"""Thousands of requests, many of which are left by their clients: nothing may stay behind.

    python -m tests.e2e.soak [--requests 1000] [--model MODEL] [--words N] [--tokens N] [--pool SIZE]
                              [--kill [--kills N]] [-- FLAGS OF fourfold serve]

Afterwards no KV block is live, the memory of both processes is what it was after the first fifth, and the
front has answered all the time. Some allow little time. --kill: the engine's process is
killed with SIGKILL in between, twice or as often as said.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from .running import Server, rss_bytes, running

CLIENTS = 32
POOL = "64M"
"""Small, so that every page of it has been touched after the first fifth, and sequences are preempted."""
GROWTH = 8e6
"""Bytes that a process may grow after the first fifth: what allocators keep."""
SLOWEST_HEALTH = 5.0
"""Seconds within which /health must answer; both processes and all clients may share one core."""


@dataclass
class Report:
    """outcomes: how requests ended.  rss: of front and engine after each tenth, in bytes."""

    outcomes: Counter[str] = field(default_factory=Counter)
    rss: list[tuple[int, int]] = field(default_factory=list)
    healthy: int = 0
    unhealthy: int = 0
    slowest_health: float = 0.0
    kills: int = 0
    seconds: float = 0.0
    ledger: dict[str, Any] = field(default_factory=dict)
    preemptions: int = 0

    def problems(self) -> list[str]:
        found = []
        if self.ledger.get("live") != 0 or not self.ledger.get("balanced"):
            found.append(f"blocks were left: {self.ledger}")
        if self.slowest_health > SLOWEST_HEALTH:
            found.append(f"/health took {self.slowest_health:.1f} s")
        if self.unhealthy and not self.kills:
            found.append(f"/health failed {self.unhealthy} times")
        failed = any(outcome.startswith("error") for outcome in self.outcomes)
        if self.outcomes["lost"] or (failed and not self.kills):
            found.append(f"requests failed: {dict(self.outcomes)}")
        early, late = self.rss[len(self.rss) // 5], self.rss[-1]
        growth = [new - old for old, new in zip(early, late, strict=True)]
        # A restarted engine begins with less memory, so only the front can be compared then.
        if growth[0] > GROWTH or (growth[1] > GROWTH and not self.kills):
            found.append(
                f"memory grew by {growth[0] / 1e6:.1f} MB (front), {growth[1] / 1e6:.1f} MB (engine)"
            )
        return found

    def __str__(self) -> str:
        memory = " ".join(f"{front / 1e6:.0f}+{engine / 1e6:.0f}" for front, engine in self.rss)
        return (
            f"{sum(self.outcomes.values())} requests in {self.seconds:.0f} s: {dict(self.outcomes)}\n"
            f"{self.preemptions} preemptions, {self.kills} kills; /health: {self.healthy} times 200, "
            f"{self.unhealthy} times 503, slowest {self.slowest_health * 1e3:.0f} ms\n"
            f"ledger: {self.ledger}\n"
            f"RSS of front+engine after each tenth, MB: {memory}"
        )


@dataclass(frozen=True)
class Sizes:
    """words, tokens: most of a prompt, and of an answer."""

    words: int = 60
    tokens: int = 40


def _body(rng: random.Random, sizes: Sizes) -> tuple[str, dict[str, Any]]:
    words = " ".join(
        rng.choice(("sea", "stone", "light", "and", "of", "ten"))
        for _ in range(rng.randrange(1, sizes.words + 1))
    )
    body: dict[str, Any] = {
        "max_tokens": rng.randrange(1, sizes.tokens + 1),
        "temperature": rng.choice((0, 1)),
        "n": rng.choice((1, 1, 1, 2)),
        "stream": rng.random() < 0.6,
    }
    if rng.random() < 0.1:
        body[rng.choice(("timeout", "ttft_timeout"))] = rng.choice((0.001, 0.05, 0.5, 30))
    if rng.random() < 0.5:
        return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": words}]}
    if rng.random() < 0.3:
        body["logprobs"] = 2
    return "/v1/completions", {**body, "prompt": words}


def _kind(failure: str, body: dict[str, Any]) -> str:
    """How a request ended: `failure` is the error object it got, or "". Only who allows little time may be
    told that it was not enough."""
    timed = "timeout" in body or "ttft_timeout" in body
    late = any(f'"code":"{code}"' in failure for code in ("timeout", "deadline_unreachable"))
    return "finished" if not failure else "late" if timed and late else f"error: {failure}"


async def _one(client: httpx.AsyncClient, rng: random.Random, sizes: Sizes) -> str:
    """One request: finished, left (by us), late (refused or ended for its timeout), "error: ..." (an answer
    that says so) or lost (no end at all)."""
    path, body = _body(rng, sizes)
    leaves = rng.random() < 0.4
    try:
        if not body["stream"]:
            timeout = httpx.Timeout(rng.uniform(0.001, 0.5)) if leaves else httpx.USE_CLIENT_DEFAULT
            answer = await client.post(path, json=body, timeout=timeout)
            return _kind("" if answer.status_code == 200 else answer.text, body)
        until = rng.randrange(0, 12) if leaves else None
        async with client.stream("POST", path, json=body) as stream:
            if stream.status_code != 200:
                return _kind((await stream.aread()).decode(), body)
            number, failure, last = 0, "", ""
            async for line in stream.aiter_lines():
                if until is not None and number >= until:
                    return "left"
                if line:
                    number += 1
                    failure = failure or (line if line.startswith('data: {"error"') else "")
                    last = line
        if last != "data: [DONE]":
            return "lost"
        return _kind(failure, body)
    except httpx.TimeoutException:
        return "left" if leaves else "lost"
    except httpx.HTTPError:
        return "lost"


async def _watch_health(server: Server, report: Report) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        while True:
            started = time.monotonic()
            answer = await client.get("/health")
            report.slowest_health = max(report.slowest_health, time.monotonic() - started)
            if answer.status_code == 200:
                report.healthy += 1
            else:
                report.unhealthy += 1
            await asyncio.sleep(0.05)


async def soak(
    server: Server, requests: int, kills: int = 0, seed: int = 0, sizes: Sizes = Sizes()
) -> Report:
    """Raises httpx.HTTPError when the front does not answer /health."""
    report = Report()
    started = time.monotonic()
    deaths = {requests * (number + 1) // (kills + 1) for number in range(kills)}
    numbers = iter(range(requests))

    async def work(client: httpx.AsyncClient) -> None:
        for number in numbers:
            if number in deaths and await _kill(server):
                report.kills += 1
            report.outcomes[await _one(client, random.Random(seed * requests + number), sizes)] += 1
            if sum(report.outcomes.values()) % max(1, requests // 10) == 0:
                report.rss.append((rss_bytes(server.process.pid), _engine_rss(server)))

    limits = httpx.Limits(max_connections=CLIENTS, max_keepalive_connections=CLIENTS // 2)
    async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
        watch = asyncio.create_task(_watch_health(server, report))
        await asyncio.gather(*(work(client) for _ in range(CLIENTS)))
        if watch.done():
            watch.result()
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
    report.seconds = time.monotonic() - started
    await asyncio.to_thread(server.await_idle)
    report.ledger = {name: server.kv()[name] for name in ("free", "cached", "live", "total", "balanced")}
    report.preemptions = server.kv()["preemptions"]
    report.rss.append((rss_bytes(server.process.pid), _engine_rss(server)))
    return report


async def _kill(server: Server) -> bool:
    """Whether there was an engine to kill: it may be between two lives."""
    for _ in range(100):
        try:
            os.kill(server.engine_pid, signal.SIGKILL)
        except (OSError, ValueError):
            await asyncio.sleep(0.1)
        else:
            return True
    return False


def _engine_rss(server: Server) -> int:
    """0 while it is being restarted."""
    try:
        return rss_bytes(server.engine_pid)
    except (OSError, ValueError):
        return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--model", default="smollm2", help="alias or path; it must be on this machine")
    parser.add_argument("--words", type=int, default=Sizes.words, help="most of a prompt")
    parser.add_argument("--tokens", type=int, default=Sizes.tokens, help="most of an answer")
    parser.add_argument("--pool", default=POOL, help="size of the KV pool")
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("flags", nargs="*", help="more flags of `fourfold serve`, after --")
    given = parser.parse_args(arguments)
    path = Path(given.model)
    model: Path | str = path.resolve() if path.exists() else given.model
    sized = ("--kv-cache-memory", given.pool, "--max-model-len", "512")
    with running(model, *sized, *given.flags) as server:
        kills = given.kills if given.kill else 0
        sizes = Sizes(given.words, given.tokens)
        report = asyncio.run(soak(server, given.requests, kills, sizes=sizes))
    print(report)
    for problem in report.problems():
        print(f"problem: {problem}", file=sys.stderr)
    return 1 if report.problems() else 0


if __name__ == "__main__":
    sys.exit(main())
