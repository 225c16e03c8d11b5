# ruff: noqa: E501
"""Tools and reasoning in chat completions: what is refused, what templates get, what answers become."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest

from fourfold.server.app import create_app
from fourfold.server.settings import ServerSettings

from .fakes import MODEL, FakeClient, tiny_tokenizer
from .sse import stream

pytestmark = pytest.mark.anyio

PATH = "/v1/chat/completions"
USER = [{"role": "user", "content": "ab"}]
TEMPLATE = """\
{%- if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}<tool_call>{% endif -%}
{%- for message in messages %}<|start|>{{ message.role }}
{% if message.name is defined %}{{ message.name }}: {% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor -%}
<|end|>{% endfor -%}
{%- if add_generation_prompt %}<|start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% elif open %}<think>
{% endif %}{% endif -%}"""
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ADD = {"type": "function", "function": {"name": "add", "description": "Adds", "parameters": PARAMETERS}}
NOW = {"type": "function", "function": {"name": "now"}}
STRICT = {"type": "function", "function": {**ADD["function"], "strict": True}}  # type: ignore[dict-item]
CALLS = (
    '<think>\nHm.\n</think>\n\nSo:\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)


def engine_with(template: str | None) -> FakeClient:
    engine = FakeClient(tiny_tokenizer() if template is None else tiny_tokenizer(template))
    engine.model = msgspec.structs.replace(MODEL, max_model_len=8192)
    return engine


@pytest.fixture
def engine() -> FakeClient:
    return engine_with(TEMPLATE)


@pytest.fixture
async def http(engine: FakeClient) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(engine, engine.tokenizer, ServerSettings())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        yield client


async def post(http: httpx.AsyncClient, status: int = 200, **body: Any) -> dict[str, Any]:
    response = await http.post(PATH, json={"messages": USER, **body})
    assert response.status_code == status, response.text
    answer: dict[str, Any] = response.json()
    return answer if status == 200 else answer["error"]


def prompt(engine: FakeClient) -> str:
    return engine.tokenizer.decode(engine.requests[-1].prompt_ids, skip_special_tokens=False)


async def test_calls_and_reasoning(http: httpx.AsyncClient, engine: FakeClient) -> None:
    engine.reply = lambda _: CALLS
    answer = await post(http, tools=[ADD, NOW])
    choice = answer["choices"][0]
    message = choice["message"]
    assert (message["content"], message["reasoning_content"], message["reasoning"]) == ("So:", "Hm.", "Hm.")
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "add", "arguments": '{"a": 1}'},
        {"name": "now", "arguments": "{}"},
    ]
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert choice["finish_reason"] == "tool_calls"
    assert engine.requests[-1].constraint is None
    # <think> newline H m . newline </think> as bytes; "He" and the like are the only longer tokens.
    tokens = engine.tokenizer.encode("<think>\nHm.\n</think>", add_special_tokens=False)
    assert answer["usage"]["completion_tokens_details"] == {
        "reasoning_tokens": len(tokens) - len("<think>") + 1
    }


@pytest.mark.parametrize("per_event", [1, 2, 5, 1000])
@pytest.mark.parametrize("stop", [None, ["zzz", "</tool_call>!"]])
async def test_streams_say_the_same(
    http: httpx.AsyncClient, engine: FakeClient, per_event: int, stop: list[str] | None
) -> None:
    """B61, B10: whatever the engine's events bring, deltas joined are the whole answer."""
    engine.reply = lambda _: CALLS
    engine.per_event = per_event
    body: dict[str, Any] = {"messages": USER, "tools": [ADD, NOW], "n": 2, "stop": stop}
    chunks = await stream(http, PATH, **body, stream_options={"include_usage": True})
    whole = await post(http, **body)
    for index in (0, 1):
        message: dict[str, Any] = {"content": "", "reasoning_content": ""}
        calls: dict[int, dict[str, str]] = {}
        reasons, roles = [], 0
        for chunk in chunks:
            for choice in chunk["choices"]:
                if choice["index"] != index:
                    continue
                delta = choice["delta"]
                roles += "role" in delta
                reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
                for key in message:
                    message[key] += delta.get(key) or ""
                for call in delta.get("tool_calls") or ():
                    if "id" in call:
                        assert call["index"] == len(calls)
                        calls[call["index"]] = {"name": call["function"]["name"], "arguments": ""}
                    calls[call["index"]]["arguments"] += call["function"]["arguments"]
        given = whole["choices"][index]["message"]
        assert message["content"] == given["content"]
        assert message["reasoning_content"] == given["reasoning_content"]
        assert list(calls.values()) == [call["function"] for call in given["tool_calls"]]
        assert (reasons, roles) == (["tool_calls"], 1)
    assert chunks[-1]["usage"] == whole["usage"]
    # B02: no chunk without anything in it.
    assert all(choice["delta"] or choice["finish_reason"] for chunk in chunks for choice in chunk["choices"])


