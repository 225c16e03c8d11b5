"""From a checkpoint to its fused Program, and to an artefact: what only a first start needs."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from fourfold.build.make import WeightNames
from fourfold.build.prepared import Prepared
from fourfold.models.binding import Binding
from fourfold.models.registry import Definition, load_model_definition
from fourfold.program.memory import plan
from fourfold.program.passes import optimize
from fourfold.weights.open import open_checkpoint
from fourfold.weights.source import WeightSource


class Understood(msgspec.Struct, frozen=True):
    """A checkpoint, the names of its weights, and what follows from it."""

    source: WeightSource
    names: WeightNames
    prepared: Prepared


def understand(path: Path, max_model_len: int | None) -> Understood:
    """Raises LoadError for a checkpoint that is damaged or not supported."""
    source = open_checkpoint(path)
    definition = load_model_definition(source, max_model_len)
    program = optimize(definition.program)
    names = _weight_names(definition)
    tied = _tied(definition)
    prepared = Prepared(
        program=program,
        plan=plan(program),
        keys=names.keys(),
        parameters=sum(math.prod(w.shape) for name, w in program.weights.items() if name not in tied),
        summary=definition.summary,
    )
    return Understood(source, names, prepared)


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
