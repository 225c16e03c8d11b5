"""Flags of speculation, as vLLM, llama.cpp and SGLang name them, made into a SpeculationConfig."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from fourfold.cli.base import nearest
from fourfold.config import SpeculationConfig

F = TypeVar("F", bound=Callable[..., Any])

DEFAULTS = SpeculationConfig()

_WITHOUT_EFFECT = frozenset({"draft_tensor_parallel_size", "max_model_len", "quantization", "revision"})
"""Of vLLM's settings: what a draft model here does not need."""


def speculation_options(command: F) -> F:
    for option in reversed((
        click.option("--speculative-config", "speculative_config", metavar="JSON", help=(
            "Guess tokens and keep those that come true; answers stay the same. As vLLM's, like "
            '\'{"method": "ngram", "num_speculative_tokens": 5}\' or '
            '\'{"method": "draft_model", "model": "..."}\'. '
            "[default: only for predictions and repeated constraints]")),
        click.option("--speculative-model", "--model-draft", "--speculative-draft-model-path", "-md",
                     "speculative_model", metavar="MODEL", help=(
            "Smaller model of the same vocabulary that guesses.")),
        click.option("--num-speculative-tokens", "--draft-max", "--speculative-num-draft-tokens",
                     "num_speculative_tokens", type=click.IntRange(1, 64), help=(
            "Most guesses per step and answer; they come from the text before unless another flag says "
            "otherwise. "
            f"[default: {DEFAULTS.num_speculative_tokens}]")),
    )):  # fmt: skip
        command = option(command)
    return command


def speculation_config(flags: Mapping[str, Any]) -> SpeculationConfig | None:
    """None if no flag of speculation was given. Raises ConfigError or click.UsageError."""
    text, model, most = (
        flags.get(name) for name in ("speculative_config", "speculative_model", "num_speculative_tokens")
    )
    if text is None and model is None and most is None:
        return None
    given = {} if text is None else _parsed(text)
    if model is not None:
        given["model"] = model
    if most is not None:
        given["num_speculative_tokens"] = most
    if given.get("model") is not None:
        given.setdefault("method", "draft_model")
    return SpeculationConfig(**given)


def _parsed(text: str) -> dict[str, Any]:
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise click.UsageError(f"--speculative-config is not JSON: {error or 'nested too deeply'}") from error
    if not isinstance(given, dict):
        raise click.UsageError(f"--speculative-config must be an object, got {text[:60]}")
    known = [field.name for field in dataclasses.fields(SpeculationConfig)]
    for name in given:
        if name not in known and name not in _WITHOUT_EFFECT:
            raise click.UsageError(
                f"--speculative-config has no {name!r}; did you mean {nearest(name, known)!r}?"
            )
    return {name: value for name, value in given.items() if name in known}
