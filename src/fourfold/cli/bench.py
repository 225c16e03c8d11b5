"""`fourfold bench`: one command per thing that is measured."""

from __future__ import annotations

import json
from typing import Any

import click

from fourfold.cli import options
from fourfold.cli.base import Command, LazyGroup


@click.group(
    cls=LazyGroup,
    lazy={"engine": ("fourfold.cli.bench:engine", "Prefill and decode speed of a model in this process.")},
)
def bench() -> None:
    """Measure this machine with a model."""


@click.command(cls=Command)
@options.model_argument
@click.option(
    "--repeats",
    "-r",
    type=click.IntRange(1, 1000),
    default=5,
    show_default=True,
    help="Runs of each figure, after one to warm up.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON: the medians and every run, in tokens/s.")
@options.engine_options
def engine(model: str | None, model_flag: str | None, repeats: int, as_json: bool, **flags: Any) -> None:
    """Prefill of 512 and 2048 tokens, and decode after 32, in tokens/s (medians)."""
    name = options.chosen_model(model, model_flag)
    config = options.engine_config(name, {**flags, "prefix_caching": False})

    from fourfold.bench.engine import measure
    from fourfold.cli.session import load

    with load(config) as llm:
        speeds = measure(llm, repeats)
        about = llm.model.description
    if as_json:
        record = {
            "model": name,
            "threads": config.threads,
            "engine": about,
            "tokens_per_second": [
                {"name": s.name, "prompt_tokens": s.size, "median": s.median, "runs": s.runs} for s in speeds
            ],
        }
        click.echo(json.dumps(record, indent=2))
        return
    click.echo(f"{name}: median of {repeats} runs, tok/s")
    for speed in speeds:
        click.echo(
            f"{speed.name:<8} {speed.size:>5} tokens  {speed.median:>9.1f}  "
            f"({min(speed.runs):.1f}..{max(speed.runs):.1f})"
        )
