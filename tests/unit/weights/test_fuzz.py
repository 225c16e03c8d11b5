"""A short run of the fuzz loop, and hypothesis on the same readers: only LoadError, and memory bounded."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

FUZZ = Path(__file__).parents[3] / "fuzz"


@pytest.fixture(scope="module")
def mutate() -> Iterator[ModuleType]:
    sys.path.insert(0, str(FUZZ))
    try:
        import mutate

        yield mutate
    finally:
        sys.path.remove(str(FUZZ))


@pytest.mark.parametrize("name", ["gguf", "safetensors"])
def test_some_thousand_mutated_files(mutate: ModuleType, name: str) -> None:
    assert mutate.run(name, random.Random(1), count=3000) == 3000


@pytest.mark.parametrize("name", ["gguf", "safetensors"])
def test_length_fields_and_byte_flips(mutate: ModuleType, name: str) -> None:
    """Any byte changed, any eight bytes made a number, any cut."""
    seeds, target = mutate.SEEDS[name](), mutate.TARGETS[name]

    @settings(max_examples=400, deadline=None)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        file = bytearray(data.draw(st.sampled_from(seeds)))
        place = data.draw(st.integers(0, len(file) - 1))
        change = data.draw(st.sampled_from(["byte", "number", "cut"]))
        if change == "byte":
            file[place] = data.draw(st.integers(0, 255))
        elif change == "number":
            number = data.draw(st.sampled_from([2**60, 2**63, 2**64 - 1]) | st.integers(0, 2**64 - 1))
            file[place : place + 8] = number.to_bytes(8, "little")
        else:
            del file[place:]
        target(bytes(file))

    check()


@pytest.mark.parametrize("name", ["gguf", "safetensors"])
@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=400))
def test_any_bytes_behind_a_right_start(mutate: ModuleType, name: str, data: bytes) -> None:
    head = b"GGUF\x03\0\0\0" if name == "gguf" else len(data).to_bytes(8, "little") + b"{"
    mutate.TARGETS[name](head + data)


# A process of its own: tracemalloc counts what any thread holds, those of other tests, too.
PEAK = """
import random, sys, tracemalloc
import mutate
tracemalloc.start()
mutate.run(sys.argv[1], random.Random(2), count=600)
print(tracemalloc.get_traced_memory()[1])
"""


@pytest.mark.parametrize("name", ["gguf", "safetensors"])
def test_memory_is_bounded_by_the_file(name: str) -> None:
    """No claimed length is believed: a run of mutated files of a few KiB never holds more than 4 MiB."""
    command = [sys.executable, "-c", PEAK, name]
    path = os.pathsep.join([str(FUZZ), *sys.path])
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 4 << 20
