"""What requests ask: random token ids of exact lengths, or lines of a file."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fourfold.bench.load.measure import Prepared
from fourfold.errors import ConfigError

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
CHARACTERS_PER_TOKEN = 4
"""Of English text, about: how long the answers of a file that has only texts are."""


@dataclass(frozen=True, slots=True)
class Item:
    """One prompt: token ids, text, or messages.  output_tokens: how long the answer may be."""

    prompt: Sequence[int] | str | Sequence[Mapping[str, Any]]
    output_tokens: int

    @property
    def is_chat(self) -> bool:
        return not isinstance(self.prompt, str) and bool(self.prompt) and isinstance(self.prompt[0], Mapping)


@dataclass(frozen=True, slots=True)
class RandomItems:
    """input_len, output_len: tokens of each prompt and answer.  range_ratio: each length is drawn evenly from
    (1 - ratio) to (1 + ratio) times as much.  prefix_len: tokens before that, the same for all prompts.
    low, high: token ids are in [low, high)."""

    input_len: int
    output_len: int
    range_ratio: float = 0.0
    prefix_len: int = 0
    low: int = 1000
    high: int = 30000

    def items(self, count: int, seed: int) -> list[Item]:
        rng = random.Random(seed)
        prefix = self._ids(rng, self.prefix_len)
        return [
            Item(
                prefix + self._ids(rng, self._length(rng, self.input_len)), self._length(rng, self.output_len)
            )
            for _ in range(count)
        ]

    def _ids(self, rng: random.Random, count: int) -> list[int]:
        return [rng.randrange(self.low, self.high) for _ in range(count)]

    def _length(self, rng: random.Random, mean: int) -> int:
        spread = int(mean * self.range_ratio)
        return max(1, rng.randint(mean - spread, mean + spread))


def file_items(path: Path, count: int, seed: int, ids: RandomItems) -> list[Item]:
    """`count` items drawn from a file, in random order, each as rarely as possible.

    The file is JSON lines, or a JSON list, of
        {"prompt": text or token ids, "output_tokens": n}
        {"messages": [...], "output_tokens": n}
        {"input_tokens": n, "output_tokens": n}   random ids, after the prefix of `ids`
        {"conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": text}, ...]}   ShareGPT
    output_tokens may be missing: then it is that of `ids`; in ShareGPT's form the answer's length / 4.
    Raises ConfigError naming the line.
    """
    rng = random.Random(seed)
    records = list(_records(path))
    if not records:
        raise ConfigError(f"{path}: holds no prompts")
    order: list[int] = []
    while len(order) < count:
        order += rng.sample(range(len(records)), len(records))
    prefix = RandomItems(0, 1, 0.0, ids.prefix_len, ids.low, ids.high)._ids(rng, ids.prefix_len)
    return [_item(path, number + 1, records[number], ids, prefix, rng) for number in order[:count]]


def _records(path: Path) -> Iterator[Any]:
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    try:
        if text.lstrip().startswith("["):
            yield from json.loads(text)
            return
        for line in text.splitlines():
            if line.strip():
                yield json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{path}: is not JSON: {error}") from error


def _item(
    path: Path, number: int, record: Any, ids: RandomItems, prefix: list[int], rng: random.Random
) -> Item:
    match record:
        case {"conversations": [{"value": str(asked)}, {"value": str(said)}, *_]}:
            length = max(1, len(said) // CHARACTERS_PER_TOKEN)
            return Item([{"role": "user", "content": asked}], _output(record, length))
        case {"messages": [{"role": str(), "content": _}, *_] as messages}:
            return Item(messages, _output(record, ids.output_len))
        case {"prompt": str(text)} if text:
            return Item(text, _output(record, ids.output_len))
        case {"prompt": [int(), *_] as tokens} if all(isinstance(t, int) for t in tokens):
            return Item(tokens, _output(record, ids.output_len))
        case {"input_tokens": int(length)} if length > 0:
            return Item(prefix + ids._ids(rng, length), _output(record, ids.output_len))
    raise ConfigError(
        f"{path}: entry {number} has none of: prompt, messages, input_tokens (a number), conversations "
        f"(with a question and an answer)"
    )


def _output(record: Mapping[str, Any], default: int) -> int:
    given = record.get("output_tokens", default)
    return given if isinstance(given, int) and given > 0 else default


@dataclass(frozen=True, slots=True)
class RequestShape:
    """What all requests have in common.

    endpoint: "auto" sends messages to the chat endpoint and everything else to completions.
    schema: a JSON schema answers must follow, by response_format; needs the chat endpoint.
    extra: more fields of the body.
    """

    model: str
    endpoint: Literal["auto", "completions", "chat"] = "auto"
    temperature: float = 0.0
    ignore_eos: bool = True
    seed: int | None = None
    schema: Mapping[str, Any] | None = None
    extra: Mapping[str, Any] | None = None

    def prepare(self, items: Sequence[Item]) -> list[Prepared]:
        """Raises ConfigError if token ids were to go to the chat endpoint."""
        return [self._one(index, item) for index, item in enumerate(items)]

    def _one(self, index: int, item: Item) -> Prepared:
        chat = self.endpoint == "chat" or (
            self.endpoint == "auto" and (item.is_chat or self.schema is not None)
        )
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": item.output_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos and self.schema is None:
            body["ignore_eos"] = True
        if self.seed is not None:
            body["seed"] = self.seed + index
        known = None if isinstance(item.prompt, str) or item.is_chat else len(item.prompt)
        if not chat:
            if item.is_chat:
                raise ConfigError("messages cannot go to the completions endpoint; use --endpoint chat")
            body["prompt"] = item.prompt
        elif item.is_chat:
            body["messages"] = item.prompt
        elif isinstance(item.prompt, str):
            body["messages"] = [{"role": "user", "content": item.prompt}]
        else:
            raise ConfigError(
                "the chat endpoint takes text, not token ids; give a --dataset file of prompts or messages"
            )
        if self.schema is not None:
            named = {"name": "answer", "schema": dict(self.schema), "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": named}
        return Prepared(COMPLETIONS if not chat else CHAT, body | dict(self.extra or {}), known)


RECORD_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "email": {"type": "string", "maxLength": 32},
        "is_active": {"type": "boolean"},
        "role": {"enum": ["admin", "editor", "viewer", "guest"]},
        "score": {"type": "number"},
        "tags": {
            "type": "array",
            "items": {"type": "string", "maxLength": 12},
            "minItems": 1,
            "maxItems": 4,
        },
        "address": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
            },
            "required": ["city", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "email", "is_active", "role", "score", "tags", "address"],
    "additionalProperties": False,
}
"""Of the records that `schema_items` asks for: eight fields, as people extract them from texts."""


def schema_items(count: int, output_tokens: int, first: int = 1) -> list[Item]:
    """Requests for made-up records, numbered from `first`, for answers that must follow a schema."""
    return [
        Item(
            [{"role": "user", "content": f"Invent record number {i} of a fictional person, as JSON."}],
            output_tokens,
        )
        for i in range(first, first + count)
    ]
