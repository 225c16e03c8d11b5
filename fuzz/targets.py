"""What is fuzzed: bytes through a reader, and all that it then offers. Only LoadError may come out."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from fourfold.errors import LoadError
from fourfold.quant import get_format
from fourfold.weights import metadata as getters
from fourfold.weights.gguf import open_gguf
from fourfold.weights.metadata import StringArray
from fourfold.weights.safetensors import open_safetensors
from fourfold.weights.source import RawTensor

Reader = Callable[[Path], object]

MAX_DECODED = 1 << 16
"""Elements decoded of one tensor: enough to reach every decoder, little enough to stay quick."""


def _as_file(data: bytes, read: Reader) -> None:
    """Calls read with the path of a file that holds data; a LoadError is fine if it names the file."""
    # A fresh file each time: the last one may still be mapped.
    descriptor, name = tempfile.mkstemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        message = _load_error(lambda: read(Path(name)))
        if message is not None and not (message.startswith(f"{name}: ") and message.isprintable()):
            raise AssertionError(f"not a message to show: {message!a}")
    finally:
        os.unlink(name)


def _load_error(action: Callable[[], object]) -> str | None:
    try:
        action()
    except LoadError as error:
        return str(error)
    return None


def _use_tensor(tensor: RawTensor) -> None:
    assert tensor.data.dtype == np.uint8
    assert not tensor.data.size or not tensor.data.flags.writeable
    int(tensor.data.sum(dtype=np.uint64))  # touches every byte: a bad extent is a SIGBUS here
    try:
        spec = get_format(tensor.format)
    except LoadError:
        return
    assert tensor.data.size == spec.nbytes(tensor.shape)
    if tensor.data.size // spec.block_bytes * spec.block > MAX_DECODED:
        return
    with np.errstate(all="ignore"):
        decoded = spec.decode(tensor.data, tensor.shape)
        assert decoded.shape == tensor.shape
        if spec.integers is not None:
            assert spec.split(tensor.data, tensor.shape).q.size == decoded.size


def _read_gguf(path: Path) -> None:
    file = open_gguf(path)
    for key, value in file.metadata.items():
        if isinstance(value, StringArray):
            assert len(value.tolist()) == len(value)
        for getter in (
            getters.get_int, getters.get_float, getters.get_bool, getters.get_str,
            getters.get_strings, getters.get_ints, getters.get_floats,
        ):  # fmt: skip
            message = _load_error(partial(getter, file.metadata, key))
            assert message is None or key in message
    for name in file.names():
        _use_tensor(file.tensor(name))


def _read_safetensors(path: Path) -> None:
    file = open_safetensors(path)
    covered = sum(file.tensor(name).data.size for name in file.names())
    assert covered <= path.stat().st_size
    for name in file.names():
        _use_tensor(file.tensor(name))


def gguf(data: bytes) -> None:
    _as_file(data, _read_gguf)


def safetensors(data: bytes) -> None:
    _as_file(data, _read_safetensors)


TARGETS: dict[str, Callable[[bytes], None]] = {"gguf": gguf, "safetensors": safetensors}
