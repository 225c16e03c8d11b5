"""Tokenizers from Hugging Face directories, against the libraries that define them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from fourfold.errors import LoadError
from fourfold.text.tokenizer import load_tokenizer

from .vocabularies import bpe_metadata, spm_metadata

TEXTS = ["Hello world", " a  b", "é😀\n\n日本", "", "<s>x</s>", "Hello<|tool|> x", "x<|tool|>"]


def _byte_level() -> Tokenizer:
    metadata = bpe_metadata(("Hello", "Ġworld"))
    tokens = metadata["tokenizer.ggml.tokens"]
    library = Tokenizer(
        models.BPE(
            {token: id for id, token in enumerate(tokens)},
            [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]],
        )
    )
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<s>", "</s>"])
    library.add_tokens([AddedToken("<|tool|>", special=False, normalized=False)])
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", library.token_to_id("<s>"))]
    )
    return library


def _sentencepiece() -> Tokenizer:
    letters = ("▁", "H", "e", "l", "o", "w", "r", "d", "a", "b", "x")
    tokens = spm_metadata(letters)["tokenizer.ggml.tokens"]
    merges = [("H", "e"), ("l", "l"), ("▁", "w"), ("▁", "He")]
    tokens = [token for token in tokens if token != "  "] + [a + b for a, b in merges]
    library = Tokenizer(
        models.BPE(
            {token: id for id, token in enumerate(tokens)}, merges, unk_token="<unk>", byte_fallback=True
        )
    )
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    library.add_tokens([AddedToken("<|tool|>", special=False, normalized=False)])
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return library


def _metaspace() -> Tokenizer:
    library = _sentencepiece()
    library.normalizer = normalizers.Sequence([])
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    library.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    return library


KINDS = {"byte-level": _byte_level, "sentencepiece": _sentencepiece, "metaspace": _metaspace}


def _write(folder: Path, library: Tokenizer, **files: Any) -> Path:
    library.save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>"}}
    files = {"tokenizer_config": {"tokenizer_class": "PreTrainedTokenizerFast", **special}, **files}
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_same_as_the_library(kind: str, tmp_path: Path) -> None:
    library = KINDS[kind]()
    ours = load_tokenizer(_write(tmp_path, library))
    assert ours.vocab_size == library.get_vocab_size()
    for text in TEXTS:
        for special in (True, False):
            ids = library.encode(text, add_special_tokens=special).ids
            if text.startswith("<s>") and special:
                ids = ids[1:]  # BOS exactly once
            assert ours.encode(text, add_special_tokens=special) == ids
        if kind == "byte-level" and "<|tool|>" in text:
            # The library reads an added token's text as byte-level characters too; ours shows it as it is.
            continue
        for skip in (True, False):
            assert ours.decode(ids, skip) == library.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", KINDS)
def test_decodes_any_whole_text_as_the_library(kind: str, tmp_path: Path) -> None:
    library = KINDS[kind]()
    ours = load_tokenizer(_write(tmp_path, library))

    @settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.text(st.characters(exclude_categories=("Cs",)), max_size=12))
    def check(text: str) -> None:
        ids = library.encode(text, add_special_tokens=False).ids
        assert ours.decode(ids) == library.decode(ids)

    check()


def test_same_as_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    ours = load_tokenizer(_write(tmp_path, _byte_level()))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        assert ours.encode(text, False) == theirs.encode(text, add_special_tokens=False)
    assert (ours.bos_id, ours.eos_ids) == (theirs.bos_token_id, (theirs.eos_token_id,))
    assert ours.spec.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def test_special_tokens_as_plain_text(tmp_path: Path) -> None:
    ours = load_tokenizer(_write(tmp_path, _byte_level()))
    ids = ours.encode("a<s>b", add_special_tokens=False, parse_special=False)
    assert not set(ids) & ours.special_ids
    assert ours.decode(ids) == "a<s>b"
    assert set(ours.encode("a<s>b", add_special_tokens=False)) & ours.special_ids


def test_eos_is_the_union_of_three_files(tmp_path: Path) -> None:
    # B78: scalar in config, list in generation config.
    ours = load_tokenizer(
        _write(
            tmp_path, _byte_level(), config={"eos_token_id": 7}, generation_config={"eos_token_id": [8, 9]}
        )
    )
    assert ours.eos_ids == (7, 8, 9, _byte_level().token_to_id("</s>"))


@pytest.mark.parametrize("value", ["x", [1, None, "y"], -1, True, 1.5])
def test_bad_eos_names_file_and_key(value: object, tmp_path: Path) -> None:
    _write(tmp_path, _byte_level(), generation_config={"eos_token_id": value})
    with pytest.raises(LoadError, match=r"generation_config\.json: eos_token_id"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("add_bos", [True, False])
def test_flags_of_the_config_win(add_bos: bool, tmp_path: Path) -> None:
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": add_bos, "add_eos_token": not add_bos}
    ours = load_tokenizer(_write(tmp_path, _sentencepiece(), tokenizer_config=config))
    assert (ours.add_bos, ours.spec.suffix_ids) == (add_bos, () if add_bos else (2,))


def test_chat_templates(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    _write(tmp_path, _byte_level(), tokenizer_config={"chat_template": named})
    assert load_tokenizer(tmp_path).spec.chat_templates == {"default": "a", "tool_use": "b"}
    (tmp_path / "chat_template.jinja").write_text("c é", encoding="utf-8")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("d")
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.chat_template == "c é"
    assert tokenizer.spec.chat_templates["rag"] == "d"
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": [1]}')
    with pytest.raises(LoadError, match=r"tokenizer_config\.json: chat_template"):
        load_tokenizer(tmp_path)


def test_directories_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"has no tokenizer\.json; copy it"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0b")
    with pytest.raises(LoadError, match=r"tokenizer\.model; convert it"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(LoadError, match=r"tokenizer\.json: is not a tokenizer"):
        load_tokenizer(tmp_path)
    with pytest.raises(LoadError, match="too short for a GGUF file"):
        load_tokenizer(tmp_path / "tokenizer.json")


def test_special_token_of_a_wrong_type(tmp_path: Path) -> None:
    _write(tmp_path, _byte_level(), tokenizer_config={"bos_token": 3})
    with pytest.raises(LoadError, match=r"tokenizer_config\.json: bos_token must be a string"):
        load_tokenizer(tmp_path)


def test_unknown_decoder_is_named(tmp_path: Path) -> None:
    library = _byte_level()
    library.decoder = decoders.WordPiece()
    with pytest.raises(LoadError, match="WordPiece"):
        load_tokenizer(_write(tmp_path, library))
