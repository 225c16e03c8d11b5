"""Detokenizer, stop strings and output processor: the same for every cut of the same tokens."""

from __future__ import annotations

import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.errors import InvalidRequestError
from fourfold.text.detokenizer import Detokenizer
from fourfold.text.output import MIN_LOGPROB, Delta, OutputProcessor
from fourfold.text.stop import MAX_STOP_CHARACTERS, StopMatcher, StopStrings
from fourfold.text.tokenizer import Tokenizer
from fourfold.types import FinishReason, SamplingParams, TokenLogprob

from .vocabularies import bpe_metadata, make, small_bpe, small_spm

TOKENIZERS = [small_bpe, small_spm]


@st.composite
def cuts(draw: st.DrawFn, things: st.SearchStrategy[list[int]]) -> list[list[int]]:
    """A list cut into pieces at any places, empty pieces included."""
    whole = draw(things)
    places = sorted(draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    return [whole[a:b] for a, b in zip([0, *places], [*places, len(whole)], strict=True)]


IDS = st.lists(st.one_of(st.integers(0, 260), st.sampled_from(list("é😀 日".encode()))), max_size=40)


def _as_tokens(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    return [id % tokenizer.vocab_size for id in ids]


@pytest.mark.parametrize("make_tokenizer", TOKENIZERS)
@pytest.mark.parametrize("skip", [True, False])
def test_pieces_joined_are_the_whole(make_tokenizer, skip: bool) -> None:  # type: ignore[no-untyped-def]
    tokenizer = make_tokenizer()

    @settings(max_examples=300, deadline=None)
    @given(cuts(IDS))
    def check(pieces: list[list[int]]) -> None:
        ids = [id for piece in pieces for id in piece]
        shown = [id for id in ids if not (skip and id in tokenizer.special_ids)]
        data = b"".join(map(tokenizer.token_bytes, shown))
        if tokenizer.spec.strip_leading_space:
            data = data.removeprefix(b" ")
        detokenizer = Detokenizer(tokenizer, skip)
        texts = [detokenizer.push(piece) for piece in pieces]
        assert "".join([*texts, detokenizer.finish()]) == data.decode("utf-8", "replace")
        assert tokenizer.decode(ids, skip) == data.decode("utf-8", "replace")

    check()


@pytest.mark.parametrize("make_tokenizer", TOKENIZERS)
def test_never_half_a_character(make_tokenizer) -> None:  # type: ignore[no-untyped-def]
    # B05
    tokenizer = make_tokenizer()

    @settings(max_examples=100, deadline=None)
    @given(st.text(st.characters(exclude_categories=("Cs",), exclude_characters="▁\ufffd"), max_size=20))
    def check(text: str) -> None:
        detokenizer = Detokenizer(tokenizer)
        pieces = [detokenizer.push([id]) for id in tokenizer.encode(text, False, parse_special=False)]
        assert not any("\ufffd" in piece for piece in pieces)
        assert detokenizer.finish() == ""
        assert "".join(pieces) == text

    check()


@pytest.mark.parametrize("make_tokenizer", TOKENIZERS)
@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_character_cut_at_the_end_is_replaced_once(make_tokenizer, length: int) -> None:  # type: ignore[no-untyped-def]
    tokenizer = make_tokenizer()
    ids = [id for id in tokenizer.encode("😀", False) if tokenizer.token_bytes(id) != b" "][:length]
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(ids) == ""
    assert detokenizer.finish() == "\ufffd"


def test_the_first_space() -> None:
    # B07
    bpe, spm = small_bpe(), small_spm()
    world = bpe.encode(" world", False)
    assert bpe.decode(world) == " world"
    ids = [id for id in range(spm.vocab_size) if spm.token_text(id) in ("▁H", "▁w", "▁")]
    assert spm.decode(ids) == "".join(spm.token_text(id) for id in ids).replace("▁", " ")[1:]
    assert Detokenizer(spm, keep_leading_space=True).push(ids)[0] == " "


def test_each_piece_is_new_text_only() -> None:
    # B08
    tokenizer = small_bpe()
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push([id]) for id in tokenizer.encode("Hello world", False)] == ["Hello", " world"]


def test_a_token_costs_the_same_early_and_late() -> None:
    tokenizer = small_bpe()
    ids = tokenizer.encode("Hello world " * 4, False)

    def seconds(detokenizer: Detokenizer) -> float:
        start = time.thread_time()
        for id in ids * 20:
            detokenizer.push((id,))
        return time.thread_time() - start

    detokenizer = Detokenizer(tokenizer)
    seconds(detokenizer)
    early = min(seconds(detokenizer) for _ in range(5))
    detokenizer.push(ids * 20_000)
    late = min(seconds(detokenizer) for _ in range(5))
    assert late < 5 * early + 1e-3


STOPS = st.lists(st.text("abc", min_size=1, max_size=4), max_size=4)


def _expected(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The definition: the stop string complete first, the longest of those."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@settings(max_examples=500, deadline=None)
@given(STOPS, cuts(st.lists(st.sampled_from([97, 98, 99, 100]), max_size=30)))
def test_stop_strings_for_every_cut(stops: list[str], pieces: list[list[int]]) -> None:
    texts = ["".join(map(chr, piece)) for piece in pieces]
    matcher = StopMatcher(StopStrings(tuple(stops)))
    shown = ""
    stopped = None
    seen = ""
    for text in texts:
        out, stopped = matcher.push(text)
        seen += text
        shown += out
        if stopped is not None:
            break
        # Nothing is held back but what may still become a stop string, and all of that is.
        held = seen[len(shown) :]
        longest = max((n for stop in stops for n in range(len(stop)) if seen.endswith(stop[:n])), default=0)
        assert len(held) == longest
    if stopped is None:
        shown += matcher.finish()
    assert (shown, stopped) == _expected("".join(texts), stops)


def test_no_letter_of_a_stop_string_is_shown() -> None:
    # B01
    matcher = StopMatcher(StopStrings(("ABCDEFG",)))
    assert [matcher.push(text) for text in ("xA", "BC", "DEx")] == [("x", None), ("", None), ("ABCDEx", None)]
    assert [matcher.push(text) for text in ("AB", "CDEF", "Gz")] == [("", None), ("", None), ("", "ABCDEFG")]


def test_a_stop_string_that_never_comes_changes_nothing() -> None:
    # B02
    matcher = StopMatcher(StopStrings(("zzzz",)))
    assert [matcher.push(text)[0] for text in ("<think>", "fuzz", "y", " z")] == ["<think>", "fu", "zzy", " "]
    assert matcher.finish() == "z"


@pytest.mark.parametrize("stops", [("",), ("a" * MAX_STOP_CHARACTERS, "b")])
def test_bad_stop_strings(stops: tuple[str, ...]) -> None:
    with pytest.raises(InvalidRequestError, match="stop has"):
        StopStrings(stops)


def _run(
    tokenizer: Tokenizer,
    sampling: SamplingParams,
    pieces: list[list[int]],
    reason: FinishReason,
    eos: tuple[int, ...],
) -> tuple[str, list[int], Delta]:
    processor = OutputProcessor(tokenizer, sampling, eos)
    text, taken, delta = "", [], Delta("", [])
    for index, piece in enumerate(pieces):
        delta = processor.feed(piece, finished=reason if index == len(pieces) - 1 else None)
        text += delta.text
        taken += delta.token_ids
        if delta.done:
            break
    assert processor.num_tokens == len(taken)
    return text, taken, delta


@settings(max_examples=400, deadline=None)
@given(
    cuts(st.lists(st.one_of(st.integers(97, 101), st.integers(0, 258)), min_size=1, max_size=30)),
    st.lists(st.text("abcde", min_size=1, max_size=3), max_size=3),
    st.booleans(),
    st.integers(0, 6),
    st.booleans(),
    st.sampled_from(["length", "stop"]),
)
def test_output_is_the_same_for_every_cut(
    pieces: list[list[int]],
    stops: list[str],
    include: bool,
    min_tokens: int,
    skip: bool,
    reason: FinishReason,
) -> None:
    tokenizer = small_bpe()
    ids = [id for piece in pieces for id in piece]
    pieces = [*pieces[:-1], pieces[-1]] if pieces[-1] else [*pieces[:-1], [ids[-1]]]
    ids = [id for piece in pieces for id in piece]
    sampling = SamplingParams(
        stop=tuple(stops),
        include_stop_str_in_output=include,
        min_tokens=min_tokens,
        skip_special_tokens=skip,
        max_tokens=None,
        stop_token_ids=(100,),
    )
    whole = _run(tokenizer, sampling, [ids], reason, (256,))
    cut = _run(tokenizer, sampling, pieces, reason, (256,))
    assert whole[:2] == cut[:2]
    assert (whole[2].finish_reason, whole[2].stop_reason) == (cut[2].finish_reason, cut[2].stop_reason)
    assert cut[2].done


def _feed_all(
    sampling: SamplingParams, text: str, reason: FinishReason, last: list[int], eos: list[int]
) -> Delta:
    tokenizer = small_bpe()
    return OutputProcessor(tokenizer, sampling, eos).feed(
        tokenizer.encode(text, False) + last, finished=reason
    )


def test_eos_is_not_shown() -> None:
    eos = small_bpe().eos_ids
    for skip in (True, False):
        delta = _feed_all(SamplingParams(skip_special_tokens=skip), "Hello", "stop", [eos[0]], list(eos))
        assert (delta.text, delta.finish_reason, delta.stop_reason, delta.done) == (
            "Hello",
            "stop",
            None,
            True,
        )
        assert delta.token_ids[-1] == eos[0]


def test_stop_token_is_named_and_not_shown() -> None:
    x = small_bpe().encode("x", False)[0]
    delta = _feed_all(SamplingParams(stop_token_ids=(x,)), "Hello", "stop", [x], [])
    assert (delta.text, delta.stop_reason) == ("Hello", x)
    delta = _feed_all(
        SamplingParams(stop_token_ids=(x,), include_stop_str_in_output=True), "Hello", "stop", [x], []
    )
    assert (delta.text, delta.stop_reason) == ("Hellox", x)


def test_ignored_eos_is_text_like_any_other() -> None:
    eos = small_bpe().eos_ids
    sampling = SamplingParams(ignore_eos=True, skip_special_tokens=False)
    delta = _feed_all(sampling, "Hello", "length", [eos[1]], list(eos))
    assert (delta.text, delta.finish_reason) == ("Hello<|im_end|>", "length")


def test_stop_string_ends_before_the_engine_does() -> None:
    tokenizer = small_bpe()
    processor = OutputProcessor(tokenizer, SamplingParams(stop=("lo wo",)), ())
    first = processor.feed(tokenizer.encode("Hello", False))
    assert (first.text, first.done) == ("Hel", False)
    second = processor.feed(tokenizer.encode(" world the", False))
    assert (second.text, second.done, second.finish_reason, second.stop_reason) == ("", True, "stop", "lo wo")
    assert second.token_ids == tokenizer.encode(" world", False)
    assert processor.feed([1, 2], finished="abort") == Delta("", [], done=True)


def test_stop_string_in_the_output_on_request() -> None:
    sampling = SamplingParams(stop=("lo",), include_stop_str_in_output=True)
    assert _feed_all(sampling, "Hello world", "length", [], []).text == "Hello"


def test_stop_strings_wait_for_min_tokens() -> None:
    tokenizer = make(bpe_metadata())
    ids = tokenizer.encode("abab", False)
    for min_tokens, text in ((0, "a"), (1, "a"), (2, "aba"), (3, "aba"), (4, "abab")):
        processor = OutputProcessor(tokenizer, SamplingParams(stop=("b",), min_tokens=min_tokens), ())
        assert processor.feed(ids, finished="length").text == text


def test_logprobs_carry_text_bytes_and_offset() -> None:
    tokenizer = small_bpe()
    ids = tokenizer.encode("Hello é", False)
    entries = [
        TokenLogprob(id, -float(n), n + 1, ((ids[0], -0.5), (ids[1], -math.inf))) for n, id in enumerate(ids)
    ]
    delta = OutputProcessor(tokenizer, SamplingParams(), (), text_offset=10).feed(ids, entries, "length")
    assert delta.logprobs is not None
    assert [info.token for info in delta.logprobs] == ["Hello", " ", "\ufffd", "\ufffd"]
    assert b"".join(bytes(info.bytes) for info in delta.logprobs) == "Hello é".encode()
    assert [info.text_offset for info in delta.logprobs] == [10, 15, 16, 16]
    assert [info.rank for info in delta.logprobs] == [1, 2, 3, 4]
    # B24: no infinity reaches the JSON.
    assert [(top.token, top.logprob) for top in delta.logprobs[0].top] == [
        ("Hello", -0.5),
        (" ", MIN_LOGPROB),
    ]


def test_logprobs_end_with_the_stop_string() -> None:
    tokenizer = small_bpe()
    ids = tokenizer.encode("Hello world the", False)
    delta = OutputProcessor(tokenizer, SamplingParams(stop=("wor",)), ()).feed(
        ids, [TokenLogprob(id, 0.0, 1) for id in ids]
    )
    assert delta.logprobs is not None
    assert [info.token_id for info in delta.logprobs] == delta.token_ids == ids[:2]


def test_a_token_takes_microseconds() -> None:
    tokenizer = small_bpe()
    ids = tokenizer.encode("Hello world the " * 500, False)
    processor = OutputProcessor(tokenizer, SamplingParams(stop=("never", "ever", "<|")), tokenizer.eos_ids)
    start = time.thread_time()
    for id in ids:
        processor.feed([id])
    # About 3 microseconds on the reference machine; the bound leaves room for a busy one.
    assert (time.thread_time() - start) / len(ids) < 100e-6
