"""The one reader of the environment, and the frozen configuration that everything is resolved into."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from fourfold.errors import ConfigError

ActivationDtype = Literal["auto", "int8", "bfloat16", "float32"]
KVDtype = Literal["bfloat16", "float32", "int8", "fp8"]
EvictionPolicy = Literal["lru", "lfu", "fifo"]
OffloadCompression = Literal["none", "int8"]
Isa = Literal["auto", "scalar", "avx2", "avxvnni", "avx512vnni", "avx512", "amx"]


SpeculationMethod = Literal["ngram", "draft_model"]


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """How tokens are guessed; names as in vLLM. Answers do not depend on it."""

    method: SpeculationMethod | None = "ngram"
    """ngram: what followed the last tokens before (prompt lookup). draft_model: a smaller model. None: only
    what requests bring (predictions, constraints that were answered before)."""
    num_speculative_tokens: int = 5
    """Most guesses per sequence and step. Fewer, or none, are made where they would not pay."""
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4
    """How many of the last tokens must be found again."""
    model: str | None = None
    """Of draft_model: a path, alias or Hub id; its vocabulary must be that of the model."""
    disable_by_batch_size: int | None = None
    """No guesses in steps of more sequences. None: where they do not pay, which is measured."""

    def __post_init__(self) -> None:
        if self.method not in (None, *get_args(SpeculationMethod)):
            known = ", ".join(get_args(SpeculationMethod))
            raise ConfigError(f"speculation method must be one of {known}, got {self.method!r}")
        if (self.method == "draft_model") != (self.model is not None):
            raise ConfigError("speculation needs a model with method draft_model, and only with that")
        for name, most in (
            ("num_speculative_tokens", 64),
            ("prompt_lookup_min", 64),
            ("prompt_lookup_max", 64),
            ("disable_by_batch_size", 2**31 - 1),
        ):
            value = getattr(self, name)
            if value is not None and not (type(value) is int and 1 <= value <= most):
                raise ConfigError(f"{name} must be a whole number between 1 and {most}, got {value!r}")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"prompt_lookup_min {self.prompt_lookup_min} is more than prompt_lookup_max "
                f"{self.prompt_lookup_max}"
            )


DEFAULT_ITL_RATIO = 1.75


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One resolved configuration; printed at start. `None` means "derived or measured"."""

    model: str = "smollm2"
    max_model_len: int | None = None
    """Longest sequence, prompt and answer together (tokens). None: what model and KV pool allow."""
    max_num_seqs: int = 64
    """Sequences computed in one step."""
    max_num_batched_tokens: int = 512
    """Token budget of one step."""
    max_waiting: int = 1024
    """Bound of the waiting queue; beyond it requests get 429."""
    max_itl_ratio: float | None = None
    """How many times longer the time between two tokens of an answer may become while prompts are computed
    beside it; their chunks are cut accordingly. 0: no bound but the token budget. None: DEFAULT_ITL_RATIO
    where answers are watched as they come (a server), 0 where they are not (LLM)."""
    itl_target_ms: float | None = None
    """The time between two tokens to keep, in milliseconds, instead of a ratio; fewer sequences run at a time
    if they must."""
    activation_dtype: ActivationDtype = "auto"
    """What activations are held in inside matmuls with integer weights. float32 is exact. auto: what is
    fastest on the instruction set: bfloat16 where a tile unit multiplies it (amx), else int8."""
    kv_cache_dtype: KVDtype = "bfloat16"
    """What keys and values are held in. int8 and fp8 (E4M3) have a scale per token and head."""
    kv_cache_bytes: int | None = None
    """Size of the KV pool. None: a share of the memory that is free."""
    num_kv_blocks: int | None = None
    """Size of the KV pool in blocks; wins over kv_cache_bytes."""
    threads: int | None = None
    """None: the physical cores this process may use (affinity and cgroup quota respected)."""
    isa: Isa = "auto"
    autotune: bool | None = None
    """How matmuls are divided among threads and caches. True: as measured on this machine, which takes
    seconds the first time and is kept with the artefact. False: by rule. None: as measured if it was."""
    seed: int | None = None
    """Base of the seeds of requests that bring none. None: from the operating system."""
    prefix_caching: bool = True
    speculation: SpeculationConfig | None = None
    """None: as SpeculationConfig.method None."""
    radix_eviction_policy: EvictionPolicy = "lru"
    """Which unused prefix goes first: the longest unused, the least often used, the oldest."""

    kv_host_cache_gib: float = 0.0
    """Host memory for KV blocks that the pool has no room for, GiB. 0: none."""
    kv_disk_cache_dir: str | None = None
    """Folder for KV blocks that shall outlive the process. None: none."""
    kv_disk_cache_gib: float = 8.0
    """Most that the folder may take, GiB."""
    kv_offload_compression: OffloadCompression = "none"
    """int8 halves what tiers take. Blocks that come back differ a little, so answers may too."""
    kv_pinned_share: float = 0.25
    """Share of the pool that pinned prefixes may take; one tenant at most half of that, if there are
    several."""
    kv_events_endpoint: str | None = None
    """ZeroMQ endpoint to publish KV events on, like tcp://127.0.0.1:5557. None: none."""

    def __post_init__(self) -> None:
        for name, least, most in (
            ("kv_host_cache_gib", 0, 65536), ("kv_disk_cache_gib", 0, 1 << 20), ("kv_pinned_share", 0, 1),
        ):  # fmt: skip
            value = getattr(self, name)
            if not (isinstance(value, int | float) and least <= value <= most):
                raise ConfigError(f"{name} must be between {least} and {most}, got {value!r}")
        for name, kind in (
            ("activation_dtype", ActivationDtype),
            ("kv_cache_dtype", KVDtype),
            ("isa", Isa),
            ("radix_eviction_policy", EvictionPolicy),
            ("kv_offload_compression", OffloadCompression),
        ):
            value = getattr(self, name)
            if value not in get_args(kind):
                raise ConfigError(f"{name} must be one of {', '.join(get_args(kind))}, got {value!r}")
        for name in (
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "num_kv_blocks",
            "threads",
            "max_waiting",
        ):
            value = getattr(self, name)
            if value is not None and not 1 <= value < 2**31:
                raise ConfigError(f"{name} must be between 1 and 2147483647, got {value!r}")
        if not (self.max_itl_ratio is None or self.max_itl_ratio == 0 or 1 <= self.max_itl_ratio <= 1e6):
            raise ConfigError(
                f"max_itl_ratio must be 0 (off) or between 1 and 1e6, got {self.max_itl_ratio!r}"
            )
        if self.itl_target_ms is not None and not 0 < self.itl_target_ms <= 1e6:
            raise ConfigError(f"itl_target_ms must be above 0 and at most 1e6, got {self.itl_target_ms!r}")


