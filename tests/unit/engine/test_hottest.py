"""The view of the prefix cache: sizes that add up, and prefixes in the order of their hits."""

from __future__ import annotations

import pytest

from fourfold.engine import hottest
from fourfold.engine.hottest import view_tree

from .fake_backend import FakeBackend
from .helpers import make_engine, request, run

SYSTEM = list(range(10, 26))


def test_sizes_and_hits() -> None:
    engine = make_engine(FakeBackend(block_size=4, num_blocks=200))
    for user in range(6):
        run(engine, request(f"r{user}", [*SYSTEM, 60 + user, 70 + user, 1, 2, 3], max_tokens=1))
    run(engine, request("again", [*SYSTEM, 60, 70, 1, 2, 3], max_tokens=1))
    tree = view_tree(engine.cache, None)
    assert tree.complete
    assert tree.domains == 1
    # 16 shared tokens; then 5 of each of 6 prompts, of which the last block may be kept in part.
    assert 16 + 6 * 4 <= tree.tokens <= 16 + 6 * 6
    assert tree.nodes >= 4 + 6
    first = tree.hottest[0]
    assert (first.hits, first.tokens, first.head + first.tail) == (6, 16, SYSTEM)
    assert not first.pinned
    assert not first.in_use
    assert [each.hits for each in tree.hottest] == sorted((e.hits for e in tree.hottest), reverse=True)
    second = tree.hottest[1]
    assert (second.hits, (second.head + second.tail)[:18]) == (1, [*SYSTEM, 60, 70])


def test_only_the_named_domains_are_shown() -> None:
    engine = make_engine(FakeBackend(num_blocks=200))
    for salt in ("a", "b", ""):
        for n in range(2):
            run(engine, request(f"{salt}{n}", SYSTEM, salt=salt, max_tokens=1))
    assert {prefix.salt for prefix in view_tree(engine.cache, None).hottest} == {"a", "b", ""}
    for salts in (["a"], ["b"], []):
        tree = view_tree(engine.cache, salts)
        assert {prefix.salt for prefix in tree.hottest} == set(salts)
        assert tree.domains == 3


def test_a_long_prefix_shows_its_ends_and_who_uses_it() -> None:
    engine = make_engine(FakeBackend(num_blocks=200), 400)
    prompt = [n % 90 for n in range(200)]
    run(engine, request("a", prompt, max_tokens=1))
    engine.add(request("b", prompt, max_tokens=50))
    engine.step()
    (prefix, *_) = view_tree(engine.cache, None).hottest
    assert prefix.head == prompt[:32]
    assert prefix.tail == prompt[prefix.tokens - 32 : prefix.tokens]
    assert prefix.in_use


def test_a_huge_tree_is_not_walked_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(FakeBackend(num_blocks=200))
    run(engine, *(request(str(n), [n] * 12, max_tokens=1) for n in range(20)))
    monkeypatch.setattr(hottest, "MAX_WALK", 7)
    tree = view_tree(engine.cache, None)
    assert not tree.complete
    assert tree.nodes > 7
    assert tree.tokens <= 7 * 4


def test_engines_without_a_prefix_cache_have_no_tree() -> None:
    assert make_engine(prefix_caching=False).view(None).tree is None
    assert make_engine().view(None).tree is not None
