"""`fourfold bench`: one command per thing that is measured."""

from __future__ import annotations

import click

from fourfold.cli.base import LazyGroup


@click.group(
    cls=LazyGroup,
    lazy={
        "limits": ("fourfold.cli.bench_limits:limits", "What this machine can do at most."),
        "kernels": ("fourfold.cli.bench_kernels:kernels", "Each kernel at a model's shapes."),
        "engine": ("fourfold.cli.bench_engine:engine", "Speed and memory of a model in this process."),
        "serve": ("fourfold.cli.bench_serve:serve", "Load on a server that speaks OpenAI's API."),
        "load": ("fourfold.cli.bench_load:load", "A server at and beyond its own capacity."),
        "itl": ("fourfold.cli.bench_load:itl", "What a long prompt does to answers that run."),
        "kv": ("fourfold.cli.bench_kv:kv", "What the prefix cache saves, counted without a model."),
        "kv-serve": ("fourfold.cli.bench_kv_serve:kv_serve", "What a server's prefix cache saves."),
        "compare": ("fourfold.cli.bench_compare:compare", "This engine beside others, in one run."),
        "accuracy": (
            "fourfold.cli.bench_accuracy:accuracy",
            "Perplexity, and distance from exact computation.",
        ),
        "make-model": ("fourfold.cli.bench_make_model:make_model", "Write a model of random weights."),
    },
)
def bench() -> None:
    """Measure this machine, a model, or a server."""
