"""Flags that commands share; each sets the field of the same name of EngineConfig or SamplingParams."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, get_args

import click

from fourfold.cli.speculation import speculation_config, speculation_options
from fourfold.cli.values import byte_size, spelled
from fourfold.config import DEFAULT_ITL_RATIO, EngineConfig, EvictionPolicy, Isa, OffloadCompression
from fourfold.types import SamplingParams

F = TypeVar("F", bound=Callable[..., Any])

COUNT = click.IntRange(1, 2**31 - 1)
DEFAULTS = EngineConfig()

FLOAT_DTYPES = {
    "auto": None,
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float32": "float32",
    "fp32": "float32",
}
KV_DTYPES = {**FLOAT_DTYPES, "int8": "int8", "fp8": "fp8", "fp8_e4m3": "fp8"}
ACTIVATION_DTYPES = {**FLOAT_DTYPES, "int8": "int8"}
ISAS = {"auto": None} | {name: name for name in get_args(Isa) if name != "auto"}


def engine_options(command: F) -> F:
    """Flags of EngineConfig. One that is not given is None and leaves the default."""
    return _apply(
        speculation_options(command),
        click.option("--max-model-len", "--ctx-size", "-c", "max_model_len", type=COUNT, help=(
            "Longest prompt and answer together, in tokens. [default: what the model and memory allow]")),
        click.option("--max-num-seqs", "--parallel", "-np", "max_num_seqs", type=COUNT, help=(
            f"Requests computed in one step. [default: {DEFAULTS.max_num_seqs}]")),
        click.option("--max-num-batched-tokens", "--batch-size", "max_num_batched_tokens", type=COUNT, help=(
            f"Token budget of one step. [default: {DEFAULTS.max_num_batched_tokens}]")),
        click.option("--max-itl-ratio", "max_itl_ratio", type=click.FloatRange(0), metavar="RATIO", help=(
            "How many times longer the time between two tokens of an answer may become while prompts are "
            "computed; 0: as --max-num-batched-tokens lets it. "
            f"[default: {DEFAULT_ITL_RATIO} of a server, else 0]")),
        click.option("--itl-target-ms", "itl_target_ms", type=click.FloatRange(0, min_open=True),
                     metavar="MS", help=(
            "Time between two tokens to keep, in milliseconds, instead of a ratio; fewer requests run at a "
            "time if they must. [default: none]")),
        click.option("--threads", "-t", "threads", type=click.IntRange(1, 4096), help=(
            "Compute threads. [default: the physical cores this process may use]")),
        spelled("--dtype", "--activation-dtype", "activation_dtype", meanings=ACTIVATION_DTYPES, help=(
            "What activations are held in when they meet integer weights; the weights stay as the file has "
            "them. float32 is exact, bfloat16 close to it, int8 fastest where no tile unit (AMX) is. "
            "[default: bfloat16 with AMX, else int8]")),
        spelled("--kv-cache-dtype", "kv_cache_dtype", meanings=KV_DTYPES, help=(
            "What keys and values are held in. int8 and fp8 (E4M3), scaled per token and head, take half the "
            f"memory of bfloat16. [default: {DEFAULTS.kv_cache_dtype}]")),
        click.option("--kv-cache-memory", "--kv-cache-memory-bytes", "kv_cache_bytes",
                     type=byte_size, metavar="BYTES", help=(
            "Size of the KV cache, like 512M or 4G. [default: a share of the free memory]")),
        click.option("--prefix-caching/--no-prefix-caching",
                     "--enable-prefix-caching/--no-enable-prefix-caching",
                     "prefix_caching", default=None, help=(
            "Reuse the KV of shared prompt beginnings. [default: on]")),
        spelled("--radix-eviction-policy", "radix_eviction_policy",
                meanings={name: name for name in get_args(EvictionPolicy)}, help=(
            "Which unused prefix is evicted first: the longest unused, the least often used, the oldest. "
            f"[default: {DEFAULTS.radix_eviction_policy}]")),
        click.option("--kv-host-cache-gib", "kv_host_cache_gib", type=click.FloatRange(0, 65536),
                     metavar="GIB", help=(
            "Host memory for KV blocks that the KV cache has no room for. [default: none]")),
        click.option("--kv-disk-cache-dir", "kv_disk_cache_dir", metavar="FOLDER", help=(
            "Folder for KV blocks that shall outlive the process: known prompts start fast after a restart. "
            "It holds what prompts were computed to; keep it private. [default: none]")),
        click.option("--kv-disk-cache-gib", "kv_disk_cache_gib", type=click.FloatRange(0, 1 << 20),
                     metavar="GIB", help=(
            f"Most that folder may take. [default: {DEFAULTS.kv_disk_cache_gib:g}]")),
        spelled("--kv-offload-compression", "kv_offload_compression",
                meanings={name: name for name in get_args(OffloadCompression)}, help=(
            "int8 halves what host memory and disk take; blocks that come back differ a little, so answers "
            f"may too. [default: {DEFAULTS.kv_offload_compression}]")),
        click.option("--kv-pinned-share", "kv_pinned_share", type=click.FloatRange(0, 1),
                     metavar="SHARE", help=(
            "Of the KV cache, for prefixes pinned by POST /v1/cache/pin; one API key may take half of that. "
            f"[default: {DEFAULTS.kv_pinned_share:g}]")),
        click.option("--kv-events-endpoint", "kv_events_endpoint", metavar="ENDPOINT", help=(
            "ZeroMQ endpoint to publish KV events on, like tcp://127.0.0.1:5557. They hold all prompts, "
            "and no key is asked for: keep it private. [default: none]")),
        click.option("--seed", "-s", "seed", type=click.IntRange(0, 2**64 - 1), help=(
            "Base of the seeds of requests without one. [default: from the operating system]")),
        click.option("--autotune/--no-autotune", "autotune", default=None, help=(
            "Divide matmuls among threads and caches as it is fastest here: measured once, in seconds, and "
            "kept with the artefact. Answers stay the same. [default: as measured if it was, else by rule]")),
        spelled("--isa", "isa", meanings=ISAS, help="Instruction set of the kernels. [default: the best]"),
    )  # fmt: skip


def sampling_options(command: F) -> F:
    """Flags of SamplingParams for commands that answer at once."""
    return _apply(
        command,
        click.option("--max-tokens", "--predict", "--n-predict", "-n", "max_tokens", type=click.IntRange(-1),
                     default=-1, help=(
            "Longest answer in tokens. [default: until the model ends it or its context is full]")),
        click.option("--temperature", "--temp", "temperature", type=click.FloatRange(0, 100), default=0.7,
                     show_default=True, help="0 always takes the most likely token."),
        click.option("--top-k", "top_k", type=click.IntRange(-1), default=0, help=(
            "Only the k most likely. 0: off.")),
        click.option("--top-p", "top_p", type=click.FloatRange(0, 1, min_open=True), default=1.0, help=(
            "Only the most likely that make up this probability. 1: off.")),
        click.option("--min-p", "min_p", type=click.FloatRange(0, 1), default=0.0, help=(
            "Only those at least this likely relative to the best. 0: off.")),
        click.option("--typical-p", "--typical", "typical_p", type=click.FloatRange(0, 1, min_open=True),
                     default=1.0, help="Locally typical sampling. 1: off."),
        click.option("--repetition-penalty", "--repeat-penalty", "repetition_penalty",
                     type=click.FloatRange(0, 100, min_open=True), default=1.0, help=(
            "Above 1: tokens seen before become less likely. 1: off.")),
        click.option("--presence-penalty", "presence_penalty", type=click.FloatRange(-2, 2), default=0.0,
                     help=(
            "Subtracted once from tokens of the answer.")),
        click.option("--frequency-penalty", "frequency_penalty", type=click.FloatRange(-2, 2), default=0.0,
                     help=(
            "Subtracted from tokens of the answer, as often as they came.")),
        click.option("--stop", "stop", multiple=True, help=(
            "Text that ends the answer; may be given several times.")),
        click.option("--ignore-eos", "ignore_eos", is_flag=True, help="Go on after the model wants to stop."),
    )  # fmt: skip


def model_argument(command: F) -> F:
    """MODEL, or --model/-m as people type it elsewhere; `chosen_model` makes one of the two."""
    return _apply(
        command,
        click.argument("model", required=False),
        click.option(
            "--model", "-m", "model_flag", metavar="MODEL", help=f"The model. [default: {DEFAULTS.model}]"
        ),
    )


def chosen_model(model: str | None, model_flag: str | None) -> str:
    """Raises click.UsageError if both are given and differ."""
    if model and model_flag and model != model_flag:
        raise click.UsageError(f"two models, {model!r} and --model {model_flag!r}; name one")
    return model or model_flag or DEFAULTS.model


def engine_config(model: str, flags: Mapping[str, Any]) -> EngineConfig:
    """EngineConfig of the flags that were given; raises ConfigError."""
    names = {field.name for field in dataclasses.fields(EngineConfig)} - {"model"}
    given = {**flags, "speculation": speculation_config(flags)}
    return EngineConfig(model=model, **{k: v for k, v in given.items() if k in names and v is not None})


def sampling_params(flags: Mapping[str, Any]) -> SamplingParams:
    """SamplingParams of the flags; --seed is the request's seed too. Raises InvalidRequestError."""
    values = {name: flags[name] for name in SamplingParams.__struct_fields__ if name in flags}
    values["max_tokens"] = None if flags["max_tokens"] == -1 else flags["max_tokens"]
    params = SamplingParams(**values)
    params.validate()
    return params


def _apply(command: F, *decorators: Callable[[F], F]) -> F:
    for decorator in reversed(decorators):
        command = decorator(command)
    return command
