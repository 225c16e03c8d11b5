"""The event parser gives the same events however the bytes are cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.bench.load.sse import EventParser

STREAM = (
    b": a comment\r\n\r\ndata: one\n\ndata:two\r\ndata:  lines\r\n\r\n"
    b"event: x\rdata: \xc3\xa9\r\rid: 3\n\ndata\n\ndata: [DONE]\n\ndata: unfinished"
)
EVENTS = [b"one", b"two\n lines", b"\xc3\xa9", b"", b"[DONE]"]


def parse(pieces: list[bytes]) -> list[bytes]:
    parser = EventParser()
    return [event for piece in pieces for event in parser.feed(piece)]


def test_whole() -> None:
    assert parse([STREAM]) == EVENTS


@given(st.lists(st.integers(0, len(STREAM)), max_size=20))
def test_any_cut(cuts: list[int]) -> None:
    edges = sorted([0, *cuts, len(STREAM)])
    assert parse([STREAM[a:b] for a, b in itertools.pairwise(edges)]) == EVENTS


@given(
    st.lists(st.binary(max_size=12).map(lambda b: b.translate(None, b"\r\n")), max_size=6),
    st.sampled_from([b"\n", b"\r\n", b"\r"]),
    st.data(),
)
def test_round_trip(payloads: list[bytes], newline: bytes, data: st.DataObject) -> None:
    stream = b"".join(b"data: " + payload + newline * 2 for payload in payloads)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=8))
    edges = sorted([0, *cuts, len(stream)])
    assert parse([stream[a:b] for a, b in itertools.pairwise(edges)]) == payloads


@pytest.mark.parametrize("stream", [b"", b"\n\n\n", b": only comments\n\n", b"event: end\n\n"])
def test_no_events(stream: bytes) -> None:
    assert parse([stream]) == []
