"""From the fields of a body to the constraint that the engine gets."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from fourfold.types import EngineEvent

from .fakes import FakeClient

PATH = "/v1/chat/completions"
USER = [{"role": "user", "content": "ab"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
UNIQUE = {"type": "array", "uniqueItems": True}

pytestmark = pytest.mark.anyio


async def post(http: httpx.AsyncClient, status: int, **body: Any) -> httpx.Response:
    response = await http.post(PATH, json={"messages": USER, **body})
    assert response.status_code == status, response.text
    return response


@pytest.mark.parametrize(
    "body",
    [
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "strict": True, "schema": SCHEMA},
            }
        },
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA), "guided_decoding_backend": "xgrammar"},
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
        {"json_schema": json.dumps(SCHEMA)},
        {"json_schema": SCHEMA, "grammar": "", "guided_choice": []},
    ],
)
async def test_every_spelling_of_one_schema(
    http: httpx.AsyncClient, engine: FakeClient, body: dict[str, Any]
) -> None:
    response = await post(http, 200, **body)
    (request,) = engine.requests
    assert request.constraint is not None
    assert '"a"' in request.constraint.grammar
    assert response.headers["x-fourfold-guarantee"] == "grammar"
    assert response.json()["structured_output"] == {"guarantee": "grammar", "validated": []}


@pytest.mark.parametrize(
    ("body", "needle"),
    [
        ({"guided_regex": "a+b"}, "a+b"), ({"regex": "a+b"}, "a+b"),
        ({"guided_choice": ["yes", "no"]}, "yes"), ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes"),
        ({"guided_grammar": 'start: "q"'}, '"q"'), ({"ebnf": 'root ::= "q"'}, '"q"'),
        ({"grammar": 'root ::= "q"'}, '"q"'), ({"structured_outputs": {"grammar": 'start: "q"'}}, '"q"'),
        ({"response_format": {"type": "json_object"}}, "object"),
        ({"structured_outputs": {"json_object": True}}, "object"),
    ],
)  # fmt: skip
async def test_the_other_kinds(
    http: httpx.AsyncClient, engine: FakeClient, body: dict[str, Any], needle: str
) -> None:
    await post(http, 200, **body)
    (request,) = engine.requests
    assert request.constraint is not None
    assert needle in request.constraint.grammar


async def test_without_one_nothing_changes(http: httpx.AsyncClient, engine: FakeClient) -> None:
    response = await post(http, 200, response_format={"type": "text"}, structured_outputs={}, grammar=None)
    assert engine.requests[0].constraint is None
    assert "x-fourfold-guarantee" not in response.headers
    assert "structured_output" not in response.json()


async def test_two_at_once_are_refused(http: httpx.AsyncClient, engine: FakeClient) -> None:
    error = (await post(http, 400, regex="a", guided_json=SCHEMA)).json()["error"]
    assert "regex" in error["message"]
    assert "guided_json" in error["message"]
    assert not engine.requests


async def test_what_only_validation_guarantees_is_said(http: httpx.AsyncClient, engine: FakeClient) -> None:
    body = {"response_format": {"type": "json_object", "schema": UNIQUE}}
    response = await post(http, 200, **body)
    assert response.headers["x-fourfold-guarantee"] == "validation"
    assert response.json()["structured_output"] == {
        "guarantee": "validation",
        "validated": ["#: uniqueItems"],
    }
    streamed = await http.post(PATH, json={"messages": USER, "stream": True, **body})
    assert streamed.headers["x-fourfold-guarantee"] == "validation"


async def test_siblings_get_the_same_constraint(http: httpx.AsyncClient, engine: FakeClient) -> None:
    await post(http, 200, n=3, regex="a+")
    assert len(engine.requests) == 3
    assert len({request.constraint for request in engine.requests}) == 1


async def test_completions_take_them_too(http: httpx.AsyncClient, engine: FakeClient) -> None:
    response = await http.post("/v1/completions", json={"prompt": "a", "guided_regex": "a+"})
    assert response.status_code == 200, response.text
    assert engine.requests[0].constraint is not None
    assert response.json()["structured_output"]["guarantee"] == "grammar"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_from_the_engine_is_a_400(
    http: httpx.AsyncClient, engine: FakeClient, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What only the model's own vocabulary shows to be too large."""

    async def refuse(request: Any) -> Any:
        yield EngineEvent(
            request_id=request.request_id, finish_reason="error", error="too large", refused_param="regex"
        )

    monkeypatch.setattr(engine, "submit", refuse)
    error = (await post(http, 400, regex="a", stream=stream)).json()["error"]
    assert (error["param"], error["message"]) == ("regex", "too large")


async def test_forced_tokens_are_counted_apart(
    http: httpx.AsyncClient, engine: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def forced(request: Any) -> Any:
        yield EngineEvent(request_id=request.request_id, token_ids=[97, 98, 99], forced_tokens=2)
        yield EngineEvent(request_id=request.request_id, token_ids=[97], finish_reason="stop")

    monkeypatch.setattr(engine, "submit", forced)
    usage = (await post(http, 200, regex="a")).json()["usage"]
    assert usage["completion_tokens"] == 4
    assert usage["completion_tokens_details"] == {"forced_tokens": 2}
