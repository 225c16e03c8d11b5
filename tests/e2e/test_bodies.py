"""Bodies and options of public bug reports, on a real server: errors are objects, and it lives."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from .running import Server

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def _post(server: Server, path: str, body: object) -> httpx.Response:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(server.url + path, content=data, headers={"Content-Type": "application/json"})


def _message(content: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 3}


@pytest.mark.parametrize(
    "body",
    [
        json.dumps(_message("你好"), ensure_ascii=False).encode("gbk"),  # B11
        json.dumps(_message("é"), ensure_ascii=False).encode("latin-1"),
        b'{:"messages": []}',  # B12
        b"",
        b"[1, 2]",
        b"12",
        b'"text"',
        b"[" * 100_000,
    ],
)
def test_broken_bodies(tiny_server: Server, body: bytes) -> None:
    for path in (CHAT, TEXT, "/v1/tokenize", "/v1/detokenize"):
        answer = _post(tiny_server, path, body)
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"
    assert _post(tiny_server, CHAT, _message("ok")).status_code == 200


@pytest.mark.parametrize(
    "extra, status, field",
    [
        ({"audio": {"voice": "a", "format": "wav"}, "modalities": ["audio"]}, (400, 501), "audio"),  # B20
        (
            {"tools": [{"type": "function", "function": {"name": "f" * 129, "parameters": {}}}]},
            (400, 501),
            "tools",
        ),
        ({"response_format": {"type": "json_schema"}}, (400,), "response_format"),
        ({"continue_final_message": True, "add_generation_prompt": True}, (400,), None),  # B68
        ({"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]}, (400,), None),
    ],
)
def test_refused_options(
    tiny_server: Server, extra: dict[str, Any], status: tuple[int, ...], field: str | None
) -> None:
    answer = _post(tiny_server, CHAT, {**_message("a"), **extra})
    assert answer.status_code in status
    error = answer.json()["error"]
    assert field is None or field in error["message"]
    if "messages" in extra:
        assert "system must come first" in error["message"]


@pytest.mark.parametrize("options, last", [(None, None), ({}, None), ({"include_usage": True}, [])])
def test_usage_of_streams(
    tiny_server: Server, options: dict[str, bool] | None, last: list[Any] | None
) -> None:
    """B09."""
    body = {"prompt": "ab", "max_tokens": 5, "temperature": 0, "stream": True, "stream_options": options}
    events = _post(tiny_server, TEXT, body).text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    whole = _post(tiny_server, TEXT, {**body, "stream": False, "stream_options": None}).json()
    with_usage = [chunk for chunk in chunks if chunk.get("usage")]
    if last is None:
        assert with_usage == []
    else:
        assert with_usage == chunks[-1:]
        assert chunks[-1]["choices"] == last
        cached = "prompt_tokens_details"
        assert {**chunks[-1]["usage"], cached: 0} == {**whole["usage"], cached: 0}
    # B08: each chunk is new text only.
    assert "".join(c["choices"][0]["text"] for c in chunks if c["choices"]) == whole["choices"][0]["text"]


def test_characters_of_several_tokens(real_server: Server) -> None:
    """B05: no half of a character in any chunk."""
    prompt = "🙂🙃😀😃 龘靐齉 🙂🙃😀😃 龘靐齉 🙂🙃😀😃 龘"
    body = {"prompt": prompt, "max_tokens": 40, "temperature": 0, "logprobs": 0, "ignore_eos": True}
    body["return_tokens_as_token_ids"] = True
    whole = _post(real_server, TEXT, body).json()["choices"][0]
    ids = [int(token.removeprefix("token_id:")) for token in whole["logprobs"]["tokens"]]
    decoded = _post(real_server, "/v1/detokenize", {"tokens": ids}).json()["prompt"]
    assert any(ord(character) > 0x2000 for character in decoded)
    events = _post(real_server, TEXT, {**body, "stream": True}).text.split("\n\n")[:-2]
    texts = [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events]
    assert "".join(texts) == whole["text"]
    assert whole["text"].rstrip("\N{REPLACEMENT CHARACTER}") == decoded.rstrip("\N{REPLACEMENT CHARACTER}")
    assert not any("\N{REPLACEMENT CHARACTER}" in text for text in texts[:-1])


def test_leading_space_of_a_continuation(real_server: Server) -> None:
    """B07: ids whose text begins with a space keep it."""
    body = {"prompt": "The capital of France is", "max_tokens": 2, "temperature": 0}
    assert _post(real_server, TEXT, body).json()["choices"][0]["text"].startswith(" Paris")
    text = " Paris is\n  a city"
    ids = _post(real_server, "/v1/tokenize", {"prompt": text}).json()["tokens"]
    assert _post(real_server, "/v1/detokenize", {"tokens": ids}).json()["prompt"] == text


def test_end_of_answer(real_server: Server) -> None:
    """B78: the turn's end mark ends a chat unless told otherwise, and is not shown."""
    body = {**_message("Say hi."), "temperature": 0, "max_tokens": 40}
    answer = _post(real_server, CHAT, body).json()["choices"][0]
    assert answer["finish_reason"] == "stop"
    assert "<|im_end|>" not in answer["message"]["content"]
    longer = _post(real_server, CHAT, {**body, "ignore_eos": True}).json()
    assert longer["usage"]["completion_tokens"] == 40
    assert longer["choices"][0]["finish_reason"] == "length"
