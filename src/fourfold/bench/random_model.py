"""A llama of random weights in any shape and format: to measure shapes of which no model is at hand.

The blocks are real ones, of normally distributed weights; each tensor is a run of one pool of blocks, from a
place of its own, so a model larger than memory takes no more than its largest tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fourfold.errors import ConfigError
from fourfold.progress import Progress, silent
from fourfold.quant.registry import get_format
from fourfold.weights.gguf_writer import write_gguf
from fourfold.weights.metadata import StringArray
from fourfold.weights.open import open_checkpoint
from fourfold.weights.source import RawTensor

FILE_TYPES = {
    "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q4_K_M": 15, "BF16": 32,
}  # fmt: skip
"""Mix, as llama-quantize names them → general.file_type, which some readers of GGUF files need."""
MIXES = tuple(FILE_TYPES)
"""The head is Q6_K in all but the floats and Q8_0."""
STANDARD_DEVIATION = 0.02
DISTINCT_ELEMENTS = 1 << 22
"""Weights drawn and encoded per format; larger tensors repeat their blocks in random order."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A llama's sizes; the default has 1.17 billion parameters (TinyLlama's, with a vocabulary of 49,152)."""

    hidden: int = 2048
    layers: int = 22
    heads: int = 32
    kv_heads: int = 4
    feed_forward: int = 5632
    context: int = 4096
    rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        if self.hidden % self.heads or self.heads % self.kv_heads:
            raise ConfigError(
                f"{self.hidden} columns in {self.heads} heads over {self.kv_heads} KV heads: each must be a "
                "multiple of the next"
            )

    def matrices(self, vocab: int) -> dict[str, tuple[int, int]]:
        """GGUF tensor name → [rows, columns]."""
        kv = self.hidden // self.heads * self.kv_heads
        found = {"token_embd.weight": (vocab, self.hidden), "output.weight": (vocab, self.hidden)}
        for i in range(self.layers):
            found |= {
                f"blk.{i}.attn_q.weight": (self.hidden, self.hidden),
                f"blk.{i}.attn_k.weight": (kv, self.hidden),
                f"blk.{i}.attn_v.weight": (kv, self.hidden),
                f"blk.{i}.attn_output.weight": (self.hidden, self.hidden),
                f"blk.{i}.ffn_gate.weight": (self.feed_forward, self.hidden),
                f"blk.{i}.ffn_up.weight": (self.feed_forward, self.hidden),
                f"blk.{i}.ffn_down.weight": (self.hidden, self.feed_forward),
            }
        return found

    def norms(self) -> list[str]:
        per_layer = [f"blk.{i}.{name}_norm.weight" for i in range(self.layers) for name in ("attn", "ffn")]
        return [*per_layer, "output_norm.weight"]

    def metadata(self, vocab: int, mix: str) -> dict[str, Any]:
        return {
            "general.architecture": "llama",
            "general.file_type": FILE_TYPES[mix],
            "general.quantization_version": 2,
            "general.name": f"random llama {self.hidden}x{self.layers}",
            "llama.block_count": self.layers,
            "llama.context_length": self.context,
            "llama.embedding_length": self.hidden,
            "llama.feed_forward_length": self.feed_forward,
            "llama.attention.head_count": self.heads,
            "llama.attention.head_count_kv": self.kv_heads,
            "llama.attention.layer_norm_rms_epsilon": 1e-5,
            "llama.rope.dimension_count": self.hidden // self.heads,
            "llama.rope.freq_base": self.rope_theta,
            "llama.vocab_size": vocab,
        }


def format_of(mix: str, name: str, layers: int) -> str:
    """The format a tensor has in a mix, by llama-quantize's rules: Q4_K_M has Q6_K where it matters most, in
    the first and last eighth of the layers and every third between."""
    if mix in ("F16", "BF16", "Q8_0"):
        return mix
    if name == "output.weight":
        return "Q6_K"
    if mix != "Q4_K_M":
        return mix
    if name.endswith(("attn_v.weight", "ffn_down.weight")):
        layer = int(name.split(".")[1])
        eighth = layers // 8
        if layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2:
            return "Q6_K"
    return "Q4_K"


def write_random_model(
    path: Path, mix: str, shape: Shape, tokenizer: Path, seed: int = 0, progress: Progress = silent
) -> None:
    """Writes a GGUF file with the tokenizer of another one.

    Raises ConfigError for an unknown mix or a width that is not whole blocks, LoadError if the tokenizer's
    file cannot be read, OSError if `path` cannot be written.
    """
    if mix not in MIXES:
        raise ConfigError(f"unknown format {mix!r}; known are {', '.join(MIXES)}")
    words = _tokenizer(tokenizer)
    vocab = len(words["tokenizer.ggml.tokens"])
    matrices = shape.matrices(vocab)
    formats = {name: format_of(mix, name, shape.layers) for name in matrices}
    rng = np.random.default_rng(seed)
    pools: dict[str, NDArray[np.uint8]] = {}
    for done, kind in enumerate(kinds := sorted(set(formats.values()))):
        progress("drawing weights", done, len(kinds), "formats")
        largest = max(_nbytes(kind, matrices[name]) for name, each in formats.items() if each == kind)
        pools[kind] = _pool(kind, largest, rng)
    tensors = []
    for name, kind in formats.items():
        block, size = get_format(kind).block_bytes, _nbytes(kind, matrices[name])
        start = int(rng.integers(0, (pools[kind].size - size) // block + 1)) * block
        tensors.append(RawTensor(name, matrices[name], kind, pools[kind][start : start + size]))
    ones = np.ones(shape.hidden, np.float32).view(np.uint8)
    tensors += [RawTensor(name, (shape.hidden,), "F32", ones) for name in shape.norms()]
    progress("writing", 0, None, "files")
    write_gguf(path, shape.metadata(vocab, mix) | words, tensors)


def _nbytes(kind: str, shape: tuple[int, int]) -> int:
    try:
        return get_format(kind).nbytes(shape)
    except ValueError as error:
        raise ConfigError(f"this shape cannot be held in {kind}: {error}") from error


def _pool(kind: str, size: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """`size` bytes of blocks."""
    block = get_format(kind)
    elements = min(DISTINCT_ELEMENTS, size // block.block_bytes * block.block)
    weights = rng.standard_normal((elements // block.block, block.block), np.float32) * STANDARD_DEVIATION
    blocks = block.encode(weights.astype(np.float32)).reshape(-1, block.block_bytes)
    return blocks[rng.integers(0, len(blocks), size // block.block_bytes)].reshape(-1)


def _tokenizer(path: Path) -> dict[str, Any]:
    """The tokenizer's keys of a GGUF file. Raises ConfigError if it has none."""
    found = {
        key: value.tolist() if isinstance(value, StringArray) else value
        for key, value in open_checkpoint(path).metadata.items()
        if key.startswith("tokenizer.")
    }
    if "tokenizer.ggml.tokens" not in found:
        raise ConfigError(f"{path}: has no tokenizer; take a GGUF file of a model with one")
    return found