async def test_one_call_if_not_parallel(http: httpx.AsyncClient, engine: FakeClient) -> None:
    engine.reply = lambda _: CALLS
    answer = await post(http, tools=[ADD, NOW], parallel_tool_calls=False)
    assert len(answer["choices"][0]["message"]["tool_calls"]) == 1
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    assert len(engine.aborted) == 1  # it does not go on in vain


async def test_functions(http: httpx.AsyncClient, engine: FakeClient) -> None:
    """The names before tools."""
    engine.reply = lambda _: CALLS
    functions = [ADD["function"], NOW["function"]]
    answer = await post(http, functions=functions, function_call="auto")
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "function_call"
    assert choice["message"]["function_call"] == {"name": "add", "arguments": '{"a": 1}'}
    assert "tool_calls" not in choice["message"]
    chunks = await stream(http, PATH, messages=USER, functions=functions)
    calls = [
        c["delta"]["function_call"]
        for chunk in chunks
        for c in chunk["choices"]
        if "function_call" in c["delta"]
    ]
    assert calls[0]["name"] == "add"
    assert "".join(call["arguments"] for call in calls) == '{"a": 1}'
    await post(http, functions=functions, function_call={"name": "now"})
    assert engine.requests[-1].constraint is not None


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [ADD, ADD]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(10_000)]}, "tools"),
        ({"tools": ["x"]}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f" * 129}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": 3}}]}, "tools"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "str"}}}}}]},
            "tools",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"$ref": "http://127.0.0.1:9/x"}}}]},
            "tools",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"pattern": "(("}}}}}]},
            "tools",
        ),
        ({"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "nope"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "add"}}}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [ADD], "functions": [{"name": "f"}]}, "functions"),
        ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call"),
        ({"tools": [ADD], "guided_regex": "a+"}, "guided_regex"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"thinking_budget": -2}, "thinking_budget"),
        ({"thinking_budget": 5}, "thinking_budget"),  # </think> is many tokens in this vocabulary
        ({"thinking": {"type": "maybe"}}, "thinking"),
        ({"thinking": {"type": "enabled", "budget_tokens": "x"}}, "thinking"),
        ({"thinking_budget": 5, "reasoning_budget": 5}, "thinking_budget"),
    ],
)  # fmt: skip
async def test_refused(http: httpx.AsyncClient, engine: FakeClient, body: dict[str, Any], param: str) -> None:
    """B64, B20 and their kind: 400 before anything is queued, for streams as well."""
    for streams in (False, True):
        error = await post(http, 400, **body, stream=streams)
        assert error["param"] == param
        assert len(error["message"]) < 1000
    assert not engine.requests


async def test_choices(http: httpx.AsyncClient, engine: FakeClient) -> None:
    """B64: none with and without tools is plain text."""
    engine.reply = lambda _: '<tool_call>{"name": "now"}</tool_call>'
    for body in ({"tools": [NOW], "tool_choice": "none"}, {"tool_choice": "none"}):
        answer = await post(http, **body)
        assert answer["choices"][0]["message"]["content"] == '<tool_call>{"name": "now"}</tool_call>'
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert "now" not in prompt(engine)
    for choice in ("required", {"type": "function", "function": {"name": "now"}}):
        answer = await post(http, tools=[ADD, NOW], tool_choice=choice)
        assert answer["choices"][0]["finish_reason"] == "tool_calls"
        constraint = engine.requests[-1].constraint
        assert constraint is not None
        assert ("add" in constraint.grammar) is (choice == "required")
        assert answer["structured_output"]["guarantee"] == "grammar"
    only = {"mode": "required", "tools": [{"type": "function", "function": {"name": "now"}}]}
    await post(http, tools=[ADD, NOW], tool_choice={"type": "allowed_tools", "allowed_tools": only})
    assert "add" not in engine.requests[-1].constraint.grammar  # type: ignore[union-attr]
    assert (await post(http, tools=[STRICT]))["choices"]
    assert engine.requests[-1].constraint is not None


