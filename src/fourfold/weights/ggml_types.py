"""Tensor types of GGUF files: id -> name, elements per block, bytes per block.

What the project can decode comes from the quant registry; the others are known only so that a file holding
them can be checked and described.
"""

from __future__ import annotations

import msgspec

from fourfold.quant.registry import BY_GGML_TYPE


class GGMLType(msgspec.Struct, frozen=True):
    name: str
    block: int
    block_bytes: int


_UNDECODED = {
    9: GGMLType("Q8_1", 32, 36),
    15: GGMLType("Q8_K", 256, 292),
    16: GGMLType("IQ2_XXS", 256, 66),
    17: GGMLType("IQ2_XS", 256, 74),
    18: GGMLType("IQ3_XXS", 256, 98),
    19: GGMLType("IQ1_S", 256, 50),
    21: GGMLType("IQ3_S", 256, 110),
    22: GGMLType("IQ2_S", 256, 82),
    23: GGMLType("IQ4_XS", 256, 136),
    24: GGMLType("I8", 1, 1),
    25: GGMLType("I16", 1, 2),
    26: GGMLType("I32", 1, 4),
    27: GGMLType("I64", 1, 8),
    28: GGMLType("F64", 1, 8),
    29: GGMLType("IQ1_M", 256, 56),
    34: GGMLType("TQ1_0", 256, 54),
    35: GGMLType("TQ2_0", 256, 66),
    39: GGMLType("MXFP4", 32, 17),
}

GGML_TYPES: dict[int, GGMLType] = _UNDECODED | {
    number: GGMLType(each.name, each.block, each.block_bytes) for number, each in BY_GGML_TYPE.items()
}
