"""Goodput, rates and distributions from answers whose times are known."""

from __future__ import annotations

import pytest

from fourfold.bench.load.measure import Answer
from fourfold.bench.load.report import Objective, report
from fourfold.bench.load.run import Arrivals, LoadRun
from fourfold.errors import ConfigError


def answer(ttft: float, gap: float, tokens: int, sent: float = 0.0, error: str | None = None) -> Answer:
    arrivals = tuple(sent + ttft + gap * i for i in range(tokens))
    return Answer(sent, arrivals, arrivals[-1] + 0.01, tokens, 10, 4, "length", "", error)


RUN = LoadRun(
    Arrivals(4),
    (
        answer(0.1, 0.02, 11),
        answer(0.6, 0.02, 11),
        answer(0.1, 0.08, 11),
        answer(0.5, 0.0, 1),
        answer(0.1, 0.01, 11, error="HTTP 500: x"),
    ),
    4.0,
)


@pytest.mark.parametrize(
    "pairs,met",
    [
        (["ttft:500"], 3),
        (["tpot:50"], 3),
        (["ttft:500", "tpot:50"], 2),
        (["e2e:300.5"], 0),
        (["e2e:310.5"], 1),
        (["ttft:1000", "tpot:1000", "e2e:5000"], 4),
    ],
)
def test_goodput(pairs: list[str], met: int) -> None:
    assert report(RUN, Objective.parse(pairs)).goodput == met / 4.0


def test_no_objective() -> None:
    assert Objective.parse([]) is None
    assert report(RUN).goodput is None


@pytest.mark.parametrize(
    "pair", ["ttft", "ttft:", "ttft:x", "ttft:0", "ttft:-5", "ttft:nan", "itl:5", ":5", ""]
)
def test_bad_objectives(pair: str) -> None:
    with pytest.raises(ConfigError, match="like ttft:500"):
        Objective.parse([pair])


def test_rates_and_distributions() -> None:
    r = report(RUN, percents=(50, 100))
    assert (r.requests, r.completed, r.errors) == (5, 4, {"HTTP 500: x": 1})
    assert (r.output_tokens, r.prompt_tokens, r.cached_tokens) == (34, 40, 16)
    assert (r.output_rate, r.total_rate, r.request_rate) == (34 / 4, 74 / 4, 1.0)
    ttft, tpot, itl = (r.distributions[name] for name in ("ttft", "tpot", "itl"))
    assert ttft is not None
    assert tpot is not None
    assert itl is not None
    assert ttft.percentiles == pytest.approx({50: 0.3, 100: 0.6})
    assert (tpot.count, itl.count) == (3, 30)
    assert tpot.percentiles[100] == pytest.approx(0.08)
    record = r.record()
    assert record["output_tokens_per_second"] == 34 / 4
    assert record["concurrency"] == 4


def test_nothing_completed() -> None:
    r = report(LoadRun(Arrivals(1), (answer(1, 1, 2, error="x"),), 1.0), Objective.parse(["ttft:1"]))
    assert (r.output_rate, r.goodput, r.distributions["ttft"]) == (0.0, 0.0, None)
    assert report(LoadRun(Arrivals(1), (), 0.0)).output_rate == 0.0
