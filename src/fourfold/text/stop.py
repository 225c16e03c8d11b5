"""Stop strings in a stream of text."""

from __future__ import annotations

import re
from collections import deque
from functools import lru_cache

import msgspec

from fourfold.errors import InvalidRequestError

MAX_STOP_CHARACTERS = 32768
"""Most characters of all stop strings of a request together."""


class _Node(msgspec.Struct):
    """A prefix of one or more stop strings. fail: the longest proper suffix of it that is a prefix too."""

    depth: int
    children: dict[str, _Node] = msgspec.field(default_factory=dict)
    fail: _Node | None = None
    stop: str | None = None
    """The longest stop string that ends here."""


class StopStrings:
    """An Aho-Corasick automaton (1975) of stop strings; immutable, shared by all sequences of a request."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        total = sum(map(len, stops))
        if total > MAX_STOP_CHARACTERS:
            raise InvalidRequestError(
                f"stop has {total} characters in all; at most {MAX_STOP_CHARACTERS} are allowed", "stop"
            )
        if not all(stops):
            raise InvalidRequestError("stop has an empty string; leave it out", "stop")
        self.root = _Node(0)
        for stop in stops:
            node = self.root
            for char in stop:
                node = node.children.setdefault(char, _Node(node.depth + 1))
            node.stop = stop
        self._link()
        first = "".join(map(re.escape, self.root.children))
        self.first = re.compile(f"[{first}]") if first else None
        """Finds the characters that a stop string can begin with."""

    def _link(self) -> None:
        queue = deque([self.root])
        while queue:
            node = queue.popleft()
            for char, child in node.children.items():
                fail = node.fail
                while fail is not None and char not in fail.children:
                    fail = fail.fail
                child.fail = self.root if fail is None else fail.children[char]
                if child.stop is None:
                    child.stop = child.fail.stop
                queue.append(child)


@lru_cache(maxsize=256)
def compile_stops(stops: tuple[str, ...]) -> StopStrings:
    """Raises InvalidRequestError for an empty string or too many characters."""
    return StopStrings(stops)


class StopMatcher:
    """Passes text through until a stop string appears, holding back only what may still become one.

    The first stop string to be complete ends the text; of several complete at the same character, the
    longest. So the result does not depend on how the text was cut (design rule 6).
    """

    __slots__ = ("_held", "_node", "_stops")

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._node = stops.root
        self._held = ""

    def push(self, text: str, armed: bool = True) -> tuple[str, str | None]:
        """Text that is safe to show, and the stop string that has ended it.

        The stop string is not part of the text; nothing may be pushed after it. armed: False while stop
        strings that become complete are to be taken as ordinary text.
        """
        stops = self._stops
        if stops.first is None:
            return text, None
        root = stops.root
        node = self._node
        at = 0
        while at < len(text):
            if node is root:
                found = stops.first.search(text, at)
                if found is None:
                    at = len(text)
                    break
                at = found.start()
            char = text[at]
            at += 1
            node = _step(node, char, root)
            if node.stop is None:
                continue
            if armed:
                seen = self._held + text[:at]
                self._held = ""
                return seen[: len(seen) - len(node.stop)], node.stop
            # Ignored here; only what a longer stop string or the next one could use stays held.
            while not node.children and node.fail is not None:
                node = node.fail
        self._node = node
        seen = self._held + text
        keep = len(seen) - node.depth
        self._held = seen[keep:]
        return seen[:keep], None

    def finish(self) -> str:
        """The text held back, which no stop string can claim any more."""
        held, self._held = self._held, ""
        self._node = self._stops.root
        return held


def _step(node: _Node, char: str, root: _Node) -> _Node:
    while char not in node.children:
        if node.fail is None:
            return root
        node = node.fail
    return node.children[char]
