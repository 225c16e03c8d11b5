"""Load at shares of a server's own capacity: what those get who are served, and what the others are told."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fourfold.bench.load.http import Server
from fourfold.bench.load.measure import Answer, Prepared
from fourfold.bench.load.report import LoadReport, Objective, report
from fourfold.bench.load.run import Arrivals, LoadRun, run_load
from fourfold.bench.stats import Distribution

REFUSALS = (429, 503)
"""Statuses of requests that were not taken, and that may be sent again later."""

Make = Callable[[int, int], list[Prepared]]
"""(how many, seed) → requests."""


@dataclass(frozen=True, slots=True)
class ShareReport:
    """What came of load at one share of capacity.

    accepted: requests that were not refused.  within: those of them that met the objective.
    refused: status → how many.  refusal: seconds until a refusal came.  late: accepted and not answered in
    time.
    """

    share: float
    load: LoadReport
    accepted: int
    within: int
    refused: dict[int, int]
    refusal: Distribution | None
    late: int

    def record(self) -> dict[str, object]:
        """For JSON."""
        return {
            "share_of_capacity": self.share,
            "accepted": self.accepted,
            "accepted_within_objective": self.within,
            "refused": {str(status): count for status, count in self.refused.items()},
            "refusal_seconds": self.refusal.record() if self.refusal else None,
            "late": self.late,
            **self.load.record(),
        }


async def capacity(
    server: Server, make: Make, concurrency: int, count: int, seed: int, timeout: float
) -> LoadReport:
    """Requests per second that the server answers when there are always `concurrency` of them."""
    run = await run_load(server, make(count, seed), Arrivals(concurrency), seed=seed, timeout=timeout)
    return report(run)


async def at_share(
    server: Server,
    make: Make,
    share: float,
    full_rate: float,
    seconds: float,
    objective: Objective,
    *,
    seed: int,
    timeout: float,
    percents: Sequence[float] = (50, 90, 99),
) -> ShareReport:
    """Poisson arrivals at `share` times `full_rate` requests per second, for `seconds`."""
    rate = share * full_rate
    requests = make(max(1, round(rate * seconds)), seed)
    run = await run_load(server, requests, Arrivals(None, rate), seed=seed, timeout=timeout)
    return share_report(share, run, objective, percents)


def share_report(
    share: float, run: LoadRun, objective: Objective, percents: Sequence[float] = (50, 90, 99)
) -> ShareReport:
    refused: Counter[int] = Counter()
    times: list[float] = []
    accepted: list[Answer] = []
    for answer in run.answers:
        status = _status(answer)
        if status in REFUSALS:
            refused[status] += 1
            times.append(answer.e2e)
        else:
            accepted.append(answer)
    return ShareReport(
        share,
        report(run, objective, percents),
        len(accepted),
        sum(objective.met_by(answer) for answer in accepted),
        dict(refused),
        Distribution.of(times, percents),
        sum(not answer.ok for answer in accepted),
    )


def _status(answer: Answer) -> int:
    """Of a failed answer; 0 if it has none."""
    match = re.match(r"HTTP (\d+)", answer.error or "")
    return int(match[1]) if match else 0
