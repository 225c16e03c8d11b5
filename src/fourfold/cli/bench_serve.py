"""`fourfold bench serve`: load on any server that speaks OpenAI's API."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fourfold.cli import options
from fourfold.cli.base import Command
from fourfold.cli.bench_output import json_option, print_table, show, write
from fourfold.errors import ConfigError

if TYPE_CHECKING:
    from fourfold.bench.load.dataset import Item
    from fourfold.bench.load.report import LoadReport
    from fourfold.bench.load.run import Arrivals
    from fourfold.bench.stats import Distribution


def _numbers(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[float, ...]:
    try:
        numbers = tuple(float(each) for each in value.split(",")) if value else ()
    except ValueError:
        numbers = (-1.0,)
    if any(not 0 < each < 1e6 for each in numbers):
        raise click.BadParameter(f"{value!r} is not a list of positive numbers, like 1,2,4,8")
    return numbers


@click.command(cls=Command)
@click.option(
    "--base-url", "--url", "base_url", default="http://127.0.0.1:8000", show_default=True, help="The server."
)
@click.option("--model", "-m", help="Model to ask for. [default: the first the server names]")
@click.option("--api-key", help="Key sent along.")
@click.option("--allow-remote", is_flag=True, help="Load a server that is not on this machine.")
@click.option("--num-prompts", "-n", type=options.COUNT, default=64, show_default=True, help="Requests.")
@click.option(
    "--concurrency",
    "--max-concurrency",
    "concurrency",
    type=options.COUNT,
    help="Requests in flight, at most. [default: 8, or no limit with --rate]",
)
@click.option(
    "--rate",
    "--request-rate",
    "rate",
    type=click.FloatRange(0, min_open=True),
    help="Requests per second, at the times of a Poisson process.",
)
@click.option(
    "--burstiness",
    type=click.FloatRange(0, min_open=True),
    default=1.0,
    show_default=True,
    help="Of the gaps' gamma distribution; below 1 requests come in bursts.",
)
@click.option(
    "--sweep",
    callback=_numbers,
    metavar="N,N,...",
    help="A run per number: of concurrency, or of --rate if that is given.",
)
@click.option(
    "--dataset",
    default="random",
    show_default=True,
    metavar="random|FILE",
    help="random token ids, or a file (JSON or JSON lines) of prompts, messages, lengths or ShareGPT talks.",
)
@click.option("--random-input-len", type=options.COUNT, default=128, show_default=True, help="Tokens.")
@click.option("--random-output-len", type=options.COUNT, default=128, show_default=True, help="Tokens.")
@click.option(
    "--random-range-ratio",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.0,
    show_default=True,
    help="Lengths vary evenly by this share.",
)
@click.option(
    "--random-prefix-len",
    "--shared-prefix",
    "prefix_len",
    type=click.IntRange(0, 2**20),
    default=0,
    show_default=True,
    help="Tokens that all prompts begin with.",
)
@click.option(
    "--random-ids",
    type=(click.IntRange(0), click.IntRange(1)),
    default=(1000, 30000),
    show_default=True,
    metavar="LOW HIGH",
    help="Token ids are drawn from LOW to HIGH - 1.",
)
@click.option(
    "--endpoint", type=click.Choice(["auto", "completions", "chat"]), default="auto", show_default=True
)
@click.option(
    "--schema",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="JSON schema that answers must follow (response_format).",
)
@click.option("--temperature", type=click.FloatRange(0, 100), default=0.0, show_default=True)
@click.option("--ignore-eos/--no-ignore-eos", default=True, show_default=True, help="Answers of full length.")
@click.option("--extra-body", metavar="JSON", help="More fields of every request.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of prompts and times.")
@click.option(
    "--warmups", type=click.IntRange(0, 1000), default=1, show_default=True, help="Requests before."
)
@click.option(
    "--timeout", type=click.FloatRange(0, min_open=True), default=600.0, show_default=True, help="Seconds."
)
@click.option(
    "--goodput",
    multiple=True,
    metavar="METRIC:MS",
    help="Count requests that meet it: ttft, tpot or e2e and milliseconds; may be given several times.",
)
@click.option("--percentiles", callback=_numbers, default="50,90,99", show_default=True)
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Write a sweep as SVG.")
@json_option
def serve(base_url: str, api_key: str | None, allow_remote: bool, json_to: str | None, **flags: Any) -> int:
    """Measure a server: throughput, time to first token (ttft), time per output token after it (tpot), time
    between tokens (itl), and the whole time of an answer (e2e).

    Works with any server of OpenAI's API that streams: fourfold, llama-server, vLLM and others. Prompts of
    random token ids need a completions endpoint that takes them. Fails if a request failed.
    """
    from fourfold.bench.load.http import Server
    from fourfold.bench.load.models import served_models

    server = Server.parse(base_url, api_key)
    if not allow_remote:
        server.require_loopback()
    if flags["plot"] and not flags["sweep"]:
        raise click.UsageError("--plot needs --sweep: one run is one point")
    model = flags["model"] or asyncio.run(served_models(server))[0]
    reports = asyncio.run(_runs(server, model, flags))
    record = {
        "base_url": base_url,
        "model": model,
        "dataset": flags["dataset"],
        "random_input_len": flags["random_input_len"],
        "random_output_len": flags["random_output_len"],
        "shared_prefix": flags["prefix_len"],
        "goodput": list(flags["goodput"]),
        "seed": flags["seed"],
        "runs": [report.record() for report in reports],
    }
    show(record, json_to, lambda: _print(model, reports, flags["percentiles"]))
    if flags["plot"]:
        write(flags["plot"], _plot(model, reports, flags["percentiles"]))
    failed = sum(report.requests - report.completed for report in reports)
    return 1 if failed else 0


def _arrivals(flags: dict[str, Any]) -> list[Arrivals]:
    from fourfold.bench.load.run import Arrivals

    rate, concurrency, burstiness = flags["rate"], flags["concurrency"], flags["burstiness"]
    if rate is not None:
        return [Arrivals(concurrency, each, burstiness) for each in flags["sweep"] or (rate,)]
    return [Arrivals(int(each)) for each in flags["sweep"] or (concurrency or 8,)]


async def _runs(server: Any, model: str, flags: dict[str, Any]) -> list[LoadReport]:
    from fourfold.bench.load.dataset import RequestShape
    from fourfold.bench.load.report import Objective, report
    from fourfold.bench.load.run import Arrivals, run_load

    shape = RequestShape(
        model,
        flags["endpoint"],
        flags["temperature"],
        flags["ignore_eos"],
        flags["seed"] if flags["temperature"] else None,
        _json("--schema", flags["schema"].read_text("utf-8")) if flags["schema"] else None,
        _json("--extra-body", flags["extra_body"]) if flags["extra_body"] else None,
    )
    objective = Objective.parse(flags["goodput"])
    seed, timeout, percents = flags["seed"], flags["timeout"], flags["percentiles"]
    if flags["warmups"]:
        warm = shape.prepare(_items(flags, flags["warmups"], seed + 1))
        await run_load(server, warm, Arrivals(1), timeout=timeout)
    reports = []
    for number, arrivals in enumerate(_arrivals(flags)):
        # New prompts for every run: the server may remember the old ones.
        requests = shape.prepare(_items(flags, flags["num_prompts"], seed + 2 + number))
        run = await run_load(server, requests, arrivals, seed=seed + number, timeout=timeout)
        reports.append(report(run, objective, percents))
    return reports


def _items(flags: dict[str, Any], count: int, seed: int) -> list[Item]:
    from fourfold.bench.load.dataset import RandomItems, file_items, schema_items

    low, high = flags["random_ids"]
    if low >= high:
        raise click.UsageError(f"--random-ids {low} {high}: the first must be smaller")
    ids = RandomItems(
        flags["random_input_len"],
        flags["random_output_len"],
        flags["random_range_ratio"],
        flags["prefix_len"],
        low,
        high,
    )
    if flags["dataset"] != "random":
        return file_items(Path(flags["dataset"]), count, seed, ids)
    if flags["schema"] or flags["endpoint"] == "chat":
        return schema_items(count, flags["random_output_len"])
    return ids.items(count, seed)


def _json(what: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{what}: is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{what}: must be a JSON object")
    return value


def _print(model: str, reports: list[LoadReport], percents: tuple[float, ...]) -> None:
    for each in reports:
        summary = f"{each.completed} of {each.requests} requests in {each.seconds:.2f} s"
        rows = [
            (name.upper(), *(_cells(d, percents) if d else [""] * (len(percents) + 2)))
            for name, d in each.distributions.items()
        ]
        print_table(
            f"{model}, {_load(each.arrivals)}: {summary}",
            ("milliseconds", "mean", *(f"p{p:g}" for p in percents), "max"),
            rows,
        )
        line = f"{each.output_rate:,.1f} output tok/s, {each.total_rate:,.1f} with prompts, "
        line += f"{each.request_rate:,.2f} requests/s"
        if each.goodput is not None:
            line += f", {each.goodput:,.2f} of them within the objective"
        if each.cached_tokens is not None:
            line += f"; {each.cached_tokens} of {each.prompt_tokens} prompt tokens from the cache"
        click.echo(line)
        for message, count in each.errors.items():
            click.echo(f"{count} failed: {message}")
        click.echo()


def _cells(d: Distribution, percents: tuple[float, ...]) -> list[str]:
    return [f"{value * 1e3:,.1f}" for value in (d.mean, *(d.percentiles[p] for p in percents), d.max)]


def _load(arrivals: Arrivals) -> str:
    parts = [f"{arrivals.rate:g} requests/s"] if arrivals.rate is not None else []
    if arrivals.concurrency is not None:
        parts.append(f"{arrivals.concurrency} at a time")
    return ", ".join(parts)


def _plot(model: str, reports: list[LoadReport], percents: tuple[float, ...]) -> str:
    from fourfold.bench.load.plot import Point, line_plot

    def line(metric: str, percent: float) -> list[Point]:
        points = []
        for each in reports:
            d = each.distributions[metric]
            if d is not None:
                value = each.arrivals.rate if each.arrivals.rate is not None else each.arrivals.concurrency
                y = d.percentiles[percent] * 1e3
                points.append(Point(each.output_rate, y, f"{value:g}"))
        return points

    ends = dict.fromkeys((min(percents), max(percents)))
    series = {f"{name.upper()} p{p:g}": line(name, p) for name in ("ttft", "tpot") for p in ends}
    return line_plot(f"{model}: latency against throughput", "output tokens/s", "milliseconds", series)
