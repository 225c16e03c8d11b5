"""How a Program's weight is made from a checkpoint's tensors: data that loaders and packers share."""

from __future__ import annotations

import msgspec


class WeightScale(msgspec.Struct, frozen=True):
    """Element [i, j] of an fp8 tensor is multiplied by [i // rows, j // columns] of tensor `source`."""

    source: str
    rows: int
    columns: int


class Binding(msgspec.Struct, frozen=True):
    """A Program weight = rows [row_start, row_start + rows) of checkpoint tensor `source`, perhaps reordered.

    rows: None means all of them.
    interleaved_heads: the checkpoint stores each head's rotary pairs interleaved (2i, 2i+1), as GGUF files of
        the llama family do; its rows are to be reordered to halves (i, i + head_dim/2). The value is the
        number of heads.
    add: constant added to every element of a vector on load (GGUF's Gemma norms already contain their +1).
    scale: of an fp8 matrix; None for one.
    """

    source: str
    row_start: int = 0
    rows: int | None = None
    interleaved_heads: int | None = None
    add: float = 0.0
    scale: WeightScale | None = None
