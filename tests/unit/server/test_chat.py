from __future__ import annotations

from typing import Any

import httpx
import pytest

from fourfold.server.app import create_app
from fourfold.server.settings import ServerSettings
from fourfold.text.tokenizer import Tokenizer

from .fakes import FakeClient, tiny_tokenizer
from .sse import stream, texts

pytestmark = pytest.mark.anyio

PATH = "/v1/chat/completions"
USER = [{"role": "user", "content": "ab"}]


async def post(http: httpx.AsyncClient, status: int = 200, **body: Any) -> dict[str, Any]:
    response = await http.post(PATH, json=body)
    assert response.status_code == status, response.text
    answer: dict[str, Any] = response.json()
    return answer if status == 200 else answer["error"]


def prompt_of(engine: FakeClient) -> str:
    return engine.tokenizer.decode(engine.requests[-1].prompt_ids, skip_special_tokens=False)


async def test_answer_has_openais_shape(http: httpx.AsyncClient, engine: FakeClient) -> None:
    answer = await post(http, messages=USER)
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "tiny"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello world", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert prompt_of(engine) == "<|start|>user\nab<|end|>\n<|start|>assistant\n"
    assert answer["usage"]["prompt_tokens"] == len(engine.requests[0].prompt_ids)
    # Without a limit of its own, an answer may fill the context.
    assert engine.requests[0].sampling.max_tokens == 128 - len(engine.requests[0].prompt_ids)


async def test_message_forms(http: httpx.AsyncClient, engine: FakeClient) -> None:
    await post(
        http,
        messages=[
            {"role": "developer", "content": "rules"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None},
            {"role": "user", "name": "Ann", "content": "c"},
        ],
    )
    assert prompt_of(engine) == (
        "<|start|>system\nrules<|end|>\n<|start|>user\na\nb<|end|>\n<|start|>assistant\n<|end|>\n"
        "<|start|>user\nc<|end|>\n<|start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("messages", "status", "param"),
    [
        ([], 400, "messages"),
        (None, 400, "messages"),
        ("hi", 400, "messages"),
        (["hi"], 400, "messages"),
        ([{}], 400, "messages[0].role"),
        ([{"role": "robot", "content": "a"}], 400, "messages[0].role"),
        ([{"role": "user"}], 400, "messages[0].content"),
        ([{"role": "user", "content": 5}], 400, "messages[0].content"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            400,
            "messages[0].content[0]",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], 400, "messages[0].content[0].text"),
        ([{"role": "user", "content": "a", "name": 5}], 400, "messages[0].name"),
        ([{"role": "tool", "content": "a", "tool_call_id": 5}], 400, "messages[0].tool_call_id"),
        ([{"role": "assistant", "tool_calls": [{"id": "1"}]}], 400, "messages[0].tool_calls[0]"),
        ([{"role": "assistant", "content": "", "tool_calls": 5}], 400, "messages[0].tool_calls"),
        ([{"role": "assistant", "content": "a", "audio": {"id": "x"}}], 501, "messages[0].audio"),
    ],
)
async def test_bad_messages(
    http: httpx.AsyncClient, engine: FakeClient, messages: Any, status: int, param: str
) -> None:
    error = await post(http, status, messages=messages)
    assert error["param"] == param
    assert not engine.requests


async def test_template_refuses(http: httpx.AsyncClient, engine: FakeClient) -> None:
    """B67: 400 in the template's own words."""
    error = await post(http, 400, messages=[*USER, {"role": "system", "content": "late"}])
    assert "system must come first" in error["message"]
    await post(http, messages=USER)


async def test_last_message_from_assistant(http: httpx.AsyncClient, engine: FakeClient) -> None:
    """B68."""
    messages = [*USER, {"role": "assistant", "content": "Hel"}]
    await post(http, messages=messages)
    assert prompt_of(engine).endswith("<|start|>assistant\nHel<|end|>\n<|start|>assistant\n")
    await post(http, messages=messages, continue_final_message=True)
    assert prompt_of(engine).endswith("<|start|>assistant\nHel")
    await post(http, messages=messages, add_generation_prompt=False)
    assert prompt_of(engine).endswith("Hel<|end|>\n")
    error = await post(http, 400, messages=messages, continue_final_message=True, add_generation_prompt=True)
    assert "exclude" in error["message"]


