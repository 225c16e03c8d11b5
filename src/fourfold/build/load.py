"""From a model's name and a configuration to a backend that runs it: the one place where all rooms meet."""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from fourfold.build.artefact import LAYOUT, WeightNames, fingerprint, load_or_build
from fourfold.build.calibrate import calibration_tokens, find_outliers
from fourfold.build.machine import available_memory, memory_nodes, memory_spread_over, usable_cores
from fourfold.build.packed import KV_TYPE, Outliers, PackedWeights
from fourfold.config import EngineConfig, Environment, KVDtype
from fourfold.engine.batch import Backend
from fourfold.errors import ConfigError
from fourfold.models.binding import Binding
from fourfold.models.registry import Definition, load_model_definition
from fourfold.program.memory import plan
from fourfold.program.ops import KVSpec, Program
from fourfold.program.passes import optimize
from fourfold.types import ModelInfo
from fourfold.weights.open import open_checkpoint
from fourfold.weights.source import WeightSource

log = logging.getLogger(__name__)

_KV_SHARE = 0.25
"""Largest share of the available memory that the KV pool takes unless told otherwise."""
_KV_TOKENS = 65536
"""Tokens the KV pool holds unless told otherwise: these, or four sequences of full length if that is more."""


def load_engine_backend(
    config: EngineConfig, progress: Callable[[str, float], None]
) -> tuple[Backend, ModelInfo]:
    """Loads config.model (a path, alias or Hub id), packing its weights if that was not done before.

    progress: called with (what, share done).  Raises ModelNotFoundError, LoadError, ConfigError.
    """
    nodes = memory_nodes()
    with memory_spread_over(nodes) as spread:
        backend, info = _load(config, progress)
    if spread:
        info.description["memory"] = f"spread over the nodes {', '.join(map(str, nodes))}"
    return backend, info


