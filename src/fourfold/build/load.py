"""From a model's name and a configuration to a backend that runs it: the one place where all rooms meet."""

from __future__ import annotations

import gc
import hashlib
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from fourfold import _native
from fourfold.backends.native import NativeBackend, NativeLimits, activations_on, best_isa
from fourfold.build.artefact import LAYOUT, fingerprint, open_artefact
from fourfold.build.divisions import Divisions, are_kept, keep_divisions, read_divisions, situation
from fourfold.build.machine import available_memory, memory_nodes, memory_spread_over, usable_cores
from fourfold.build.packed import KV_TYPE, Outliers, PackedWeights
from fourfold.build.prepared import Prepared, keep_prepared, maker, read_prepared
from fourfold.build.prune import note_use, prune
from fourfold.config import EngineConfig, Environment, KVDtype
from fourfold.engine.batch import Backend
from fourfold.errors import ConfigError
from fourfold.program.ops import KVSpec, Program
from fourfold.types import ModelInfo
from fourfold.weights.shards import shards

if TYPE_CHECKING:
    from fourfold.build.understand import Understood

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
    started = time.monotonic()
    path, name = _locate(config)
    progress("reading the model file", 0.0)
    exact = config.activation_dtype == "float32"
    folder = Environment.read().artefact_dir / _artefact_name(path, exact=exact)
    made_by = maker(config.max_model_len)
    understood: Understood | None = None
    prepared = read_prepared(folder, made_by)
    if prepared is None:
        understood = _understand(path, config)
        prepared = understood.prepared
    program = prepared.program
    # Before the weights are packed: a flag that cannot work must not cost a build.
    length, blocks = _sizes(config, program, NativeBackend.BLOCK_TOKENS)
    threads = config.threads or usable_cores()
    weights, ready = _weights(folder, prepared, understood), True
    if weights is None:
        understood = understood or _understand(path, config)
        weights, ready = _load_or_build(folder, understood, exact, threads, progress)
        if folder.is_dir():
            keep_prepared(folder, made_by, prepared)
            prune(folder.parent)
    note_use(folder)
    divisions = _divisions(folder, config, program, weights, threads, progress)
    limits = NativeLimits(config.max_num_batched_tokens, config.max_num_seqs, length, blocks)
    backend = NativeBackend(
        program,
        prepared.plan,
        weights,
        limits,
        activation_dtype=config.activation_dtype,
        kv_dtype=config.kv_cache_dtype,
        threads=threads,
        isa=config.isa,
        divisions=divisions,
    )
    isa, activations = best_isa(config.isa), activations_on(config.isa, config.activation_dtype)
    info = ModelInfo(
        name=name,
        path=str(path),
        family=program.family,
        parameters=prepared.parameters,
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
                hashlib.blake2b(msgspec.msgpack.encode(program.ops), digest_size=16).hexdigest(),
                isa,
                activations,
                config.kv_cache_dtype,
                str(backend.block_size),
            )
        ),
        description={
            **prepared.summary,
            **program.notes,
            "instruction set": isa,
            "threads": str(threads),
            "activation dtype": activations,
            "KV cache dtype": config.kv_cache_dtype,
            "matmuls divided": "by rule" if divisions is None else "as measured",
            "artefact": f"{folder.name} ({'mapped' if ready else 'built'})",
            "load time": f"{time.monotonic() - started:.3f} s",
        },
    )
    progress("ready", 1.0)
    return backend, info


def _divisions(
    folder: Path,
    config: EngineConfig,
    program: Program,
    weights: PackedWeights,
    threads: int,
    progress: Callable[[str, float], None],
) -> Divisions | None:
    if config.autotune is False or not (config.autotune or are_kept(folder)):
        return None
    activations = activations_on(config.isa, config.activation_dtype)
    where = situation(program.ops, best_isa(config.isa), threads, activations)
    found = read_divisions(folder, where)
    if found is None and config.autotune:
        from fourfold.backends.autotune import autotune

        found = autotune(program, weights, config, threads, progress)
        keep_divisions(folder, where, found)
    return found


def _locate(config: EngineConfig) -> tuple[Path, str]:
    """The front resolves names before it starts an engine; a path needs no resolver."""
    path = Path(config.model).expanduser()
    if path.exists():
        return path.resolve(), path.stem if path.is_file() else path.name
    from fourfold.hub import resolve

    resolved = resolve(config.model)
    return resolved.path, resolved.name


def _understand(path: Path, config: EngineConfig) -> Understood:
    # All that reads checkpoints and traces models; a start from an artefact does without.
    from fourfold.build.understand import understand

    gc.enable()  # off during a short start, which this is not
    return understand(path, config.max_model_len)


def _load_or_build(
    folder: Path, understood: Understood, exact: bool, threads: int, progress: Callable[[str, float], None]
) -> tuple[PackedWeights, bool]:
    from fourfold.build.calibrate import calibration_tokens, find_outliers
    from fourfold.build.make import load_or_build

    prepared = understood.prepared
    program = prepared.program

    def calibrate(packed: PackedWeights) -> Mapping[str, Outliers]:
        tokens = calibration_tokens(program.vocab_size, program.max_position)
        limits = NativeLimits(len(tokens), 1, len(tokens), -(-len(tokens) // NativeBackend.BLOCK_TOKENS))
        backend = NativeBackend(
            program,
            prepared.plan,
            packed,
            limits,
            activation_dtype="float32",
            kv_dtype="float32",
            threads=threads,
        )
        return find_outliers(program, packed, backend.input_magnitudes(tokens))

    return load_or_build(
        folder,
        understood.source,
        understood.names,
        exact=exact,
        calibrate=None if exact else calibrate,
        progress=progress,
    )


def _weights(folder: Path, prepared: Prepared, understood: Understood | None) -> PackedWeights | None:
    """The artefact's weights. None if they are to be made, or if what is wrong with them is still to be told
    by who makes them again."""
    if understood is not None:
        return None
    try:
        return open_artefact(folder, prepared.keys)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _artefact_name(path: Path, *, exact: bool) -> str:
    if path.is_dir():
        files = {p.name: p for p in path.iterdir() if p.suffix in (".safetensors", ".json")}
    else:
        files = {p.name: p for p in shards(path)}
    precision = "exact" if exact else "fast"
    return f"{path.stem if path.is_file() else path.name}-{fingerprint(files)}-{precision}-{LAYOUT}"


def kv_block_bytes(layers: tuple[KVSpec, ...], dtype: KVDtype) -> int:
    """Bytes of one KV block of all layers, with the scales of the types that have some."""
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
