"""Who asks what, in rounds: the requests of a round arrive together, the next round when all are answered."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from fourfold.bench.kv.backend import VOCABULARY
from fourfold.errors import ConfigError

TRACE_BLOCK = 512
"""Tokens that one hash id of a Mooncake trace stands for."""


@dataclass(frozen=True, slots=True)
class Ask:
    prompt: list[int]
    max_tokens: int


class Workload(Protocol):
    @property
    def name(self) -> str: ...

    def rounds(self) -> Iterator[list[Ask]]: ...

    def answered(self, answers: Sequence[list[int]]) -> None:
        """What the requests of the last round got, in their order."""
        ...


class Agents:
    """Agents that take turns, all with one system prompt; each turn's prompt is the whole conversation."""

    def __init__(
        self, agents: int = 32, turns: int = 6, system: int = 1000, user: int = 60, answer: int = 40
    ) -> None:
        """system, user, answer: tokens of the system prompt, and of each turn."""
        self.name = f"{agents} agents, {turns} turns, one system prompt of {system} tokens"
        self._turns, self._user, self._answer = turns, user, answer
        self._random = random.Random(1)
        self._history = [self._ids(system)] * agents

    def rounds(self) -> Iterator[list[Ask]]:
        for _ in range(self._turns):
            self._history = [history + self._ids(self._user) for history in self._history]
            yield [Ask(history, self._answer) for history in self._history]

    def answered(self, answers: Sequence[list[int]]) -> None:
        self._history = [history + answer for history, answer in zip(self._history, answers, strict=True)]

    def _ids(self, count: int) -> list[int]:
        return [self._random.randrange(VOCABULARY) for _ in range(count)]


class _Row(msgspec.Struct):
    hash_ids: list[int]
    output_length: int


class MooncakeTrace:
    """A trace in Mooncake's format (Qin et al. 2024): JSON lines with hash_ids, each one block of a prompt,
    and output_length. Scaled: a block has fewer tokens than the 512 it stands for."""

    def __init__(
        self,
        path: Path,
        per_hash: int,
        longest: int,
        rows: int,
        at_once: int = 8,
        ids: tuple[int, int] = (0, VOCABULARY),
    ) -> None:
        """per_hash: tokens of a block.  longest: tokens of a prompt.  ids: they are in [first, second).
        Raises ConfigError."""
        self._ids = ids
        self.name = f"{path.name}, {per_hash} tokens per block of {TRACE_BLOCK}"
        self._per_hash, self._longest, self._at_once = per_hash, longest, at_once
        self._rows = _read(path, rows)

    def rounds(self) -> Iterator[list[Ask]]:
        for start in range(0, len(self._rows), self._at_once):
            yield [self._ask(row) for row in self._rows[start : start + self._at_once]]

    def answered(self, answers: Sequence[list[int]]) -> None:
        """The trace says what is asked next."""

    def _ask(self, row: _Row) -> Ask:
        blocks = row.hash_ids[: -(-self._longest // self._per_hash)]
        prompt = [token for block in blocks for token in self._tokens(block)][: self._longest]
        return Ask(prompt, min(32, max(1, row.output_length * self._per_hash // TRACE_BLOCK)))

    def _tokens(self, block: int) -> list[int]:
        made = random.Random(block)
        return [made.randrange(*self._ids) for _ in range(self._per_hash)]


def _read(path: Path, rows: int) -> list[_Row]:
    found: list[_Row] = []
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if len(found) == rows:
                    break
                try:
                    row = msgspec.json.decode(line, type=_Row)
                except (msgspec.MsgspecError, ValueError) as error:
                    raise ConfigError(
                        f"{path}, line {number}: no row of a Mooncake trace: {error}"
                    ) from error
                if not row.hash_ids:
                    raise ConfigError(f"{path}, line {number}: hash_ids is empty")
                found.append(row)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    if not found:
        raise ConfigError(f"{path}: holds no rows")
    return found
