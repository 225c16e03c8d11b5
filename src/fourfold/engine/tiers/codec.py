"""What a block's content is turned into below the pool: itself, or int8 with a scale per group."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

GROUP = 64
"""Numbers that share a scale. In the pool's layout (native/attention.h) these are two channels of K of all 32
tokens of a block, or 32 channels of V of two tokens, so a large channel of K spoils no other."""


class Codec(Protocol):
    """name: a part of the identity of what is on disk.  size: bytes of an encoded block."""

    name: str
    size: int

    def encode(self, data: Bytes, out: Bytes) -> None: ...

    def decode(self, data: Bytes, out: Bytes) -> None: ...


class Raw:
    """To the bit."""

    name = "raw"

    def __init__(self, block_bytes: int) -> None:
        self.size = block_bytes

    def encode(self, data: Bytes, out: Bytes) -> None:
        out[:] = data

    def decode(self, data: Bytes, out: Bytes) -> None:
        out[:] = data


class Int8:
    """bf16 numbers as int8, 64 to an fp32 scale: 53 % of the bytes. A number changes by at most half its
    group's scale (largest magnitude / 127) and the rounding to bf16. Not finite numbers become zero."""

    name = "int8"

    def __init__(self, block_bytes: int) -> None:
        """Raises ValueError if a block is no whole number of groups."""
        if block_bytes % (2 * GROUP):
            raise ValueError(f"a block of {block_bytes} bytes is not a multiple of {GROUP} bf16 numbers")
        self._groups = block_bytes // (2 * GROUP)
        self.size = self._groups * (GROUP + 4)

    def encode(self, data: Bytes, out: Bytes) -> None:
        bits = data.view(np.uint16).astype(np.uint32) << 16
        values = np.nan_to_num(bits.view(np.float32), nan=0.0, posinf=0.0, neginf=0.0)
        values = values.reshape(self._groups, GROUP)
        scale = np.abs(values).max(axis=1) * np.float32(1 / 127)
        scales, codes = self._parts(out)
        scales[:] = scale
        inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 1e-30)
        np.rint(values * inverse[:, None], out=values)
        codes[:] = values

    def decode(self, data: Bytes, out: Bytes) -> None:
        scales, codes = self._parts(data)
        bits = (codes * scales[:, None]).view(np.uint32)
        # To nearest, ties to even.
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        out.view(np.uint16)[:] = rounded.reshape(-1)

    def _parts(self, data: Bytes) -> tuple[NDArray[np.float32], NDArray[np.int8]]:
        split = 4 * self._groups
        return data[:split].view(np.float32), data[split:].view(np.int8).reshape(self._groups, GROUP)
