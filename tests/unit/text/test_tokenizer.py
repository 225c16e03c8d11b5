"""Tokenizers over small vocabularies made here."""

from __future__ import annotations

import heapq
import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.errors import InvalidRequestError, LoadError
from fourfold.text.pretokenizers import PRE_TOKENIZERS

from .vocabularies import bpe_metadata, make, small_bpe, small_spm, spm_metadata


def test_bos_exactly_once() -> None:
    # B69: a template prints BOS and the tokenizer adds it.
    tokenizer = make(spm_metadata(("▁", "a")))
    assert tokenizer.add_bos
    assert tokenizer.encode("a") == [1, *tokenizer.encode("a", add_special_tokens=False)]
    assert tokenizer.encode("<s>a").count(1) == 1
    assert tokenizer.encode("<s>a", add_special_tokens=False).count(1) == 1
    assert tokenizer.encode("a", add_special_tokens=False).count(1) == 0


def test_bos_written_as_text_is_not_bos() -> None:
    tokenizer = make(spm_metadata(("▁", "<", "s", ">")))
    ids = tokenizer.encode("<s>", parse_special=False)
    assert ids.count(1) == 1
    assert tokenizer.decode(ids) == "<s>"


@pytest.mark.parametrize("parse_special", [True, False])
def test_special_tokens_in_the_text(parse_special: bool) -> None:
    for tokenizer, text in ((small_bpe(), "<|im_start|>Hello<|im_end|>"), (small_spm(), "<s>Hello</s>")):
        ids = tokenizer.encode(text, add_special_tokens=False, parse_special=parse_special)
        assert bool(set(ids) & tokenizer.special_ids) == parse_special
        if not parse_special:
            assert tokenizer.decode(ids) == text


def test_user_defined_tokens_are_matched_even_when_special_ones_are_not() -> None:
    tokenizer = make(spm_metadata(("▁", "x"), add_space_prefix=False))
    assert [tokenizer.token_text(id) for id in tokenizer.encode("x  x", False, parse_special=False)] == [
        "x",
        "  ",
        "x",
    ]


