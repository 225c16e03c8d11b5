"""Which file knows which architecture, and the one way from a checkpoint to its Program."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, Generic, TypeVar

import msgspec

from fourfold.errors import LoadError
from fourfold.models import gemma2, gemma3, llama, phi3, qwen2, qwen3
from fourfold.models.binding import Binding
from fourfold.models.config_fields import Fields
from fourfold.models.geometry import Geometry
from fourfold.models.quantization import UNUSED_SCALES, Fp8Scheme, fp8_scheme, with_scales
from fourfold.program.ops import Program, WeightSpec
from fourfold.weights.source import WeightSource

ConfigT = TypeVar("ConfigT")


class Family(msgspec.Struct, Generic[ConfigT], frozen=True):
    """How one family is read from both kinds of checkpoint, traced and bound."""

    from_hf: Callable[[Fields, int | None], ConfigT]
    from_gguf: Callable[[Fields, WeightSource, int | None], ConfigT]
    trace: Callable[[ConfigT], Program]
    bindings: Callable[[ConfigT, Mapping[str, WeightSpec], WeightSource], dict[str, Binding]]


class Definition(msgspec.Struct, frozen=True):
    """A checkpoint understood: the unfused Program, where each of its weights comes from, and hints.

    summary: what to log.  eos_token_ids, bos_token_id: what the config or the GGUF file names, if anything.
    """

    program: Program
    bindings: dict[str, Binding]
    summary: dict[str, str]
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None


LLAMA: Final = Family(llama.LlamaConfig.from_hf, llama.LlamaConfig.from_gguf, llama.trace, llama.bindings)
QWEN2: Final = Family(qwen2.Qwen2Config.from_hf, qwen2.Qwen2Config.from_gguf, qwen2.trace, qwen2.bindings)
QWEN3: Final = Family(qwen3.Qwen3Config.from_hf, qwen3.Qwen3Config.from_gguf, qwen3.trace, qwen3.bindings)
GEMMA2: Final = Family(
    gemma2.Gemma2Config.from_hf, gemma2.Gemma2Config.from_gguf, gemma2.trace, gemma2.bindings
)
GEMMA3: Final = Family(
    gemma3.Gemma3Config.from_hf, gemma3.Gemma3Config.from_gguf, gemma3.trace, gemma3.bindings
)
PHI3: Final = Family(phi3.Phi3Config.from_hf, phi3.Phi3Config.from_gguf, phi3.trace, phi3.bindings)

HF_MODEL_TYPES: Final[dict[str, Family[Any]]] = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "gemma3_text": GEMMA3,
    "phi3": PHI3,
}
"""config.json's model_type."""

GGUF_ARCHITECTURES: Final[dict[str, Family[Any]]] = {
    "llama": LLAMA,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "phi3": PHI3,
}
"""GGUF's general.architecture; Mistral files say "llama"."""

HARMLESS_TENSORS: Final = re.compile(
    r"rope_freqs\.weight|rope_factors_(long|short)\.weight|lm_head\.weight|.*\.rotary_emb\.inv_freq"
    r"|(model\.)?(vision_tower|multi_modal_projector)\..*"
)
"""Tensors that no weight of a Program needs: read elsewhere, tied, derived, or of the vision tower."""


def load_model_definition(source: WeightSource, max_model_len: int | None) -> Definition:
    """Read, trace and bind.

    max_model_len: longest sequence (tokens) the engine will admit, None for what the model states. It decides
    length-dependent rotary variants.

    Raises LoadError naming the file and the key for an unknown architecture (with the nearest known one), a
    missing or mistyped key, an unsupported value, and for tensors missing, misshapen or not understood.
    """
    known = GGUF_ARCHITECTURES if source.kind == "gguf" else HF_MODEL_TYPES
    key = "general.architecture" if source.kind == "gguf" else "model_type"
    top = Fields(source.path, source.metadata)
    name = top.text(key)
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        hint = f"; the nearest is {near[0]}" if near else ""
        top.fail(key, f"is {name!r}, known are {', '.join(sorted(known))}{hint}")
    family = known[name]
    if source.kind == "gguf":
        config = family.from_gguf(Fields(source.path, source.metadata, f"{name}."), source, max_model_len)
    else:
        config = family.from_hf(top, max_model_len)
    scheme = _scheme(top) if source.kind == "hf" else None
    program = family.trace(config)
    bindings = family.bindings(config, program.weights, source)
    if scheme is not None:
        bindings = with_scales(bindings, source, scheme)
    _check_shapes(program, bindings, source)
    _refuse_unbound(bindings, source, scheme)
    eos, bos = _token_hints(top, source.kind)
    return Definition(program, bindings, _summary(name, config.geometry, program), eos, bos)


def _check_shapes(program: Program, bindings: Mapping[str, Binding], source: WeightSource) -> None:
    for name, binding in bindings.items():
        need = program.weights[name].shape
        have = source.tensor(binding.source).shape
        rows = have[0] if binding.rows is None else binding.rows
        if (rows, *have[1:]) != need or binding.row_start + rows > have[0]:
            raise LoadError(
                f"{source.path}: tensor {binding.source} of shape {have} does not give {name} {need}; "
                "the file does not fit its own configuration"
            )


def _scheme(top: Fields) -> Fp8Scheme | None:
    inner = top.section("text_config")
    return fp8_scheme(top) or (fp8_scheme(inner) if inner else None)


def _refuse_unbound(bindings: Mapping[str, Binding], source: WeightSource, scheme: Fp8Scheme | None) -> None:
    used = {binding.source for binding in bindings.values()}
    used.update(binding.scale.source for binding in bindings.values() if binding.scale)
    foreign = [n for n in source.names() if n not in used and not HARMLESS_TENSORS.fullmatch(n)]
    if scheme is not None:
        foreign = [n for n in foreign if not UNUSED_SCALES.fullmatch(n)]
    if foreign:
        more = f" and {len(foreign) - 3} more" if len(foreign) > 3 else ""
        raise LoadError(
            f"{source.path}: tensors this architecture does not have: {', '.join(sorted(foreign)[:3])}{more};"
            " they may change what the model computes, so they are not ignored"
        )


def _token_hints(top: Fields, kind: str) -> tuple[tuple[int, ...], int | None]:
    if kind == "gguf":
        eos = [top.token_ids(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
        bos = top.token_ids("tokenizer.ggml.bos_token_id")
    else:
        inner = top.section("text_config")
        eos = [top.token_ids("eos_token_id"), inner.token_ids("eos_token_id") if inner else ()]
        bos = top.token_ids("bos_token_id")
    return tuple(dict.fromkeys(token for ids in eos for token in ids)), bos[0] if bos else None


def _summary(architecture: str, g: Geometry, program: Program) -> dict[str, str]:
    windows = sorted({spec.window for spec in program.kv if spec.window is not None})
    sliding = sum(spec.window is not None for spec in program.kv)
    parameters = sum(_size(spec.shape) for spec in program.weights.values())
    return {
        "architecture": architecture,
        "parameters": f"{parameters:,}",
        "layers": str(g.layers),
        "hidden size": str(g.hidden_size),
        "heads": f"{g.heads} of {g.head_dim}, {g.kv_heads} for keys and values",
        "vocabulary": str(g.vocab_size),
        "context": str(program.max_position),
        "sliding window": f"{windows[0]} tokens in {sliding} of {g.layers} layers" if windows else "none",
        **program.notes,
    }


def _size(shape: tuple[int, ...]) -> int:
    total = 1
    for extent in shape:
        total *= extent
    return total
