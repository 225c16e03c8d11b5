"""The workloads of shared prefixes over HTTP, on any server that speaks OpenAI's API."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from fourfold.bench.kv.workloads import MooncakeTrace
from fourfold.bench.load.dataset import Item, RequestShape
from fourfold.bench.load.http import Server
from fourfold.bench.load.measure import Answer
from fourfold.bench.load.run import Arrivals, LoadRun, run_load
from fourfold.errors import FourfoldError

WORDS = (
    "time", "people", "way", "water", "day", "part", "sea", "place", "work", "week", "case", "point", "house",
    "world", "area", "money", "story", "fact", "month", "book", "eye", "job", "word", "side", "kind", "head",
    "hand", "light", "name", "idea", "body", "line", "end", "law", "car", "city", "team", "minute", "air",
)  # fmt: skip
"""Each one token, with the space before it, of most vocabularies."""


class Rounds(Protocol):
    """Requests in rounds: those of a round are sent together, the next round when all are answered."""

    @property
    def name(self) -> str: ...

    def rounds(self) -> Iterator[list[Item]]: ...

    def answered(self, answers: Sequence[str]) -> None:
        """What the requests of the last round were told, in their order."""
        ...


class ChatAgents:
    """Agents that take turns in chats of their own, all with one system prompt; each turn's prompt is the
    whole chat, with the answers as the server gave them."""

    def __init__(
        self,
        agents: int = 32,
        turns: int = 6,
        system: int = 1000,
        user: int = 60,
        answer: int = 40,
        seed: int = 0,
    ) -> None:
        """system, user: words, which are about as many tokens.  answer: tokens."""
        self.name = f"{agents} agents, {turns} turns, one system prompt of {system} words"
        self._turns, self._user, self._answer = turns, user, answer
        self._random = random.Random(seed)
        shared = {"role": "system", "content": self._text(system)}
        self._chats: list[list[dict[str, Any]]] = [[shared] for _ in range(agents)]

    def rounds(self) -> Iterator[list[Item]]:
        for _ in range(self._turns):
            for chat in self._chats:
                chat.append({"role": "user", "content": self._text(self._user)})
            yield [Item(list(chat), self._answer) for chat in self._chats]

    def answered(self, answers: Sequence[str]) -> None:
        for chat, answer in zip(self._chats, answers, strict=True):
            chat.append({"role": "assistant", "content": answer})

    def _text(self, words: int) -> str:
        return " ".join(self._random.choice(WORDS) for _ in range(words))


class Traced:
    """A trace's prompts as token ids."""

    def __init__(self, trace: MooncakeTrace) -> None:
        self.name = trace.name
        self._trace = trace

    def rounds(self) -> Iterator[list[Item]]:
        for asks in self._trace.rounds():
            yield [Item(ask.prompt, ask.max_tokens) for ask in asks]

    def answered(self, answers: Sequence[str]) -> None:
        """The trace says what is asked next."""


async def play(
    server: Server,
    shape: RequestShape,
    workload: Rounds,
    timeout: float = 600.0,
    progress: Callable[[int], None] = lambda done: None,
) -> LoadRun:
    """All rounds as one run. progress: told how many requests are done.

    Raises FourfoldError if a request failed: the next round would not be what was meant."""
    answers: list[Answer] = []
    started = time.perf_counter()
    for items in workload.rounds():
        run = await run_load(server, shape.prepare(items), Arrivals(), timeout=timeout)
        for answer in run.answers:
            if answer.error is not None:
                raise FourfoldError(f"{workload.name}: request {len(answers) + 1} failed: {answer.error}")
            answers.append(answer)
        workload.answered([answer.text for answer in run.answers])
        progress(len(answers))
    return LoadRun(Arrivals(), tuple(answers), time.perf_counter() - started)
