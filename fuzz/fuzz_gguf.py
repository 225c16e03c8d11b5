"""atheris harness of the gguf reader; README.md has the command line."""

from __future__ import annotations

import random
import sys

import atheris

with atheris.instrument_imports(include=["fourfold"]):
    import targets
    from mutate import mutate


def custom_mutator(data: bytes, max_size: int, seed: int) -> bytes:
    """Half of the time libFuzzer's own mutations, half of the time those that know the format."""
    rng = random.Random(seed)
    if rng.random() < 0.5:
        mutated: bytes = atheris.Mutate(data, len(data) + 64)
    else:
        mutated = mutate(data, rng)
    return mutated[:max_size]


if __name__ == "__main__":
    atheris.Setup(sys.argv, targets.gguf, custom_mutator=custom_mutator)
    atheris.Fuzz()
