"""A tiny Llama with random weights and a vocabulary of bytes, as a GGUF file: no download is needed."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fourfold.text.vocabulary import byte_alphabet
from fourfold.weights.gguf_writer import write_gguf
from fourfold.weights.source import RawTensor

HIDDEN, LAYERS, HEADS, KV_HEADS, INNER, CONTEXT = 128, 2, 4, 2, 192, 512
NORMAL, CONTROL = 1, 3
EOS = 257
SPECIALS = ["<|im_start|>", "<|im_end|>"]
NEVER = "ÿÿ"
"""A merge there has to be; these bytes follow each other in no UTF-8 text."""
ROWS = 288
"""Rows of the logits; ids from 259 on have no token (as in Qwen's files)."""
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('system must come first') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny_model(
    path: Path,
    seed: int = 0,
    *,
    more_specials: tuple[str, ...] = (),
    template: str = TEMPLATE,
    context: int = CONTEXT,
) -> Path:
    texts = {byte: char for char, byte in byte_alphabet().items()}
    specials = [*SPECIALS, *more_specials]
    tokens = [*(texts[byte] for byte in range(256)), *specials, NEVER]
    kinds = [NORMAL] * 256 + [CONTROL] * len(specials) + [NORMAL]
    padding = ROWS - len(tokens)
    metadata = {
        "general.architecture": "llama",
        "general.name": "tiny",
        "llama.context_length": context,
        "llama.embedding_length": HIDDEN,
        "llama.block_count": LAYERS,
        "llama.feed_forward_length": INNER,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "llama.rope.dimension_count": HIDDEN // HEADS,
        "llama.vocab_size": ROWS,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*tokens, *(f"[PAD{i}]" for i in range(padding))],
        "tokenizer.ggml.token_type": np.array([*kinds, *([5] * padding)], np.int32),
        "tokenizer.ggml.merges": [f"{NEVER[0]} {NEVER[1]}"],
        "tokenizer.ggml.eos_token_id": EOS,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": template,
    }
    random = np.random.default_rng(seed)

    def tensor(name: str, *shape: int) -> RawTensor:
        values = random.standard_normal(shape)
        values = values / np.sqrt(shape[-1]) if len(shape) == 2 else 1 + 0.1 * values
        return RawTensor(name, shape, "F32", values.astype(np.float32).reshape(-1).view(np.uint8))

    head = HIDDEN // HEADS
    tensors = [
        tensor("token_embd.weight", ROWS, HIDDEN),
        tensor("output.weight", ROWS, HIDDEN),
        tensor("output_norm.weight", HIDDEN),
    ]
    for layer in range(LAYERS):
        shapes: dict[str, tuple[int, ...]] = {
            "attn_norm": (HIDDEN,), "attn_q": (HIDDEN, HIDDEN), "attn_k": (KV_HEADS * head, HIDDEN),
            "attn_v": (KV_HEADS * head, HIDDEN), "attn_output": (HIDDEN, HIDDEN), "ffn_norm": (HIDDEN,),
            "ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN), "ffn_down": (HIDDEN, INNER),
        }  # fmt: skip
        tensors += [tensor(f"blk.{layer}.{name}.weight", *shape) for name, shape in shapes.items()]
    write_gguf(path, metadata, tensors)
    return path
