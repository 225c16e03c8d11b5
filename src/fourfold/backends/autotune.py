"""Measures how the matmuls of a model are best divided among threads and caches on this machine.

For every kind of matmul in a Program and some numbers of rows, a few divisions are timed in turns beside the
one that the rule gives (native/execute.cpp); one that is clearly faster is taken. A kind is timed with copies
of its own weights: enough that caches do not hold them, where that matters.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack

from msgspec.structs import replace

from fourfold.backends.micro import Micro, MicroRunner, as_linear, linear_micro
from fourfold.backends.native import activations_on
from fourfold.build.divisions import Division, Divisions
from fourfold.build.packed import ELEM, PackedMatrix, PackedWeights
from fourfold.config import EngineConfig
from fourfold.program.ops import Linear, Logits, Program

_FEW = (1, 2, 4, 8, 16, 32)
_MANY = (64, 128, 512)
"""Rows that are measured: each for batches of up to as many, the last for all larger ones."""
_REGISTER_ROWS = 4
"""Up to so many rows unpacking weights in panels cannot pay."""
_ALL = 2**31 - 1
_COLD_BYTES = 64 << 20
"""Weights that a run of few rows goes through: more than caches hold."""
_LEAST_ROUNDS, _MOST_ROUNDS, _SECONDS = 4, 20, 0.1
"""Of one comparison."""
_GAIN = 0.04
"""Less is not told from noise."""


def autotune(
    program: Program,
    weights: PackedWeights,
    config: EngineConfig,
    threads: int,
    progress: Callable[[str, float], None],
) -> Divisions:
    """How the matmuls of `program` are to be divided where the rule is slower. Takes seconds.

    progress: called with (what, share done).  Raises LoadError if the kernels cannot run them.
    """
    found: Divisions = {}
    kinds = _kinds(program, weights)
    for done, (op, indices) in enumerate(kinds):
        progress("measuring how to divide matmuls", done / len(kinds))
        better = tuple(_better(op, weights, config, threads))
        if better:
            found |= dict.fromkeys(indices, better)
    return found


def _kinds(program: Program, weights: PackedWeights) -> list[tuple[Linear | Logits, list[int]]]:
    """One of each group of matmuls that do the same work on different weights, with their indices."""
    alike: dict[object, tuple[Linear | Logits, list[int]]] = {}
    for index, op in enumerate(program.ops):
        if isinstance(op, Linear | Logits):
            linear = as_linear(op)
            shapes = tuple(_shape(weights.matrices[name]) for name in linear.weights)
            key = (shapes, linear.gate, linear.norm is None, isinstance(op, Logits))
            alike.setdefault(key, (op, []))[1].append(index)
    return list(alike.values())


def _shape(m: PackedMatrix) -> tuple[int | bool, ...]:
    return (m.n, m.k, m.elem, m.bits, m.group, m.has_offset, m.wide)


def _better(
    op: Linear | Logits, weights: PackedWeights, config: EngineConfig, threads: int
) -> Iterator[Division]:
    """By ascending rows."""
    linear = as_linear(op)
    matrices = [weights.matrices[name] for name in linear.weights]
    int8 = activations_on(config.isa, config.activation_dtype) == "int8"
    outliers = weights.outliers.get(linear.weights[0]) if int8 else None
    streamed = int8 and all(m.elem == ELEM["ints"] for m in matrices)
    cold = max(2, math.ceil(_COLD_BYTES / sum(m.data.nbytes for m in matrices)))
    below = 0
    # Logits are computed for few rows at a time.
    for sizes, copies in ((_FEW, cold), (_MANY, 1)) if isinstance(op, Linear) else ((_FEW, cold),):
        micro = linear_micro(linear, matrices, outliers, copies)
        with ExitStack() as stack:
            variants: list[Division | None] = [None, *(_few(streamed=streamed) if sizes is _FEW else _many())]
            runners = [
                stack.enter_context(_runner(micro, config, threads, sizes[-1], variant))
                for variant in variants
            ]
            for rows in sizes:
                worth = [
                    i for i, variant in enumerate(variants) if variant is None or _is_worth(variant, rows)
                ]
                best = worth[clearly_fastest(_rounds([runners[i] for i in worth], rows))]
                division = variants[best]
                # Again: the luckiest of many is not yet the best.
                if division is not None and clearly_fastest(_rounds([runners[0], runners[best]], rows)):
                    most = _ALL if rows == _MANY[-1] else rows
                    yield replace(division, least=below + 1, most=most)
                below = rows


def _runner(
    micro: Micro, config: EngineConfig, threads: int, rows: int, division: Division | None
) -> MicroRunner:
    divisions: Divisions = {} if division is None else {1 + i: (division,) for i in range(micro.copies)}
    return MicroRunner(micro, config, threads, 1, rows, rows, divisions)


def _is_worth(division: Division, rows: int) -> bool:
    """Whether to try it: chunks of more rows than there are, or panels for very few, are not."""
    if rows in _FEW:
        return division.stream_rows > 0 or rows > _REGISTER_ROWS
    return division.chunk < 2 * rows


def _few(*, streamed: bool) -> Iterator[Division]:
    """streamed: whether weights can be unpacked in registers."""
    for stream_rows in (_FEW[-1], 0) if streamed else (_FEW[-1],):
        for runs in (True, False):
            for block in (2, 4):
                yield Division(1, _ALL, stream_rows, runs, block, 256)


def _many() -> Iterator[Division]:
    for block in (2, 4):
        for chunk in (64, 128, 192, 252):
            yield Division(1, _ALL, 0, False, block, chunk)


def _rounds(runners: Iterable[MicroRunner], rows: int) -> list[list[float]]:
    """Seconds of each, in turns: what disturbs the machine for a while disturbs all of them."""
    rounds: list[list[float]] = []
    end = time.perf_counter() + _SECONDS
    while len(rounds) < _LEAST_ROUNDS or (len(rounds) < _MOST_ROUNDS and time.perf_counter() < end):
        rounds.append([runner.run(rows) for runner in runners])
    return rounds


def clearly_fastest(rounds: list[list[float]]) -> int:
    """rounds: seconds of every candidate, round after round. 0 unless another one is clearly faster."""
    fastest = [min(times) for times in zip(*rounds, strict=True)]
    best = min(range(len(fastest)), key=fastest.__getitem__)
    return best if fastest[best] < (1 - _GAIN) * fastest[0] else 0
