"""`fourfold bench make-model`: a model of random weights, to measure a shape."""

from __future__ import annotations

from pathlib import Path

import click

from fourfold.bench.random_model import MIXES, Shape, write_random_model
from fourfold.cli import options
from fourfold.cli.base import Command
from fourfold.errors import ConfigError


@click.command(cls=Command)
@click.argument("output", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--format", "mix", type=click.Choice(MIXES, case_sensitive=False), default="Q4_0", show_default=True
)
@click.option(
    "--tokenizer",
    default=options.DEFAULTS.model,
    show_default=True,
    help="GGUF model whose tokenizer it gets.",
)
@click.option("--hidden", type=options.COUNT, default=2048, show_default=True)
@click.option("--layers", type=options.COUNT, default=22, show_default=True)
@click.option("--heads", type=options.COUNT, default=32, show_default=True)
@click.option("--kv-heads", type=options.COUNT, default=4, show_default=True)
@click.option("--feed-forward", type=options.COUNT, default=5632, show_default=True)
@click.option("--context", type=options.COUNT, default=4096, show_default=True)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
def make_model(
    output: Path,
    mix: str,
    tokenizer: str,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    feed_forward: int,
    context: int,
    seed: int,
) -> None:
    """Write a llama of random weights to the GGUF file OUTPUT, as large and fast as a real one of its shape.

    What it says means nothing. The default is a shape of 1.17 billion parameters with a head of its own.
    """
    from fourfold.hub import resolve
    from fourfold.progress import ReportedProgress

    shape = Shape(hidden, layers, heads, kv_heads, feed_forward, context)
    with ReportedProgress() as progress:
        words = resolve(tokenizer, progress=progress).path
        try:
            write_random_model(output, mix.upper(), shape, words, seed, progress)
        except OSError as error:
            raise ConfigError(f"{output}: cannot be written: {error.strerror or error}") from error
    click.echo(f"{output}: {output.stat().st_size / 1e6:,.1f} MB")
