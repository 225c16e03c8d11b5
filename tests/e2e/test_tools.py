"""Tools and reasoning from a real server, asked for by the openai client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import jsonschema
import pytest
from openai import BadRequestError, OpenAI, pydantic_function_tool
from pydantic import BaseModel, ConfigDict

from .running import Server, running
from .tiny import write_tiny_model

ASK: Any = [{"role": "user", "content": "What is the weather in Paris for the next 3 days?"}]


class GetWeather(BaseModel):
    """The weather of a city."""

    model_config = ConfigDict(extra="forbid")

    city: str
    days: int
    units: Literal["celsius", "fahrenheit"]


class Add(BaseModel):
    """The sum of two numbers."""

    a: int
    b: int


class Report(BaseModel):
    city: str
    warm: bool


TOOLS: Any = [pydantic_function_tool(GetWeather, name="get_weather"), pydantic_function_tool(Add, name="add")]


def named(name: str) -> Any:
    return {"type": "function", "function": {"name": name}}


def test_parse_gives_models(real: OpenAI) -> None:
    """Item 7 of issue 5: .parse() with pydantic_function_tool."""
    answer = real.chat.completions.parse(
        model="smollm2", messages=ASK, tools=TOOLS, tool_choice=named("get_weather"), temperature=0
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    parsed = call.function.parsed_arguments
    assert isinstance(parsed, GetWeather)
    assert parsed.city == "Paris"
    assert parsed.days == 3
    assert choice.message.content is None


def test_the_streaming_helper(real: OpenAI) -> None:
    """Item 7: events of client.chat.completions.stream; deltas joined are the whole."""
    ask: dict[str, Any] = {
        "model": "smollm2", "messages": ASK, "tools": TOOLS, "tool_choice": "required", "temperature": 0,
        "parallel_tool_calls": False,
    }  # fmt: skip
    deltas: list[str] = []
    done = []
    with real.chat.completions.stream(**ask) as stream:
        for event in stream:
            if event.type == "tool_calls.function.arguments.delta":
                deltas.append(event.arguments_delta)
            elif event.type == "tool_calls.function.arguments.done":
                done.append(event)
        final = stream.get_final_completion()
    calls = final.choices[0].message.tool_calls
    assert calls is not None
    assert len(calls) == len(done) == 1
    assert "".join(deltas) == calls[0].function.arguments
    assert isinstance(calls[0].function.parsed_arguments, GetWeather | Add)
    whole = real.chat.completions.create(**ask)
    assert whole.choices[0].message.tool_calls[0].function.arguments == calls[0].function.arguments


def test_a_round_of_tools(real: OpenAI) -> None:
    """As a tool runner does it: call, run, give the result back, get an answer that parses."""
    messages = list(ASK)
    first = real.chat.completions.parse(
        model="smollm2", messages=messages, tools=TOOLS, tool_choice="required", parallel_tool_calls=False,
        temperature=0,
    ).choices[0].message  # fmt: skip
    assert first.tool_calls
    messages.append(first.model_dump(exclude_none=True))
    for call in first.tool_calls:
        result = {"city": "Paris", "celsius": 21, "given": call.function.arguments}
        messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)})
    second = real.chat.completions.parse(
        model="smollm2", messages=messages, tools=TOOLS, tool_choice="none", response_format=Report,
        temperature=0, max_tokens=60,
    ).choices[0]  # fmt: skip
    assert isinstance(second.message.parsed, Report)
    assert second.finish_reason == "stop"


@pytest.mark.slow
def test_required_calls_are_valid_whatever_is_drawn(real: OpenAI) -> None:
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
    answer = real.chat.completions.create(
        model="smollm2", messages=ASK, tools=TOOLS, tool_choice="required", temperature=1.5, seed=5, n=6,
        max_tokens=400,
    )  # fmt: skip
    for choice in answer.choices:
        if choice.finish_reason == "length":
            continue
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        for call in choice.message.tool_calls or ():
            jsonschema.validate(json.loads(call.function.arguments), schemas[call.function.name])


@pytest.mark.slow
def test_strict_tools_hold_once_a_call_begins(real: OpenAI, real_server: Server) -> None:
    """tool_choice auto: the answer is continued from the tag, after which only a valid call may come."""
    begun = [*ASK, {"role": "assistant", "content": "Let me look.\n<tool_call>"}]
    body: Any = {"continue_final_message": True}
    for seed in range(3):
        answer = real.chat.completions.create(
            model="smollm2",
            messages=begun,
            tools=TOOLS,
            temperature=1,
            seed=seed,
            max_tokens=150,
            extra_body=body,
        )
        assert answer.choices[0].finish_reason in ("stop", "length", "tool_calls")
    free = real.chat.completions.create(
        model="smollm2", messages=ASK, tools=TOOLS, temperature=0, max_tokens=20
    )
    assert free.choices[0].message.content
    real_server.await_idle()


def test_bad_tools_are_refused_and_the_next_works(real: OpenAI) -> None:
    """B64."""
    for bad in (
        {"tools": TOOLS, "tool_choice": named("nope")},
        {"tools": [*TOOLS, TOOLS[0]]},
        {"tool_choice": "required"},
    ):
        with pytest.raises(BadRequestError):
            real.chat.completions.create(model="smollm2", messages=ASK, **bad)  # type: ignore[call-overload]
    plain = real.chat.completions.create(
        model="smollm2", messages=ASK, tools=TOOLS, tool_choice="none", max_tokens=5
    )
    assert plain.choices[0].message.content


THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n{% if enable_thinking is not defined or enable_thinking %}<think>\n"
    "{% else %}<think>\n\n</think>\n\n{% endif %}"
)


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    """Random weights that think in bytes."""
    folder = tmp_path_factory.mktemp("thinker")
    model = write_tiny_model(
        folder / "thinker.gguf", more_specials=("<think>", "</think>"), template=THINKING, context=1024
    )
    with running(model, "--threads", "1", env=[("FOURFOLD_CACHE_DIR", str(folder))]) as server:
        yield OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def ask_thinker(thinker: OpenAI, budget: int, **more: Any) -> Any:
    return thinker.chat.completions.create(
        model="thinker", messages=[{"role": "user", "content": "hm"}], temperature=1,
        extra_body={"thinking_budget": budget}, **more,
    )  # fmt: skip


@pytest.mark.parametrize("budget", [0, 1, 20])
def test_budgets_of_reasoning(thinker: OpenAI, budget: int) -> None:
    for seed in range(3):
        answer = ask_thinker(thinker, budget, seed=seed, max_tokens=budget + 30)
        # The tag that ends it is one more token.
        assert answer.usage.completion_tokens_details.reasoning_tokens <= budget + 1
        assert answer.choices[0].message.content


@pytest.mark.parametrize("unique", [False, True])
def test_a_schema_after_the_reasoning(thinker: OpenAI, unique: bool) -> None:
    """By grammar, and by validation (uniqueItems)."""
    schema = {
        "type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 2, "maxItems": 3, "uniqueItems": unique,
    }  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for seed in range(3):
        answer = ask_thinker(thinker, 10, seed=seed, max_tokens=300, response_format=form)
        jsonschema.validate(json.loads(answer.choices[0].message.content), schema)
        assert answer.choices[0].finish_reason == "stop"


def test_streams_of_reasoning(thinker: OpenAI) -> None:
    ask: dict[str, Any] = {"seed": 3, "max_tokens": 60}
    whole = ask_thinker(thinker, 20, **ask).choices[0].message
    reasoning, content = "", ""
    for chunk in ask_thinker(thinker, 20, stream=True, **ask):
        delta = chunk.choices[0].delta
        reasoning += (delta.model_extra or {}).get("reasoning_content") or ""
        content += delta.content or ""
    assert (reasoning, content) == (whole.reasoning_content, whole.content)
