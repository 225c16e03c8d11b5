"""Constrained answers from a real server, asked for by the openai client."""

from __future__ import annotations

import json
from typing import Any, Literal

import httpx
import jsonschema
import pytest
from openai import BadRequestError, OpenAI
from pydantic import BaseModel, ConfigDict, Field

from .running import Server

ASK: Any = [{"role": "user", "content": "Who is the tallest of the three?"}]


class Pet(BaseModel):
    model_config = ConfigDict(extra="forbid")

    kind: Literal["cat", "dog"]
    age: int = Field(ge=0, le=30)


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=12)
    active: bool
    pets: list[Pet] = Field(max_length=2)


def test_parse_with_a_tiny_model(tiny: OpenAI, tiny_server: Server) -> None:
    """Random weights give what only the grammar keeps in order."""
    answer = tiny.chat.completions.parse(
        model="tiny", messages=ASK, response_format=Person, max_tokens=300, temperature=1, seed=1
    )
    parsed = answer.choices[0].message.parsed
    assert parsed is not None
    assert len(parsed.pets) <= 2
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.model_extra["forced_tokens"] > 20  # type: ignore[index]
    tiny_server.await_idle()


def test_parse_streamed(tiny: OpenAI) -> None:
    with tiny.chat.completions.stream(
        model="tiny", messages=ASK, response_format=Person, max_tokens=300, temperature=1, seed=2
    ) as stream:
        pieces = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    parsed = final.choices[0].message.parsed
    assert parsed is not None
    assert json.loads("".join(pieces)) == json.loads(parsed.model_dump_json())


def test_every_sibling_is_valid(tiny: OpenAI) -> None:
    schema = Person.model_json_schema()
    answer = tiny.chat.completions.create(
        model="tiny", messages=ASK, n=6, temperature=1, seed=3, max_tokens=300,
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": schema}},
    )  # fmt: skip
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content or ""), schema)


@pytest.mark.parametrize(
    ("extra", "allowed"),
    [
        ({"guided_choice": ["north", "south"]}, {"north", "south"}),
        ({"guided_regex": "(ab|cd)e"}, {"abe", "cde"}),
        ({"grammar": 'root ::= "x" | "yz"'}, {"x", "yz"}),
        ({"structured_outputs": {"grammar": 'start: "x" | "yz"'}}, {"x", "yz"}),
        ({"response_format": {"type": "structural_tag", "format": {
            "type": "tag", "begin": "<t>", "content": {"type": "regex", "pattern": "[xy]"}, "end": "</t>"}}},
         {"<t>x</t>", "<t>y</t>"}),
    ],
)  # fmt: skip
def test_other_constraints(tiny: OpenAI, extra: dict[str, Any], allowed: set[str]) -> None:
    for seed in range(4):
        answer = tiny.completions.create(
            model="tiny", prompt="Go", temperature=1, seed=seed, max_tokens=20, extra_body=extra
        )
        assert answer.choices[0].text in allowed
        assert answer.choices[0].finish_reason == "stop"


def test_validated_answers(tiny: OpenAI, tiny_server: Server) -> None:
    """uniqueItems and not are beyond the grammar: an answer that breaks them is never shown."""
    schema = {
        "type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9, "not": {"const": 7}},
        "uniqueItems": True, "minItems": 3, "maxItems": 3,
    }  # fmt: skip
    for seed in range(5):
        response = httpx.post(
            f"{tiny_server.url}/v1/completions",
            json={"prompt": "x", "temperature": 1, "seed": seed, "max_tokens": 50, "guided_json": schema},
            timeout=60,
        )
        assert response.status_code == 200, response.text
        body = response.json()
        assert body["structured_output"]["guarantee"] == "validation"
        jsonschema.validate(json.loads(body["choices"][0]["text"]), schema)
    tiny_server.await_idle()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "extra",
    [{"guided_regex": "foo**"}, {"guided_json": {"$ref": "http://127.0.0.1:9/x"}}, {"grammar": "root"}],
)
def test_a_bad_one_is_refused_and_the_next_works(tiny: OpenAI, extra: dict[str, Any], stream: bool) -> None:
    """B49, B53."""
    with pytest.raises(BadRequestError):
        tiny.chat.completions.create(model="tiny", messages=ASK, extra_body=extra, stream=stream)
    assert tiny.completions.create(model="tiny", prompt="a", max_tokens=1).choices


def test_the_real_model(real: OpenAI, real_server: Server) -> None:
    answer = real.chat.completions.parse(
        model="smollm2", response_format=Person, max_tokens=300, temperature=0,
        messages=[{"role": "user", "content": "Describe Anna, who has a cat of 3 years, as JSON."}],
    )  # fmt: skip
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.parsed is not None
    again = real.chat.completions.create(
        model="smollm2", max_tokens=300, temperature=0, logprobs=True,
        messages=[{"role": "user", "content": "Describe Anna, who has a cat of 3 years, as JSON."}],
        response_format={"type": "json_object", "schema": Person.model_json_schema()},
    )  # type: ignore[call-overload]  # fmt: skip
    # With logprobs no token is forced, so this is the same answer with masks only.
    assert json.loads(again.choices[0].message.content) == json.loads(answer.choices[0].message.content or "")
    real_server.await_idle()
