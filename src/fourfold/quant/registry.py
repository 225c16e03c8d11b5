"""Every format the project reads, by name and by GGUF type id."""

from __future__ import annotations

from fourfold.errors import LoadError
from fourfold.quant import floats, kquants, legacy
from fourfold.quant.block import BlockFormat

FORMATS: dict[str, BlockFormat] = {
    each.name: each for each in (*floats.FORMATS, *legacy.FORMATS, *kquants.FORMATS)
}

BY_GGML_TYPE: dict[int, BlockFormat] = {
    each.ggml_type: each for each in FORMATS.values() if each.ggml_type is not None
}

_INTEGERS = ("BOOL", "I8", "I16", "I32", "I64", "U8", "U16", "U32", "U64")


def get_format(name: str) -> BlockFormat:
    """Raises LoadError naming the format and the supported ones."""
    found = FORMATS.get(name)
    if found is not None:
        return found
    if name in _INTEGERS:
        raise LoadError(f"a tensor of type {name} holds plain integers and cannot be used as a weight")
    raise LoadError(f"weight format {name!r} is not supported; supported are {', '.join(FORMATS)}")