def _load(config: EngineConfig, progress: Callable[[str, float], None]) -> tuple[Backend, ModelInfo]:
    from fourfold import _native
    from fourfold.backends.native import NativeBackend, NativeLimits

    started = time.monotonic()
    path, name = _locate(config)
    progress("reading the model file", 0.0)
    source = open_checkpoint(path)
    definition = load_model_definition(source, config.max_model_len)
    program = optimize(definition.program)
    # Before the weights are packed: a flag that cannot work must not cost a build.
    length, blocks = _sizes(config, program, int(_native.BLOCK_TOKENS))
    exact = config.activation_dtype != "int8"
    names = _weight_names(definition)
    folder = Environment.read().artefact_dir / _artefact_name(path, source, exact=exact)
    memory = plan(program)
    threads = config.threads or usable_cores()

    def calibrate(packed: PackedWeights) -> Mapping[str, Outliers]:
        tokens = calibration_tokens(program.vocab_size, program.max_position)
        limits = NativeLimits(len(tokens), 1, len(tokens), -(-len(tokens) // int(_native.BLOCK_TOKENS)))
        backend = NativeBackend(
            program, memory, packed, limits, activation_dtype="float32", kv_dtype="float32", threads=threads
        )
        return find_outliers(program, packed, backend.input_magnitudes(tokens))

    weights, ready = load_or_build(
        folder, source, names, exact=exact, calibrate=None if exact else calibrate, progress=progress
    )
    limits = NativeLimits(config.max_num_batched_tokens, config.max_num_seqs, length, blocks)
    backend = NativeBackend(
        program,
        memory,
        weights,
        limits,
        activation_dtype=config.activation_dtype,
        kv_dtype=config.kv_cache_dtype,
        threads=threads,
        isa=config.isa,
    )
    isa = _native.isas()[-1] if config.isa == "auto" else config.isa
    parameters = sum(math.prod(w.shape) for n, w in program.weights.items() if n not in _tied(definition))
    info = ModelInfo(
        name=name,
        path=str(path),
        family=program.family,
        parameters=parameters,
        vocab_size=program.vocab_size,
        max_model_len=length,
        block_size=backend.block_size,
        num_blocks=blocks,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        weight_bytes=weights.nbytes,
        kv_identity="|".join(
            (
                folder.name,
                hashlib.blake2b(repr(program.ops).encode(), digest_size=16).hexdigest(),
                isa,
                config.activation_dtype,
                config.kv_cache_dtype,
                str(backend.block_size),
            )
        ),
        description={
            **definition.summary,
            **program.notes,
            "instruction set": isa,
            "threads": str(threads),
            "activation dtype": config.activation_dtype,
            "KV cache dtype": config.kv_cache_dtype,
            "artefact": f"{folder.name} ({'mapped' if ready else 'built'})",
            "load time": f"{time.monotonic() - started:.3f} s",
        },
    )
    progress("ready", 1.0)
    return backend, info


def _locate(config: EngineConfig) -> tuple[Path, str]:
    """The front resolves names before it starts an engine; a path needs no resolver."""
    path = Path(config.model).expanduser()
    if path.exists():
        return path.resolve(), path.stem if path.is_file() else path.name
    from fourfold.hub import resolve

    resolved = resolve(config.model)
    return resolved.path, resolved.name


def _weight_names(definition: Definition) -> WeightNames:
    matrices: dict[str, Binding] = {}
    vectors: dict[str, Binding] = {}
    for name, spec in definition.program.weights.items():
        (matrices if len(spec.shape) == 2 else vectors)[name] = definition.bindings[name]
    return WeightNames(matrices, vectors)


def _tied(definition: Definition) -> set[str]:
    """Weights that are another name for one already counted."""
    seen: set[Binding] = set()
    tied = set()
    for name in definition.program.weights:
        binding = definition.bindings[name]
        if binding in seen:
            tied.add(name)
        seen.add(binding)
    return tied


def _artefact_name(path: Path, source: WeightSource, *, exact: bool) -> str:
    if path.is_dir():
        files = {p.name: p for p in path.iterdir() if p.suffix in (".safetensors", ".json")}
    else:
        files = {p.name: p for p in getattr(source, "files", (path,))}
    precision = "exact" if exact else "fast"
    return f"{path.stem if path.is_file() else path.name}-{fingerprint(files)}-{precision}-{LAYOUT}"


def kv_block_bytes(layers: tuple[KVSpec, ...], dtype: KVDtype) -> int:
    """Bytes of one KV block of all layers, with the scales of the types that have some."""
    from fourfold import _native

    return sum(_native.kv_block_bytes(KV_TYPE[dtype], kv.kv_heads, kv.head_dim) for kv in layers)


def _sizes(config: EngineConfig, program: Program, block_size: int) -> tuple[int, int]:
    """(longest sequence in tokens, KV blocks). Raises ConfigError with both numbers if they cannot be had."""
    length = config.max_model_len or program.max_position
    if length > program.max_position:
        raise ConfigError(
            f"max_model_len {length} is more than the {program.max_position} tokens this model supports; "
            f"use at most {program.max_position}"
        )
    per_block = kv_block_bytes(program.kv, config.kv_cache_dtype)
    if config.num_kv_blocks is not None:
        blocks = config.num_kv_blocks
    elif config.kv_cache_bytes is not None:
        blocks = config.kv_cache_bytes // per_block
    else:
        wanted = -(-max(4 * length, _KV_TOKENS) // block_size)
        blocks = min(wanted, int(available_memory() * _KV_SHARE) // per_block)
    if blocks < 1:
        raise ConfigError(
            f"the KV cache needs at least one block of {per_block} bytes; give it more with --kv-cache-memory"
        )
    holds = blocks * block_size
    if length > holds:
        if config.max_model_len is not None:
            raise ConfigError(
                f"max_model_len {length} does not fit in the KV cache, which holds {holds} tokens "
                f"({blocks * per_block} bytes); lower it or raise --kv-cache-memory"
            )
        log.warning(
            "the longest sequence is %d tokens, not the model's %d: the KV cache holds no more", holds, length
        )
        length = holds
    return length, blocks
