"""A model of a vocabulary only, and a backend that says what a test wants said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fourfold.config import EngineConfig
from fourfold.engine.batch import Batch, StepResult
from fourfold.text.vocabulary import byte_alphabet
from fourfold.types import ModelInfo
from fourfold.weights.gguf_writer import write_gguf

CONTROL, NORMAL = 3, 1
SPECIALS = ["<|im_start|>", "<|im_end|>"]
NEVER = "ÿÿ"
"""A merge there has to be; these bytes follow each other in no UTF-8 text."""
EOS = 257
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class ScriptedBackend:
    """Token ids are bytes. The n-th token of an answer is the n-th byte of `script`, then EOS.

    hook: called with every batch.  seen: the prompt of every sequence, as it was computed.
    """

    def __init__(self, script: bytes, hook: Callable[[Batch], None] | None = None) -> None:
        self.block_size, self.num_blocks, self.vocab_size, self.max_batch_tokens = 16, 64, 259, 512
        self.script = script
        self.hook = hook
        self.closed = False

    def run(self, batch: Batch) -> StepResult:
        if self.hook is not None:
            self.hook(batch)
        records = batch.samples
        n, k = len(records), max([0, *records["logprobs"].tolist()])
        tokens = [int(r["target"]) if r["target"] >= 0 else self._token(int(r["counter"])) for r in records]
        return StepResult(
            token=np.array(tokens, np.int32),
            logprob=np.full(n, -0.5, np.float32),
            rank=np.ones(n, np.int32),
            top_ids=np.full((n, k), 65, np.int32),
            top_logprobs=np.full((n, k), -0.5, np.float32),
            status=np.zeros(n, np.uint8),
        )

    def _token(self, index: int) -> int:
        return self.script[index] if index < len(self.script) else EOS

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """What a block holds does not matter to the script."""

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A GGUF file whose tokens 0-255 are the bytes, with a chat template and no weights."""
    texts = {byte: char for char, byte in byte_alphabet().items()}
    path = tmp_path / "tiny.gguf"
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*(texts[byte] for byte in range(256)), *SPECIALS, NEVER],
        "tokenizer.ggml.token_type": np.array([NORMAL] * 256 + [CONTROL] * 2 + [NORMAL], np.int32),
        "tokenizer.ggml.merges": [f"{NEVER[0]} {NEVER[1]}"],
        "tokenizer.ggml.eos_token_id": EOS,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }
    write_gguf(path, metadata, [])
    return path


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ScriptedBackend]:
    """Makes every model loaded from now on answer with `script`."""

    def install(script: str, hook: Callable[[Batch], None] | None = None) -> ScriptedBackend:
        backend = ScriptedBackend(script.encode(), hook)

        def load(
            config: EngineConfig, progress: Callable[[str, float], None]
        ) -> tuple[ScriptedBackend, ModelInfo]:
            progress("loading", 0.5)
            return backend, ModelInfo(
                name=Path(config.model).stem,
                path=config.model,
                family="llama",
                parameters=0,
                vocab_size=backend.vocab_size,
                max_model_len=config.max_model_len or 512,
                block_size=backend.block_size,
                num_blocks=backend.num_blocks,
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                weight_bytes=0,
            )

        monkeypatch.setattr("fourfold.llm.load_engine_backend", load)
        return backend

    return install
