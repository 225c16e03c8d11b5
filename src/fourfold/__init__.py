"""Fourfold, an LLM inference engine. The offline API: `from fourfold import LLM, SamplingParams`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fourfold._version import __version__

if TYPE_CHECKING:
    from fourfold.llm import LLM, CompletionOutput, RequestOutput
    from fourfold.types import SamplingParams, StructuredOutputsParams

__all__ = [
    "LLM",
    "CompletionOutput",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]

_HOMES = {
    "LLM": "fourfold.llm",
    "CompletionOutput": "fourfold.llm",
    "RequestOutput": "fourfold.llm",
    "SamplingParams": "fourfold.types",
    "StructuredOutputsParams": "fourfold.types",
}


def __getattr__(name: str) -> Any:
    """Names are imported when first used (PEP 562), so that every command pays only for what it needs."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