def test_longest_special_token_wins() -> None:
    metadata = spm_metadata(("▁", "x"), add_space_prefix=False)
    metadata["tokenizer.ggml.tokens"] += ["<a>", "<a>b", "<a"]
    metadata["tokenizer.ggml.token_type"] = np.append(metadata["tokenizer.ggml.token_type"], [3, 3, 3])
    count = len(metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.scores"] = np.zeros(count, np.float32)
    tokenizer = make(metadata)
    ids = tokenizer.encode("<a>b<a>x<a", add_special_tokens=False)
    assert [tokenizer.token_text(id) for id in ids] == ["<a>b", "<a>", "x", "<a"]


def test_space_prefix_is_put_and_taken_away_again() -> None:
    tokenizer = make(spm_metadata(("▁", "a", "▁a")))
    assert [tokenizer.token_text(id) for id in tokenizer.encode("a", add_special_tokens=False)] == ["▁a"]
    for text in ("a", " a", "  a", "   a", ""):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_without_space_prefix_nothing_is_stripped() -> None:
    tokenizer = make(spm_metadata(("▁", "a", "▁a"), add_space_prefix=False))
    assert tokenizer.decode(tokenizer.encode(" a")) == " a"


def test_characters_without_token_become_bytes_or_unknown() -> None:
    tokenizer = small_spm()
    assert b"".join(tokenizer.token_bytes(id) for id in tokenizer.encode("é", False)[1:]) == "é".encode()
    metadata = spm_metadata(("▁", "a"))
    metadata["tokenizer.ggml.token_type"] = np.array(
        [2, 3, 3] + [1] * (len(metadata["tokenizer.ggml.tokens"]) - 3)
    )
    assert make(metadata).encode("éa", add_special_tokens=False).count(0) == 1


def test_placeholders_at_the_end_are_no_tokens() -> None:
    # B33: logits may have more rows than there are tokens.
    metadata = bpe_metadata()
    size = len(metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.tokens"] += [f"[PAD{n}]" for n in range(13)]
    metadata["tokenizer.ggml.token_type"] = np.append(metadata["tokenizer.ggml.token_type"], [5] * 13)
    tokenizer = make(metadata)
    assert tokenizer.vocab_size == size
    with pytest.raises(
        InvalidRequestError, match=f"token id {size} does not exist; ids run from 0 to {size - 1}"
    ):
        tokenizer.decode([size])


@pytest.mark.parametrize("id", [-1, 2**32 - 1, 10**30])
def test_ids_without_token_are_refused(id: int) -> None:
    # B16
    for tokenizer in (small_bpe(), small_spm()):
        for use in (
            tokenizer.token_bytes,
            tokenizer.token_text,
            lambda id, tokenizer=tokenizer: tokenizer.check_ids([id]),
        ):
            with pytest.raises(InvalidRequestError, match=f"token id {id} does not exist"):
                use(id)


def test_lone_surrogate_is_an_invalid_request() -> None:
    for tokenizer in (small_bpe(), small_spm()):
        with pytest.raises(InvalidRequestError, match=r"lone surrogate.*at character 1"):
            tokenizer.encode("a\ud800")


def test_eos_is_a_union() -> None:
    # B78, for GGUF: named ids, and control tokens known to end a turn.
    metadata = bpe_metadata(eot_token_id=4, eom_token_id=5)
    tokenizer = make(metadata)
    names = ["<|endoftext|>", "<|im_end|>"]
    assert tokenizer.eos_ids == (4, 5, *(metadata["tokenizer.ggml.tokens"].index(name) for name in names))


BAD = [
    ("model", None, "is missing"),
    ("model", "t5", "'t5'"),
    ("tokens", None, "is missing"),
    ("tokens", [1, 2], "must be an array of strings"),
    ("tokens", [], "is empty"),
    ("token_type", None, "is missing"),
    ("token_type", np.zeros(4, np.float32), "must be an array of integers"),
    ("token_type", np.zeros(4, np.int32), "has 4 entries"),
    ("token_type", np.full(261, 9), "the type 9"),
    ("token_type", np.full(261, 5), "every token as unused"),
    ("bos_token_id", "one", "must be an integer"),
    ("bos_token_id", 2**31, "is 2147483648, but token ids run from 0 to"),
    ("eos_token_id", -1, "is -1"),
    ("add_bos_token", 1, "must be true or false"),
]
BAD_BPE = [
    ("pre", None, "is missing"),
    ("pre", "nobody-knows", "'nobody-knows'"),
    ("merges", None, "is missing"),
    ("merges", ["nospace"], "'nospace' is not two tokens"),
    ("merges", ["a b", "x notatoken"], "merges does not fit"),
]
BAD_SPM = [
    ("scores", None, "is missing"),
    ("scores", np.zeros(4, np.int32), "must be an array of floats"),
    ("scores", np.zeros(4, np.float32), "has 4 entries"),
    ("scores", np.full(261, np.nan, np.float32), "is not finite for token 0"),
    ("add_space_prefix", "yes", "must be true or false"),
]


@pytest.mark.parametrize("key,value,message", BAD + BAD_BPE)
def test_bad_bpe_metadata_names_the_key(key: str, value: object, message: str) -> None:
    # B75
    metadata = bpe_metadata(("ab", "x"))
    assert len(metadata["tokenizer.ggml.tokens"]) == 260
    if isinstance(value, np.ndarray) and len(value) == 261:
        value = value[:260]
    _check_bad(metadata, key, value, message)


@pytest.mark.parametrize("key,value,message", BAD + BAD_SPM)
def test_bad_spm_metadata_names_the_key(key: str, value: object, message: str) -> None:
    metadata = spm_metadata(("▁",))
    assert len(metadata["tokenizer.ggml.tokens"]) == 261
    _check_bad(metadata, key, value, message)


def _check_bad(metadata: dict[str, object], key: str, value: object, message: str) -> None:
    metadata.pop(f"tokenizer.ggml.{key}", None)
    if value is not None:
        metadata[f"tokenizer.ggml.{key}"] = value
    with pytest.raises(LoadError) as error:
        make(metadata)
    assert f"tokenizer.ggml.{key}" in str(error.value)
    assert message in str(error.value)


def test_a_byte_token_that_names_no_byte() -> None:
    with pytest.raises(LoadError, match=r"tokenizer\.ggml\.tokens has '<unk>' as byte token 0"):
        make(spm_metadata(("▁",), token_type=np.full(261, 6)))


def test_add_bos_without_bos_names_the_key() -> None:
    with pytest.raises(LoadError, match=r"made\.gguf: tokenizer\.ggml\.bos_token_id is missing"):
        make(bpe_metadata(bos_token_id=None, add_bos_token=True))


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_every_pre_tokenizer_keeps_the_text(name: str) -> None:
    tokenizer = make(bpe_metadata(("Hello", "Ġworld"), pre=name))
    text = "Hello world's  12345 —\n\n  IMGIMGAZ <sentinel:1>　DON'T ABCdef 日本 \r\n\t é?!"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize(
    "name,text,words",
    [
        # Cut by hand from the published patterns.
        ("gpt-2", "it's 123  x", ["it", "'s", "Ġ123", "Ġ", "Ġx"]),
        ("smollm", "a 123", ["a", "Ġ", "1", "2", "3"]),
        ("llama-bpe", "x12345 IT'S", ["x", "123", "45", "ĠIT", "'S"]),
        ("qwen2", "x12 .y", ["x", "1", "2", "Ġ.", "y"]),
        ("gpt-4o", "fooBarBAZ's", ["foo", "Bar", "BAZ's"]),
        ("tekken", "fooBar 12", ["foo", "Bar", "Ġ", "1", "2"]),
        ("deepseek-v3", "1234\n\n.ab", ["123", "4", "ĊĊ", ".ab"]),
    ],
)
def test_words_of_pre_tokenizers(name: str, text: str, words: list[str]) -> None:
    from tokenizers import Regex, pre_tokenizers

    steps = [pre_tokenizers.Split(Regex(p), "isolated") for p in PRE_TOKENIZERS[name].patterns]
    splitter = pre_tokenizers.Sequence(
        [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    found = [word for word, _ in splitter.pre_tokenize_str(text)]
    assert found == words


def test_a_whole_word_is_taken_before_merging_where_the_family_does_so() -> None:
    # Llama 3 has tokens its merges do not make.
    metadata = bpe_metadata(("ab",))
    metadata["tokenizer.ggml.tokens"].append("xyz")
    metadata["tokenizer.ggml.token_type"] = np.append(metadata["tokenizer.ggml.token_type"], 1)
    whole = len(metadata["tokenizer.ggml.tokens"]) - 1
    assert make({**metadata, "tokenizer.ggml.pre": "llama-bpe"}).encode("xyz", False) == [whole]
    assert whole not in make({**metadata, "tokenizer.ggml.pre": "qwen2"}).encode("xyz", False)


def _reference_spm(words: tuple[str, ...], text: str) -> list[str]:
    """The definition: merge the best pair, leftmost first, again and again."""
    rank = {word: index for index, word in enumerate(words)}
    symbols = list(text.replace(" ", "▁"))
    while True:
        pairs = [(rank[a + b], at) for at, (a, b) in enumerate(pairwise(symbols)) if a + b in rank]
        if not pairs:
            return symbols
        _, at = heapq.nsmallest(1, pairs)[0]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]


WORDS = ("▁", "a", "b", "c", "ab", "bc", "▁a", "aa", "abc", "▁ab", "▁▁", "aab", "cab", "bb", "▁b")


@settings(max_examples=300, deadline=None)
@given(st.text("abc ", max_size=24))
def test_spm_merging_is_the_definition(text: str) -> None:
    text = text.replace("  ", " ")  # two spaces are a user-defined token here
    if "  " in text:
        return
    tokenizer = _abc()
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert [tokenizer.token_text(id) for id in ids] == _reference_spm(WORDS, text)


_ABC = make(spm_metadata(WORDS, add_space_prefix=False))


def _abc():  # type: ignore[no-untyped-def]
    return _ABC


def test_spm_is_not_quadratic() -> None:
    tokenizer = _abc()

    def seconds(length: int) -> float:
        start = time.thread_time()
        tokenizer.encode("ab" * length)
        return time.thread_time() - start

    seconds(1000)
    # A quadratic method would take 10,000 times as long for 100 times the text.
    assert seconds(200_000) < 1000 * max(seconds(2000), 1e-4)