async def test_strict_takes_what_a_grammar_can_say(http: httpx.AsyncClient) -> None:
    hard = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": hard, "strict": True}}
    error = await post(http, 400, tools=[tool])
    assert "uniqueItems" in error["message"]
    tool["function"]["strict"] = False  # type: ignore[index]
    await post(http, tools=[tool], tool_choice="required")


async def test_strict_where_calls_are_not_json() -> None:
    """Guaranteed where a grammar says it in the model's own format. Elsewhere such tools are served all the
    same, for the openai client's helpers make every tool strict, and the response says so."""
    beyond = {"type": "object", "properties": {"day": {"type": "string", "format": "date"}}}
    hoped = {"type": "function", "function": {"name": "f", "parameters": beyond, "strict": True}}
    engine = engine_with(TEMPLATE)
    settings = ServerSettings(tool_call_parser="qwen3_coder")
    transport = httpx.ASGITransport(create_app(engine, engine.tokenizer, settings))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        assert (await post(http, tools=[STRICT]))["structured_output"]["guarantee"] == "grammar"
        for stream in (False, True):
            body = {"messages": USER, "tools": [hoped], "max_tokens": 4, "stream": stream}
            response = await http.post("/v1/chat/completions", json=body)
            assert response.status_code == 200
            assert response.headers["X-Fourfold-Guarantee"] == "none"
            assert engine.requests[-1].constraint is None
            if not stream:
                assert response.json()["structured_output"] == {"guarantee": "none", "validated": []}
        answer = await post(http, tools=[hoped], tool_choice="required")
        # Calls that Hermes' format is forced on are read in it, whatever forced it.
        engine.reply = lambda _: '<tool_call>\n{"name": "f", "arguments": {"day": "x"}}\n</tool_call>'
        schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}
        for parser in ("glm45", "pythonic"):
            settings = ServerSettings(tool_call_parser=parser)
            other = httpx.ASGITransport(create_app(engine, engine.tokenizer, settings))
            async with httpx.AsyncClient(transport=other, base_url="http://test") as second:
                tool = {"name": "f", "parameters": {**beyond, "minProperties": 0}}
                tools = [{"type": "function", "function": tool}]
                asked = await post(second, tools=tools, response_format=schema)
                (call,) = asked["choices"][0]["message"]["tool_calls"]
                assert call["function"]["arguments"] == '{"day": "x"}'
        assert answer["structured_output"]["guarantee"] == "grammar"
        assert "structured_output" not in await post(http, tools=[ADD])