@dataclass(frozen=True, slots=True)
class Environment:
    """What the environment says.

    FOURFOLD_CACHE_DIR: artefacts and downloaded models. FOURFOLD_API_KEY: the server's key.
    """

    cache_dir: Path = field(default_factory=lambda: _default_cache())
    api_key: str | None = None
    log_level: str = "info"
    offline: bool = False
    """Fetch no model. HF_HUB_OFFLINE, the Hugging Face client's switch, so that one switch is enough."""

    _NAMES = ("FOURFOLD_CACHE_DIR", "FOURFOLD_API_KEY", "FOURFOLD_LOG_LEVEL")

    @property
    def model_dir(self) -> Path:
        """Models fetched from packages."""
        return self.cache_dir / "models"

    @property
    def artefact_dir(self) -> Path:
        """What was built for this machine: one file or folder per artefact."""
        return self.cache_dir / "artefacts"

    @staticmethod
    def read(env: Mapping[str, str] | None = None) -> Environment:
        """Raises ConfigError on an unknown FOURFOLD_* name (with the nearest known one) or a bad value."""
        env = os.environ if env is None else env
        for name in env:
            if name.startswith("FOURFOLD_") and name not in Environment._NAMES:
                import difflib

                near = difflib.get_close_matches(name, Environment._NAMES, 1, 0)
                raise ConfigError(f"unknown environment variable {name}; did you mean {near[0]}?")
        level = env.get("FOURFOLD_LOG_LEVEL", "info").lower()
        if level not in ("debug", "info", "warning", "error"):
            raise ConfigError(f"FOURFOLD_LOG_LEVEL must be debug, info, warning or error, got {level!r}")
        cache = env.get("FOURFOLD_CACHE_DIR")
        return Environment(
            cache_dir=Path(cache).expanduser() if cache else _default_cache(env),
            api_key=env.get("FOURFOLD_API_KEY") or None,
            log_level=level,
            offline=env.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"),
        )


def child_environment(**changes: str) -> dict[str, str]:
    """The environment for a child process: this process's own with `changes`."""
    return {**os.environ, **changes}


def without_blas_threads() -> None:
    """Call before NumPy is imported. Its BLAS starts threads then that spin for a while and have nothing to
    do here; the kernels have threads of their own. Said otherwise in the environment, that holds."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def _default_cache(env: Mapping[str, str] | None = None) -> Path:
    env = os.environ if env is None else env
    base = env.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fourfold"
