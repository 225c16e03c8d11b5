"""Load at shares of capacity, and answers beside a long prompt, against a made-up server."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any

import pytest
from click.testing import CliRunner

from fourfold.bench.load.interference import Interference, interference
from fourfold.bench.load.measure import Answer, Prepared
from fourfold.bench.load.overload import share_report
from fourfold.bench.load.report import Objective
from fourfold.bench.load.run import Arrivals, LoadRun
from fourfold.bench.stats import Distribution
from fourfold.cli.bench_load import load
from fourfold.errors import FourfoldError

from .fake_server import completion, serving


def answer(ttft: float, error: str | None = None, ended: float = 1.0) -> Answer:
    arrivals = () if error else (ttft, ttft + 0.1)
    return Answer(0.0, arrivals, ended, 2, error=error)


def test_refused_late_and_good_are_told_apart() -> None:
    answers = (
        answer(0.1), answer(0.2), answer(3.0),
        answer(0, "HTTP 503: no", 0.02), answer(0, "HTTP 429: full", 0.01), answer(0, "HTTP 504: late"),
    )  # fmt: skip
    objective = Objective.parse(["ttft:500"])
    assert objective is not None
    found = share_report(1.2, LoadRun(Arrivals(None, 2.0), answers, 3.0), objective)
    assert (found.accepted, found.within, found.late) == (4, 2, 1)
    assert found.refused == {503: 1, 429: 1}
    assert found.refusal is not None
    assert found.refusal.max == 0.02
    assert json.loads(json.dumps(found.record()))["refused"] == {"503": 1, "429": 1}


def _slower(path: str, body: dict[str, Any]) -> tuple[int, Sequence[bytes | float]]:
    """Streams have a token every 10 ms; a long prompt's first token takes 100 ms."""
    chunks = completion(["a"] * body["max_tokens"])
    if body["max_tokens"] == 1:
        return 200, [0.1, *chunks]
    return 200, [part for chunk in chunks for part in (0.01, chunk)]


def _run(tokens: int) -> Any:
    async def main() -> Any:
        async with serving(_slower) as (server, _):
            streams = [Prepared("/v1/completions", {"max_tokens": tokens}) for _ in range(2)]
            return await interference(server, streams, Prepared("/v1/completions", {"max_tokens": 1}), 0.2)

    return asyncio.run(main())


def test_spans_before_beside_and_after_a_long_prompt() -> None:
    found = _run(200)
    assert found.prompt_seconds >= 0.1
    for quiet in (found.before, found.after):
        assert quiet.percentiles[50] >= 0.009
        assert quiet.count > found.beside.count
    assert found.beside.count >= 4
    assert set(found.record()["ratios"]) == {"p50", "p90", "p99"}


def test_the_ratio_is_to_the_mean_of_before_and_after() -> None:
    """Answers that grow are slower after the prompt than before."""
    before, beside, after = (Distribution.of([seconds] * 3, (50, 90, 99)) for seconds in (0.01, 0.03, 0.02))
    assert before is not None
    assert beside is not None
    assert after is not None
    found = Interference(before, beside, after, 1.0)
    assert found.ratio(50) == pytest.approx(2.0)
    assert found.max_ratio == pytest.approx(2.0)


def test_answers_that_end_too_soon_are_an_error() -> None:
    with pytest.raises(FourfoldError, match="let answers be longer"):
        _run(30)


def test_the_streams_are_left_when_the_prompt_is_answered() -> None:
    started = time.monotonic()
    found = _run(2000)  # 20 s of tokens
    assert time.monotonic() - started < 10
    assert found.beside.count >= 4


def test_answers_that_are_too_short_to_be_measured() -> None:
    with pytest.raises(FourfoldError, match="let answers be longer"):
        _run(5)


def test_bad_shares_are_refused() -> None:
    for text in ("", "fast", "0", "-5,10"):
        assert CliRunner().invoke(load, ["--rate-of-capacity", text]).exit_code == 2
