"""Pinned prefixes outlive eviction, count once where they share, and stay within what an owner may have."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.engine.cache import RadixCache
from fourfold.engine.cache.pins import MAX_PINS, Pins
from fourfold.engine.operations import CacheOutcome, ListPins, PinPrefix, UnpinPrefix
from fourfold.errors import InvalidRequestError

from .fake_backend import FakeBackend
from .helpers import check, make_engine, request, run
from .test_cache import fill, ids

SIZE = 2


def test_a_pinned_prefix_is_not_evicted() -> None:
    cache = RadixCache(8, SIZE)
    pins = Pins(cache, 0.5)
    cache.release(fill(cache, ids(1, 2, 3, 4, 5)))
    info = pins.pin("", "", "one", ids(1, 2, 3, 4, 5))
    assert (info.name, info.tokens, info.blocks) == ("one", 4, 2)
    cache.release(fill(cache, array("i", range(10, 22))))
    assert cache.known(ids(1, 2, 3, 4), "", 4) == 4
    assert pins.unpin("", "one")
    assert not pins.unpin("", "one")
    cache.release(fill(cache, array("i", range(30, 46))))
    assert cache.known(ids(1, 2, 3, 4), "", 4) == 0
    cache.check([])


def test_limits_of_all_and_of_one_owner() -> None:
    cache = RadixCache(16, SIZE)
    pins = Pins(cache, 0.5)  # 8 blocks, 4 for an owner with a name
    for owner in ("a", "b", "c"):
        cache.release(fill(cache, array("i", range(8)), owner))
    pins.pin("a", "a", "x", array("i", range(8)))
    cache.release(fill(cache, array("i", [9, 9]), "a"))
    with pytest.raises(InvalidRequestError, match="4 of the 4 blocks that this owner"):
        pins.pin("a", "a", "y", array("i", [9, 9]))
    pins.pin("b", "b", "x", array("i", range(8)))
    with pytest.raises(InvalidRequestError, match="8 of the 8 blocks that all owners"):
        pins.pin("c", "c", "x", array("i", range(8)))
    assert [info.blocks for info in pins.of("a")] == [4]
    # A pin is replaced by a shorter one of its name, and what it took is free for others.
    pins.pin("a", "a", "x", array("i", range(4)))
    assert (pins.blocks, len(pins.of("a"))) == (6, 1)
    cache.check(pins.tables())


def test_a_number_of_pins_is_the_most() -> None:
    cache = RadixCache(4, SIZE)
    pins = Pins(cache, 1.0)
    for i in range(MAX_PINS):
        pins.pin("", "", f"n{i}", ids(1, 2))
    with pytest.raises(InvalidRequestError, match="unpin one"):
        pins.pin("", "", "another", ids(1, 2))
    pins.pin("", "", "n0", ids(3, 4))


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.sampled_from("xyz"),
            st.lists(st.integers(0, 1), max_size=9),
            st.booleans(),
        ),
        max_size=30,
    )
)
@settings(deadline=None, max_examples=25)
def test_counts_are_those_of_the_distinct_prefixes(steps: list[tuple[str, str, list[int], bool]]) -> None:
    """Against a dictionary of what is pinned; salts are owners."""
    cache = RadixCache(24, SIZE)
    pins = Pins(cache, 0.5)
    model: dict[tuple[str, str], set[tuple[int, ...]]] = {}
    for owner, name, prompt, remove in steps:
        tokens = array("i", prompt)
        if remove:
            assert pins.unpin(owner, name) == (model.pop((owner, name), None) is not None)
        elif tokens:
            if cache.ledger.available >= 5:
                cache.release(fill(cache, tokens, owner))
            known = cache.known(tokens, owner, len(tokens))
            wanted = {tuple(prompt[:n]) for n in range(SIZE, known + 1, SIZE)}
            after = {**model, (owner, name): wanted}
            fits = _total(after, owner) <= 6 and _total(after) <= 12
            try:
                info = pins.pin(owner, owner, name, tokens)
            except InvalidRequestError:
                assert not fits
            else:
                assert fits
                assert info.tokens == known
                model = after
        assert pins.blocks == _total(model)
        for whose in "abc":
            assert {info.name for info in pins.of(whose)} == {n for o, n in model if o == whose}
        cache.check(pins.tables())


def _total(model: dict[tuple[str, str], set[tuple[int, ...]]], owner: str | None = None) -> int:
    distinct = {(o, p) for (o, _), found in model.items() for p in found if owner in (None, o)}
    return len(distinct)


def test_through_the_engine() -> None:
    engine = make_engine(FakeBackend(num_blocks=16), kv_pinned_share=0.5)
    prompt = list(range(12))
    run(engine, request("a", prompt, max_tokens=1), checked=False)
    made = engine.operate(PinPrefix("", "", "p", prompt))
    assert [pin.blocks for pin in made.pins] == [3]
    assert engine.stats().pinned_blocks == 3
    run(engine, *(request(f"r{i}", [50 + i] * 30, max_tokens=4) for i in range(6)), checked=False)
    (event, *_) = run(engine, request("b", prompt, max_tokens=1), checked=False)["b"]
    assert event.cached_tokens == 11
    # Another owner neither sees it nor ends it.
    for other in (ListPins("b"), UnpinPrefix("b", "p")):
        assert engine.operate(other) == CacheOutcome()
    assert [pin.name for pin in engine.operate(ListPins("")).pins] == ["p"]
    assert [pin.name for pin in engine.operate(UnpinPrefix("", "p")).pins] == ["p"]
    check(engine)
    assert engine.stats().pinned_blocks == 0
    assert engine.operate(PinPrefix("", "", "q", [2**40])).param == "prompt"
    off = make_engine(prefix_caching=False)
    assert "no prefix cache" in (off.operate(ListPins("")).refused or "")
