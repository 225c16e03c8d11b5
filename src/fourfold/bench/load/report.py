"""From the answers of a run to the figures people compare servers by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fourfold.bench.load.measure import Answer
from fourfold.bench.load.run import Arrivals, LoadRun
from fourfold.bench.stats import Distribution
from fourfold.errors import ConfigError

METRICS = ("ttft", "tpot", "itl", "e2e")
GOODPUT_METRICS = ("ttft", "tpot", "e2e")


@dataclass(frozen=True, slots=True)
class Objective:
    """A service level objective: seconds at most per metric of GOODPUT_METRICS."""

    limits: Mapping[str, float]

    @staticmethod
    def parse(pairs: Sequence[str]) -> Objective | None:
        """["ttft:500", "tpot:50"], in milliseconds, as in vLLM. None if empty; raises ConfigError."""
        limits: dict[str, float] = {}
        for pair in pairs:
            name, _, text = pair.partition(":")
            try:
                milliseconds = float(text)
            except ValueError:
                milliseconds = -1.0
            if name not in GOODPUT_METRICS or not milliseconds > 0:
                known = ", ".join(GOODPUT_METRICS)
                raise ConfigError(
                    f"{pair!r} is not an objective: one of {known} and milliseconds, like ttft:500"
                )
            limits[name] = milliseconds / 1e3
        return Objective(limits) if limits else None

    def met_by(self, answer: Answer) -> bool:
        """A failed answer meets none; an answer of one token has no tpot to miss."""
        if not answer.ok:
            return False
        values = {"ttft": answer.ttft, "tpot": answer.tpot, "e2e": answer.e2e}
        return all((value := values[name]) is None or value <= limit for name, limit in self.limits.items())


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Rates are per second of the whole run; distributions are in seconds, over the answers without error.

    goodput: requests per second that met the objective; None if there was none.
    errors: message → how many requests failed with it.  cached_tokens: None if the server does not say.
    """

    arrivals: Arrivals
    seconds: float
    requests: int
    completed: int
    prompt_tokens: int
    cached_tokens: int | None
    output_tokens: int
    distributions: Mapping[str, Distribution | None]
    goodput: float | None
    errors: Mapping[str, int]

    @property
    def request_rate(self) -> float:
        return self.completed / self.seconds if self.seconds else 0.0

    @property
    def output_rate(self) -> float:
        return self.output_tokens / self.seconds if self.seconds else 0.0

    @property
    def total_rate(self) -> float:
        return (self.prompt_tokens + self.output_tokens) / self.seconds if self.seconds else 0.0

    def record(self) -> dict[str, object]:
        """For JSON."""
        return {
            "concurrency": self.arrivals.concurrency,
            "rate": self.arrivals.rate,
            "seconds": self.seconds,
            "requests": self.requests,
            "completed": self.completed,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "requests_per_second": self.request_rate,
            "output_tokens_per_second": self.output_rate,
            "total_tokens_per_second": self.total_rate,
            "goodput_requests_per_second": self.goodput,
            **{f"{name}_seconds": d.record() if d else None for name, d in self.distributions.items()},
            "errors": dict(self.errors),
        }


def report(
    run: LoadRun, objective: Objective | None = None, percents: Sequence[float] = (50, 90, 99)
) -> LoadReport:
    good = [answer for answer in run.answers if answer.ok]
    errors: dict[str, int] = {}
    for answer in run.answers:
        if answer.error is not None:
            errors[answer.error] = errors.get(answer.error, 0) + 1
    cached = [answer.cached_tokens for answer in good if answer.cached_tokens is not None]
    samples: dict[str, list[float]] = {
        "ttft": [answer.ttft for answer in good],
        "tpot": [tpot for answer in good if (tpot := answer.tpot) is not None],
        "itl": [gap for answer in good for gap in answer.gaps],
        "e2e": [answer.e2e for answer in good],
    }
    met = sum(objective.met_by(answer) for answer in run.answers) if objective else 0
    return LoadReport(
        arrivals=run.arrivals,
        seconds=run.seconds,
        requests=len(run.answers),
        completed=len(good),
        prompt_tokens=sum(answer.prompt_tokens or 0 for answer in good),
        cached_tokens=sum(cached) if cached else None,
        output_tokens=sum(answer.output_tokens for answer in good),
        distributions={name: Distribution.of(sample, percents) for name, sample in samples.items()},
        goodput=met / run.seconds if objective and run.seconds else (0.0 if objective else None),
        errors=errors,
    )