async def test_no_chat_template(engine: FakeClient) -> None:
    app = create_app(engine, tiny_tokenizer(template=None), ServerSettings())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        assert "--chat-template" in (await post(http, 400, messages=USER))["message"]


async def test_other_templates(engine: FakeClient, tokenizer: Tokenizer) -> None:
    own = "{% for m in messages %}[{{ m.content }}{{ mood }}]{% endfor %}"
    for settings in (
        ServerSettings(chat_template=own),
        ServerSettings(allow_request_chat_template=True),
        ServerSettings(),
    ):
        app = create_app(engine, tokenizer, settings)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
            body: dict[str, Any] = {"messages": USER, "chat_template_kwargs": {"mood": "?"}}
            if settings.chat_template is None:
                body["chat_template"] = own
            if settings == ServerSettings():
                assert (await post(http, 400, **body))["param"] == "chat_template"
            else:
                await post(http, **body)
                assert prompt_of(engine) == "[ab?]"


async def test_logprobs(http: httpx.AsyncClient, engine: FakeClient) -> None:
    """B22: logprobs without alternatives, asked for in either way."""
    engine.reply = lambda _: "é"
    for extra in ({}, {"top_logprobs": 0}, {"top_logprobs": None}):
        choice = (await post(http, messages=USER, logprobs=True, **extra))["choices"][0]
        content = choice["logprobs"]["content"]
        assert [entry["bytes"] for entry in content] == [[0xC3], [0xA9], list(b"<|eos|>")]
        assert all(entry["top_logprobs"] == [] and entry["logprob"] == -0.5 for entry in content)
    choice = (await post(http, messages=USER, logprobs=True, top_logprobs=2))["choices"][0]
    assert choice["logprobs"]["content"][0]["top_logprobs"] == [
        {"token": "a", "logprob": -0.1, "bytes": [97]},
        {"token": "b", "logprob": -1.1, "bytes": [98]},
    ]
    assert (await post(http, 400, messages=USER, top_logprobs=2))["param"] == "top_logprobs"
    assert (await post(http, 400, messages=USER, logprobs=True, top_logprobs=21))["param"] == "top_logprobs"


async def test_prompt_logprobs(http: httpx.AsyncClient) -> None:
    answer = await post(http, messages=USER, prompt_logprobs=0)
    assert answer["prompt_logprobs"][0] is None
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]


async def test_max_completion_tokens_wins(http: httpx.AsyncClient, engine: FakeClient) -> None:
    await post(http, messages=USER, max_tokens=9, max_completion_tokens=3)
    assert engine.requests[0].sampling.max_tokens == 3
    error = await post(http, 400, messages=USER, max_completion_tokens=10**9)
    assert "1000000000" in error["message"]


@pytest.mark.parametrize("n", [1, 2, 3])
async def test_stream(http: httpx.AsyncClient, n: int) -> None:
    """B10: the right index, the role once, one finish reason each; usage sums all choices."""
    whole = await post(http, messages=USER, n=n, seed=1)
    options = {"include_usage": True}
    chunks = await stream(http, PATH, messages=USER, n=n, seed=1, temperature=1, stream_options=options)
    assert texts(chunks) == dict.fromkeys(range(n), "Hello world")
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    for index in range(n):
        own = [choice for choice in choices if choice["index"] == index]
        assert [choice["delta"].get("role") for choice in own] == ["assistant"] + [None] * (len(own) - 1)
        assert [c["finish_reason"] for c in own if c["finish_reason"]] == ["stop"]
        assert own[-1]["finish_reason"] == "stop"
        assert not any(choice["delta"].get("content") == "" for choice in own[1:])
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]