async def test_what_the_template_gets(http: httpx.AsyncClient, engine: FakeClient) -> None:
    messages = [
        *USER,
        {
            "role": "assistant", "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
    ]  # fmt: skip
    await post(http, messages=messages, tools=[ADD])
    text = prompt(engine)
    assert '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>' in text
    assert "<|start|>tool\nadd: 42" in text
    shown = json.loads(text[text.index("{") : text.index("<tool_call>")])
    assert shown == ADD
    old = [
        *USER,
        {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": '{"a": 1}'}},
        {"role": "function", "name": "add", "content": "42"},
    ]
    await post(http, messages=old, functions=[ADD["function"]])
    assert prompt(engine) == text
    bad = [*USER, {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": "{"}}]}]
    assert "not JSON" in (await post(http, 400, messages=bad))["message"]


@pytest.mark.parametrize("tools", [[ADD, NOW], [], None])
async def test_tokenize_counts_what_chat_takes(
    http: httpx.AsyncClient, engine: FakeClient, tools: list[Any] | None
) -> None:
    asked = {"messages": USER, "tools": tools}
    await post(http, **asked)
    for path in ("/tokenize", "/v1/tokenize"):
        response = await http.post(path, json=asked)
        assert response.json()["tokens"] == engine.requests[-1].prompt_ids
        assert response.json()["count"] == len(engine.requests[-1].prompt_ids)
    bad = await http.post("/v1/tokenize", json={"messages": USER, "tools": [{"type": "function"}]})
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "tools")
    alone = await http.post("/v1/tokenize", json={"prompt": "x", "tools": [ADD]})
    assert (alone.status_code, alone.json()["error"]["param"]) == (400, "tools")


async def test_a_template_without_tools() -> None:
    """Documented: described in the system message, earlier calls and results as text."""
    engine = engine_with(None)
    engine.reply = lambda _: '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    app = create_app(engine, engine.tokenizer, ServerSettings())
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        answer = await post(
            http, tools=[ADD],
            messages=[
                {"role": "system", "content": "Be brief."}, *USER,
                {"role": "assistant", "content": "", "tool_calls": [call, {**call, "id": "c2"}]},
                {"role": "tool", "tool_call_id": "c1", "content": "1"},
                {"role": "tool", "tool_call_id": "c2", "content": "2"},
                {"role": "user", "content": "And?"},
            ],
        )  # fmt: skip
    assert answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "add"
    text = prompt(engine)
    assert text.count("<|start|>") == 5
    assert "Be brief.\n\nYou may call" in text
    assert json.dumps(ADD) in text
    assert text.count('<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>') == 2
    assert "<tool_response>\n1\n</tool_response>\n\n<tool_response>\n2\n</tool_response>\n\nAnd?" in text


async def test_reasoning_begun_in_the_prompt(http: httpx.AsyncClient, engine: FakeClient) -> None:
    engine.reply = lambda _: "I see.\n</think>\n\nYes"
    for kwargs, reasoning, content in (
        ({"open": True}, "I see.", "Yes"),
        ({"enable_thinking": False}, None, "I see.\n</think>\n\nYes"),
    ):
        answer = await post(http, chat_template_kwargs=kwargs)
        message = answer["choices"][0]["message"]
        assert (message.get("reasoning_content"), message["content"]) == (reasoning, content)
    hidden = await post(http, chat_template_kwargs={"open": True}, include_reasoning=False)
    assert "reasoning_content" not in hidden["choices"][0]["message"]
    assert hidden["choices"][0]["message"]["content"] == "Yes"
    whole = await post(http, chat_template_kwargs={"open": True}, separate_reasoning=False)
    assert whole["choices"][0]["message"]["content"] == "I see.\n</think>\n\nYes"
    for off in ({"reasoning_effort": "none"}, {"thinking": {"type": "disabled"}}):
        await post(http, **off)
        assert prompt(engine).endswith("<think>\n\n</think>\n\n")
    await post(http, reasoning_effort="low")
    assert engine.requests[-1].constraint is None  # a hint; </think> is no single token here


async def test_a_constraint_holds_after_the_reasoning(http: httpx.AsyncClient, engine: FakeClient) -> None:
    engine.reply = lambda _: 'So.</think>{"a": 1}'
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": PARAMETERS}}
    answer = await post(http, chat_template_kwargs={"open": True}, response_format=schema)
    assert answer["choices"][0]["message"]["content"] == '{"a": 1}'
    constraint = engine.requests[-1].constraint
    assert constraint is not None
    assert constraint.after == "</think>"
    # With tools: calls, or what the schema says.
    engine.reply = lambda _: '{"a": 1}'
    answer = await post(http, tools=[ADD], response_format=schema)
    assert answer["choices"][0]["message"]["content"] == '{"a": 1}'
    assert "structural_tag" in engine.requests[-1].constraint.grammar  # type: ignore[union-attr]


async def test_parsers_can_be_named() -> None:
    engine = engine_with(TEMPLATE)
    engine.reply = lambda _: "Sure.</think>[now()]"
    settings = ServerSettings(tool_call_parser="pythonic", reasoning_parser="deepseek_r1")
    app = create_app(engine, engine.tokenizer, settings)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        message = (await post(http, tools=[NOW]))["choices"][0]["message"]
    assert message["reasoning_content"] == "Sure."
    assert message["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}
