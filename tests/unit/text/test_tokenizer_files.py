"""Tokenizers of real files: llama.cpp's expected ids, and transformers on the real models."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from fourfold.errors import LoadError
from fourfold.text.tokenizer import Tokenizer, load_tokenizer
from fourfold.weights.gguf import open_gguf

from .vocabularies import VOCABULARIES, model_path, real, vocabulary

SEPARATOR = "\n__ggml_vocab_test__\n"
PAIRS = ["deepseek-coder", "falcon", "gpt-2", "llama-spm", "mpt", "phi-3", "starcoder"]

TEXTS = [
    "Hello world",
    "  leading and   runs\t\ttabs\n\n\nnewlines  ",
    " x",
    "日本語のテキスト 漢字",
    "emoji 😀👩‍👩‍👧‍👦🏳️‍🌈",
    "def f(x):\n    return x ** 2  # sq\n",
    "<|im_start|>user\nhi<|im_end|>\n",
    "<start_of_turn>user\nhi<end_of_turn>\n<bos>",
    "é e\u0301 ﬁ",
    "1234567 3.14",
    "مرحبا بالعالم",
    "a" * 300,
    "",
    " ",
    "\n",
    "            deep",
    "<unk> <pad> <table><tr>",
    "\u200b\ufeffx",
    "x\x00y\x7f",
    "I'm DON'T we'Ve",
    "https://a.b/c?d=e&f=%20",
]


@pytest.mark.parametrize("name", PAIRS)
def test_ids_of_llama_cpp(name: str) -> None:
    tokenizer = vocabulary(name)
    texts = (VOCABULARIES / f"ggml-vocab-{name}.gguf.inp").read_text(encoding="utf-8").split(SEPARATOR)
    lines = (VOCABULARIES / f"ggml-vocab-{name}.gguf.out").read_text().split("\n")[: len(texts)]
    assert len(texts) == len(lines) == 47
    for text, line in zip(texts, lines, strict=True):
        assert tokenizer.encode(text, add_special_tokens=False) == [int(id) for id in line.split()], text


@pytest.mark.parametrize("name", PAIRS)
def test_decode_gives_the_text_back(name: str) -> None:
    tokenizer = vocabulary(name)
    for text in (VOCABULARIES / f"ggml-vocab-{name}.gguf.inp").read_text(encoding="utf-8").split(SEPARATOR):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_every_vocabulary_with_expected_ids_is_checked() -> None:
    if not VOCABULARIES.exists():
        pytest.skip("../shared/data/vocab is not there")
    there = {path.name[len("ggml-vocab-") : -len(".gguf")] for path in VOCABULARIES.glob("*.gguf")}
    with_ids = {name for name in there if (VOCABULARIES / f"ggml-vocab-{name}.gguf.out").exists()}
    assert with_ids - set(PAIRS) == {"bert-bge"}


def test_wordpiece_is_refused_by_name() -> None:
    with pytest.raises(LoadError, match=r"tokenizer\.ggml\.model is 'bert'"):
        vocabulary("bert-bge")


def test_a_file_without_pre_tokenizer_is_refused() -> None:
    with pytest.raises(LoadError, match=r"tokenizer\.ggml\.pre is missing"):
        vocabulary("gpt-neox")


def _transformers(path: Path):  # type: ignore[no-untyped-def]
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@pytest.mark.parametrize("name", ["smollm2", pytest.param("gemma3-270m", marks=pytest.mark.slow)])
def test_same_as_transformers(name: str) -> None:
    ours = real(name)
    theirs = _transformers(model_path(name))
    for text in TEXTS:
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=False) == ids, text
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids), text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text
    assert ours.bos_id == theirs.bos_token_id
    assert theirs.eos_token_id in ours.eos_ids


def test_what_the_real_models_name() -> None:
    smollm2, gemma = real("smollm2"), real("gemma3-270m")
    assert (smollm2.vocab_size, smollm2.bos_id, smollm2.add_bos) == (49152, 1, False)
    assert [smollm2.token_text(id) for id in smollm2.eos_ids] == ["<|endoftext|>", "<|im_end|>"]
    assert (gemma.vocab_size, gemma.bos_id, gemma.add_bos) == (262144, 2, True)
    assert [gemma.token_text(id) for id in gemma.eos_ids] == ["<eos>", "<end_of_turn>"]
    assert gemma.token_bytes(gemma.encode("  ", add_special_tokens=False)[0]) == b"  "


def test_gemma_adds_no_space_after_a_special_token() -> None:
    # B70
    gemma = real("gemma3-270m")
    text = "<start_of_turn>user\nhi<end_of_turn>there\n\n  x"
    ids = gemma.encode(text, add_special_tokens=False)
    assert gemma.decode(ids, skip_special_tokens=False) == text
    assert [gemma.token_text(id) for id in ids[:3]] == ["<start_of_turn>", "user", "\n"]


@cache
def _spellable(tokenizer: Tokenizer) -> frozenset[bytes]:
    """Single bytes that have a token; some byte-level vocabularies lack what their training text lacked."""
    return frozenset(
        tokenizer.token_bytes(id) for id in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(id)) == 1
    )


def _round_trip(tokenizer: Tokenizer, text: str) -> None:
    assume({bytes([byte]) for byte in text.encode()} <= _spellable(tokenizer))
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


# U+2581 is how SentencePiece writes a space, so it alone cannot come back as itself.
UNICODE = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="▁"), max_size=40)


@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
def test_round_trip_of_any_text(name: str) -> None:
    tokenizer = real(name)

    @settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
    @given(UNICODE)
    def check(text: str) -> None:
        _round_trip(tokenizer, text)

    check()


@pytest.mark.parametrize("name", PAIRS)
def test_round_trip_with_small_vocabularies(name: str) -> None:
    tokenizer = vocabulary(name)

    @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
    @given(UNICODE)
    def check(text: str) -> None:
        if not (name == "phi-3" and "<|" in text):
            _round_trip(tokenizer, text)

    check()


@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
def test_loads_fast(name: str, record_property) -> None:  # type: ignore[no-untyped-def]
    import time

    source = open_gguf(model_path(name))
    start = time.thread_time()
    load_tokenizer(source)
    seconds = time.thread_time() - start
    record_property("seconds", seconds)
    # Measured 0.11 and 0.13 s on a quiet core; the bound leaves room for a busy machine.
    assert seconds < 1.0
