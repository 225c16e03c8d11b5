"""Design rule 3 by structure: what one salt looks up touches no node of another's tree, so neither a hit nor
the time of a miss can tell what is in it."""

from __future__ import annotations

from array import array
from typing import Any, NoReturn

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.engine.cache import RadixCache, Unknown
from fourfold.engine.cache.node import Node
from fourfold.engine.cache.pins import Pins

from .test_cache import fill

SIZE = 2
PROMPTS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=4)


class _Wired(Node):
    """A node that must not be looked at."""

    __slots__ = ()

    def __getattribute__(self, name: str) -> NoReturn:
        raise AssertionError(f"a lookup read {name!r} of another tenant's node")


def _wire(cache: RadixCache, salt: str) -> list[Node]:
    nodes = [node for root in cache.roots if root.salt == salt for node in (root, *root.walk())]
    for node in nodes:
        node.__class__ = _Wired
    return nodes


def _unwire(nodes: list[Node]) -> None:
    for node in nodes:
        object.__setattr__(node, "__class__", Node)


def _place(unknown: Unknown | None) -> tuple[int, bytes] | None:
    """Without the identity of a node, which differs between two caches."""
    return None if unknown is None else (unknown.start, unknown.key)


def test_the_wire_works() -> None:
    cache = RadixCache(64, SIZE)
    fill(cache, array("i", [1, 2, 3]), "a")
    assert _wire(cache, "a")
    with pytest.raises(AssertionError, match="another tenant"):
        cache.match(array("i", [1, 2, 3]), "a", 3)


@given(PROMPTS, PROMPTS, st.booleans())
@settings(deadline=None, max_examples=50)
def test_no_lookup_touches_another_salt_s_tree(
    theirs: list[list[int]], own: list[list[int]], live: bool
) -> None:
    """Each lookup, and all that follows a miss while there is room."""
    cache = RadixCache(256, SIZE)
    for prompt in theirs:
        table = fill(cache, array("i", prompt), "a")
        if not live:
            cache.release(table)
    nodes = _wire(cache, "a")
    pins = Pins(cache, 1.0)
    alone = RadixCache(256, SIZE)
    for prompt in (*theirs, *own):
        tokens = array("i", prompt)
        seen: list[Any] = []
        for each in (cache, alone):
            table = each.match(tokens, "b", len(tokens) - 1)
            gained = each.extend(table, tokens, len(tokens) - 1)
            seen.append(
                (
                    each.known(tokens, "b", len(tokens)),
                    list(each.lower_digests(tokens, "b", len(tokens))),
                    _place(each.next_unknown(None, tokens, "b")),
                    len(table.blocks),
                    gained,
                    each.extend_in_block(table, tokens, len(tokens) - 1),
                )
            )
            each.release(table)
        assert seen[0] == seen[1], "what another has changes what is found"
        for each in (cache, alone):
            each.release(fill(each, tokens, "b"))
    pins.pin("b", "b", "name", array("i", theirs[0]))
    pins.unpin("b", "name")
    _unwire(nodes)