async def test_usage_only_when_asked_for(http: httpx.AsyncClient) -> None:
    """B09."""
    for path, body in ((PATH, {"messages": USER}), ("/v1/completions", {"prompt": "ab"})):
        usage = (await http.post(path, json=body)).json()["usage"]
        for options in (None, {}, {"include_usage": False}, {"include_usage": None}):
            chunks = await stream(http, path, **body, stream_options=options)
            assert not any("usage" in chunk or chunk["choices"] == [] for chunk in chunks)
        chunks = await stream(http, path, **body, stream_options={"include_usage": True})
        assert [chunk.get("usage") for chunk in chunks] == [None] * (len(chunks) - 1) + [usage]
        assert chunks[-1]["choices"] == []
        options = {"include_usage": True, "continuous_usage_stats": True}
        chunks = await stream(http, path, **body, stream_options=options)
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks if "usage" in chunk]
        assert counts == [*range(1, 8), 7]
        response = await http.post(path, json={**body, "stream_options": {"include_usage": True}})
        assert response.json()["error"]["param"] == "stream_options"


async def test_stream_with_logprobs_loses_none(http: httpx.AsyncClient, engine: FakeClient) -> None:
    engine.reply = lambda _: "a😀b"
    chunks = await stream(http, PATH, messages=USER, logprobs=True, stop=["😀c"])
    entries = [
        entry
        for chunk in chunks
        for choice in chunk["choices"]
        for entry in (choice["logprobs"] or {"content": []})["content"]
    ]
    assert b"".join(bytes(entry["bytes"]) for entry in entries) == "a😀b<|eos|>".encode()
    assert texts(chunks) == {0: "a😀b"}


@pytest.mark.parametrize(
    ("field", "value", "status"),
    [
        ("audio", {"voice": "x"}, 501), ("modalities", ["text", "audio"], 501),
        ("tools", [{"type": "function"}], 400),
        ("tools", [{"type": "function", "function": {"name": "x" * 129}}], 400),
        ("functions", [{"name": "f"}, {"name": "f"}], 400),
        ("tool_choice", "required", 400),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}, 400),
        ("response_format", {"type": "json_schema"}, 400), ("response_format", {"type": "xml"}, 400),
        ("guided_json", {"type": "str"}, 400), ("guided_json", "{", 400), ("grammar", "x", 400),
        ("guided_regex", "foo**", 400), ("regex", "(a", 400), ("ebnf", "start: nothing", 400),
        ("reasoning_effort", "high", 400), ("store", True, 501), ("web_search_options", {}, 501),
        ("bad_words", ["x"], 501),
        ("use_beam_search", True, 501), ("prompt_embeds", "x", 501), ("echo", True, 501),
        ("mirostat", 2, 501),
        ("service_tier", "priority", 501), ("truncate_prompt_tokens", 5, 501),
        ("return_token_ids", True, 501),
    ],
)  # fmt: skip
async def test_unsupported_fields_are_named(
    http: httpx.AsyncClient, engine: FakeClient, field: str, value: Any, status: int
) -> None:
    """B20: never ignored in silence."""
    error = await post(http, status, messages=USER, **{field: value})
    assert error["param"] == field
    assert field in error["message"]
    assert not engine.requests


async def test_harmless_values_pass(http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture) -> None:
    await post(
        http, messages=USER, tools=[], tool_choice="none", modalities=["text"],
        response_format={"type": "text"},
        audio=None, store=False, service_tier="auto", metadata={"a": "b"},
        parallel_tool_calls=True, user="x",
        guided_json=None, n=1,
    )  # fmt: skip
    assert not caplog.records
    await post(http, messages=USER, tool_choice="none")
    await post(http, messages=USER, tool_choice="auto")


async def test_unknown_fields_are_listed_once(
    http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        await post(http, messages=USER, frobnicate=1, zap=2)
    assert [record.getMessage() for record in caplog.records] == [
        "/v1/chat/completions: unknown fields were ignored: 'frobnicate', 'zap'"
    ]
