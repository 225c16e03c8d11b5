"""Packed weights: what the native kernels read, by the names a Program uses."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np
from numpy.typing import NDArray

from fourfold.config import KVDtype

ELEM = {"ints": 0, "F32": 1, "F16": 2, "BF16": 3, "F8_E4M3": 4, "F8_E5M2": 5}
"""native/matrix.h: Elem."""

KV_TYPE: Mapping[KVDtype, int] = {"bfloat16": 0, "float32": 1, "int8": 2, "fp8": 3}
"""native/attention.h: KvType."""


class PackedMatrix(msgspec.Struct, frozen=True):
    """One matrix [n, k] in native/matrix.h's layout.

    key: names the content, so that tied weights are one matrix.  data: uint8, aligned to 64 bytes.
    The other fields are those of native Matrix; they are 0 for floating-point elements, but for fp8's group.
    """

    key: str
    data: NDArray[np.uint8]
    n: int
    k: int
    elem: int
    bits: int = 0
    group: int = 0
    zero: int = 0
    has_offset: bool = False
    wide: bool = False


class Outliers(msgspec.Struct, frozen=True):
    """Columns of one op's input that are kept out of its int8 groups.

    channels: int32 [c], ascending.  columns: per matrix of the op, that matrix's columns there, fp16 bits
    [tiles * c * 16] in the order [tile][channel][row of the tile].
    """

    channels: NDArray[np.int32]
    columns: tuple[NDArray[np.uint16], ...]


class PackedWeights(msgspec.Struct, frozen=True):
    """Program weight name → packed matrix, or fp32 vector (norms, biases, sinks).

    outliers: name of an op's first matrix → outliers of that op's input.
    """

    matrices: Mapping[str, PackedMatrix]
    vectors: Mapping[str, NDArray[np.float32]]
    outliers: Mapping[str, Outliers] = msgspec.field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes held, each matrix counted once."""
        unique = {m.key: m.data.nbytes for m in self.matrices.values()}
        columns = sum(c.nbytes for o in self.outliers.values() for c in o.columns)
        return sum(unique.values()) + sum(v.nbytes for v in self.vectors.values()) + columns
