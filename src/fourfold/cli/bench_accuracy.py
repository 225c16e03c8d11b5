"""`fourfold bench accuracy`: what quantized activations cost, in perplexity and in KL divergence."""

from __future__ import annotations

import dataclasses
import json
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fourfold.cli import options
from fourfold.cli.base import Command
from fourfold.errors import InvalidRequestError

if TYPE_CHECKING:
    from fourfold.bench.accuracy import Comparison, Likelihood, Window
    from fourfold.text.tokenizer import Tokenizer
    from fourfold.types import ModelInfo

CONTEXT = 2048


@click.command(cls=Command)
@options.model_argument
@click.option(
    "--text",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A UTF-8 text, computed in windows of --ctx-size tokens.",
)
@click.option(
    "--tokens", type=options.COUNT, default=20_000, show_default=True, help="How much of the text, at most."
)
@click.option(
    "--stride",
    type=options.COUNT,
    help="Tokens from the beginning of one window to that of the next. [default: no overlap]",
)
@click.option(
    "--against",
    default="exact",
    show_default=True,
    metavar="exact|none|FILE",
    help="exact: compare with float32 activations and KV cache. none: perplexity only. "
    "FILE: compare with what llama-perplexity --kl-divergence-base wrote, on the tokens in it.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON; divergences are in nats.")
@options.engine_options
def accuracy(
    model: str | None,
    model_flag: str | None,
    text: Path | None,
    tokens: int,
    stride: int | None,
    against: str,
    as_json: bool,
    **flags: Any,
) -> None:
    """Perplexity of a text, and KL divergence from exact computation.

    Computes as --dtype and --kv-cache-dtype say, in windows of --ctx-size tokens (2048 unless given).
    """
    name = options.chosen_model(model, model_flag)
    config = options.engine_config(name, flags)

    from fourfold.bench.accuracy import Reference, compare, opened, perplexity
    from fourfold.bench.llama_logits import LlamaLogits
    from fourfold.hub import resolve
    from fourfold.progress import ReportedProgress
    from fourfold.text.tokenizer import load_tokenizer
    from fourfold.weights.open import open_checkpoint

    file = None if against in ("exact", "none") else LlamaLogits(Path(against))
    if (file is None) == (text is None):
        raise click.UsageError("give --text FILE, or --against FILE, which brings its own tokens; not both")
    context = config.max_model_len or CONTEXT if file is None else file.context

    with ReportedProgress() as progress, ExitStack() as stack:
        path = resolve(name, progress=progress).path
        config = dataclasses.replace(config, model=str(path))
        tokenizer = load_tokenizer(open_checkpoint(path))
        windows = [] if text is None else _windows(text, tokens, context, stride, tokenizer)
        tested, info = stack.enter_context(opened(config, context, progress))
        reference: Reference | None = file
        if file is not None:
            windows = file.windows(info.vocab_size, tokenizer.bos_id if tokenizer.add_bos else None)
        elif against == "exact":
            exact = dataclasses.replace(config, activation_dtype="float32", kv_cache_dtype="float32")
            reference, _ = stack.enter_context(opened(exact, context, progress))
        if reference is None:
            likelihood, comparison = perplexity(tested, windows, progress), None
        else:
            comparison = compare(tested, reference, windows, progress)
            likelihood = comparison.tested
    record = _record(name, info, windows, likelihood, against, comparison)
    click.echo(json.dumps(record, indent=2) if as_json else _text(record))


def _windows(text: Path, tokens: int, context: int, stride: int | None, tokenizer: Tokenizer) -> list[Window]:
    """Raises click.UsageError for a text or stride that gives none."""
    from fourfold.bench.accuracy import cut

    try:
        ids = tokenizer.encode(text.read_text("utf-8"), add_special_tokens=False, parse_special=False)[
            :tokens
        ]
        prefix = tokenizer.spec.prefix_ids
        return cut(ids, prefix, context, stride or context - len(prefix))
    except (ValueError, InvalidRequestError) as error:
        raise click.UsageError(f"{text}: {error}") from error


def _record(
    name: str,
    info: ModelInfo,
    windows: list[Window],
    tested: Likelihood,
    against: str,
    comparison: Comparison | None,
) -> dict[str, Any]:
    record: dict[str, Any] = {
        "model": name,
        "engine": info.description,
        "windows": len(windows),
        "context": max(len(window.tokens) for window in windows),
        "scored_tokens": len(tested.losses),
        "perplexity": tested.perplexity,
        "perplexity_error": tested.error,
    }
    if comparison is not None:
        kl = comparison.divergence
        record["reference"] = {
            "against": against,
            "perplexity": comparison.reference.perplexity,
            "kl_mean": kl.mean,
            "kl_mean_error": kl.error,
            "kl_p99": kl.quantile(0.99),
            "kl_max": kl.quantile(1.0),
            "same_top": kl.agreement,
        }
    return record


def _text(record: dict[str, Any]) -> str:
    engine = record["engine"]
    lines = [
        f"{record['model']}: {engine['activation dtype']} activations, {engine['KV cache dtype']} KV cache; "
        f"{record['scored_tokens']} tokens scored in {record['windows']} windows of {record['context']}",
        f"perplexity      {record['perplexity']:.4f} ± {record['perplexity_error']:.4f}",
    ]
    if (reference := record.get("reference")) is not None:
        change = record["perplexity"] / reference["perplexity"] - 1
        lines += [
            f"of {reference['against']}: {reference['perplexity']:.4f}, ours {change:+.3%}",
            f"KL divergence   {reference['kl_mean']:.3e} ± {reference['kl_mean_error']:.1e} nats "
            f"(99 %: {reference['kl_p99']:.3e}, largest {reference['kl_max']:.3e})",
            f"same top token  {reference['same_top']:.2%}",
        ]
    return "\n".join(lines)
