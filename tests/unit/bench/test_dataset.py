"""Prompts: exact lengths, shared beginnings, files in every form, and bodies as servers want them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.bench.load.dataset import CHAT, COMPLETIONS, Item, RandomItems, RequestShape, file_items
from fourfold.errors import ConfigError

IDS = RandomItems(16, 8)


@given(st.integers(1, 200), st.floats(0, 0.9), st.integers(0, 30), st.integers(0, 5))
def test_random_lengths(length: int, ratio: float, prefix: int, seed: int) -> None:
    items = RandomItems(length, 7, ratio, prefix, 5, 50).items(6, seed)
    assert items == RandomItems(length, 7, ratio, prefix, 5, 50).items(6, seed)
    for item in items:
        assert item.prompt[:prefix] == items[0].prompt[:prefix]
        own = len(item.prompt) - prefix
        assert max(1, int(length * (1 - ratio))) <= own <= length * (1 + ratio)
        assert all(isinstance(t, int) and 5 <= t < 50 for t in item.prompt)


def test_own_parts_differ() -> None:
    items = RandomItems(32, 8, prefix_len=64).items(4, 0)
    assert len({tuple(item.prompt[64:]) for item in items}) == 4
    assert len({tuple(item.prompt[:64]) for item in items}) == 1


RECORDS: list[tuple[dict[str, Any], Any, int]] = [
    ({"prompt": "hello", "output_tokens": 3}, "hello", 3),
    ({"prompt": [4, 5]}, [4, 5], 8),
    ({"messages": [{"role": "user", "content": "hi"}]}, [{"role": "user", "content": "hi"}], 8),
    (
        {"conversations": [{"from": "human", "value": "why?"}, {"from": "gpt", "value": "x" * 40}]},
        [{"role": "user", "content": "why?"}],
        10,
    ),
]


@pytest.mark.parametrize("as_list", [True, False])
def test_file(tmp_path: Path, as_list: bool) -> None:
    records = [record for record, _, _ in RECORDS]
    text = json.dumps(records) if as_list else "\n".join(map(json.dumps, records)) + "\n\n"
    path = tmp_path / "prompts"
    path.write_text(text)
    items = file_items(path, len(RECORDS), 0, IDS)
    for _, prompt, output in RECORDS:
        assert Item(prompt, output) in items
    assert len(file_items(path, 9, 0, IDS)) == 9


def test_lengths_file(tmp_path: Path) -> None:
    path = tmp_path / "lengths.jsonl"
    path.write_text('{"input_tokens": 5, "output_tokens": 2}\n{"input_tokens": 9}')
    items = file_items(path, 2, 0, RandomItems(1, 8, prefix_len=3))
    assert sorted((len(item.prompt), item.output_tokens) for item in items) == [(8, 2), (12, 8)]


@pytest.mark.parametrize(
    "text,message",
    [
        ("", "holds no prompts"),
        ("[]", "holds no prompts"),
        ("{", "is not JSON"),
        ("7", "entry 1 has none of"),
        ('{"prompt": ""}', "entry 1 has none of"),
        ('{"prompt": [1, "a"]}', "entry 1 has none of"),
        ('{"input_tokens": 0}', "entry 1 has none of"),
        ('{"conversations": [{"value": "alone"}]}', "entry 1 has none of"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        file_items(path, 1, 0, IDS)
    with pytest.raises(ConfigError, match="cannot be read"):
        file_items(tmp_path / "none", 1, 0, IDS)


def test_bodies() -> None:
    ids, text = Item([1, 2], 3), Item("hi", 3)
    messages = Item([{"role": "user", "content": "hi"}], 3)
    shape = RequestShape("m", seed=5, extra={"top_k": 1})
    first, second, third = shape.prepare([ids, text, messages])
    assert (first.path, first.body["prompt"], first.prompt_tokens) == (COMPLETIONS, [1, 2], 2)
    assert first.body | {"prompt": 0} == {
        "model": "m", "max_tokens": 3, "temperature": 0.0, "stream": True, "prompt": 0,
        "stream_options": {"include_usage": True}, "ignore_eos": True, "seed": 5, "top_k": 1,
    }  # fmt: skip
    assert (second.body["prompt"], second.body["seed"], second.prompt_tokens) == ("hi", 6, None)
    assert (third.path, third.body["messages"]) == (CHAT, messages.prompt)
    (asked,) = RequestShape("m", "chat").prepare([text])
    assert (asked.path, asked.body["messages"]) == (CHAT, messages.prompt)


def test_schema() -> None:
    (request,) = RequestShape("m", schema={"type": "object"}).prepare([Item("hi", 3)])
    assert request.path == CHAT
    assert request.body["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert "ignore_eos" not in request.body


def test_endpoints_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match="not token ids"):
        RequestShape("m", "chat").prepare([Item([1], 3)])
    with pytest.raises(ConfigError, match="use --endpoint chat"):
        RequestShape("m", "completions").prepare([Item([{"role": "user", "content": "x"}], 3)])
