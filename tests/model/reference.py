"""The oracle: transformers in fp32 on the dequantized weights of a GGUF file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers


class Transformers:
    def __init__(self, path: Path) -> None:
        config: dict[str, Any] = {}
        if hasattr(transformers, "GgufConfig"):  # since 5.0 a GGUF file stays packed unless told otherwise
            config["quantization_config"] = transformers.GgufConfig(dequantize=True)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="sdpa", **config
        )
        assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
        self._model = model.eval()

    @torch.no_grad()
    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """fp32 [tokens, vocab]."""
        found: torch.Tensor = self._model(torch.tensor([list(ids)]), use_cache=False).logits[0]
        return found


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logits.double(), -1)
