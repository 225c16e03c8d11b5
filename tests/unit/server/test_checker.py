"""Constraints beside the event loop: the same whichever way they are made, and nothing hangs on a bad one."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from fourfold.errors import InvalidRequestError, OverloadedError
from fourfold.grammar.sources import make_constraint
from fourfold.server.checker import MAX_WAITING, SMALL, Checker
from fourfold.server.wire import MAX_LIMITED_BYTES
from fourfold.text.tools import MAX_TOOLS_BYTES

pytestmark = pytest.mark.anyio


def large(last: Any) -> dict[str, Any]:
    """A schema beyond SMALL whose last property is `last`."""
    properties = {f"property {n}": {"type": "string", "maxLength": n % 9} for n in range(1500)}
    schema = {"type": "object", "properties": {**properties, "last": last}, "additionalProperties": False}
    assert len(json.dumps(schema)) > SMALL
    return schema


async def test_large_ones_are_made_in_a_process_and_are_the_same() -> None:
    checker = Checker()
    try:
        good = large({"type": "array", "uniqueItems": True})
        made = await checker.make("json", good, "guided_json")
        assert checker._process is not None
        assert made == make_constraint("json", good, "guided_json")
        assert made.guarantee == "validation"
        with pytest.raises(
            InvalidRequestError, match="#/properties/last/type: 'str' is not a type"
        ) as refused:
            await checker.make("json", large({"type": "str"}), "guided_json")
        assert (refused.value.param, refused.value.code) == ("guided_json", "invalid_json_schema")
        first = checker._process
        small = {"type": "integer"}
        assert await checker.make("json", small, "f") == make_constraint("json", small, "f")
        assert checker._process is first
    finally:
        await checker.close()


async def test_what_takes_too_long_is_refused_and_the_next_is_made() -> None:
    checker = Checker(most_seconds=0.001)
    with pytest.raises(InvalidRequestError, match=r"takes more than 0\.001 s"):
        await checker.make("json", large({}), "guided_json")
    checker._most_seconds = 60
    try:
        assert (await checker.make("json", large({}), "guided_json")).guarantee == "grammar"
    finally:
        await checker.close()


async def test_a_process_that_dies_and_clients_that_leave() -> None:
    checker = Checker()
    try:
        task = asyncio.ensure_future(checker.make("json", large({}), "f"))
        while checker._process is None:
            await asyncio.sleep(0.001)
        checker._process.kill()
        with pytest.raises(InvalidRequestError, match="memory"):
            await task
        leaving = asyncio.ensure_future(checker.make("json", large({}), "f"))
        await asyncio.sleep(0.05)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        assert (await checker.make("json", large({}), "f")).guarantee == "grammar"
    finally:
        await checker.close()


async def test_not_too_many_wait() -> None:
    checker = Checker()
    try:
        tasks = [asyncio.ensure_future(checker.make("json", large({"minLength": n}), "f")) for n in range(12)]
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert sum(isinstance(one, OverloadedError) for one in done) == 12 - MAX_WAITING
        assert not any(isinstance(one, Exception) and not isinstance(one, OverloadedError) for one in done)
    finally:
        await checker.close()


@pytest.mark.parametrize("field", ["guided_json", "tools", "response_format", "guided_choice"])
async def test_sizes_are_checked_before_anything_is_decoded(http: httpx.AsyncClient, field: str) -> None:
    huge = json.dumps(list(range(MAX_LIMITED_BYTES // 6)))
    content = f'{{"messages": [{{"role": "user", "content": "a"}}], "{field}": {huge}}}'
    response = await http.post("/v1/chat/completions", content=content)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == field
    assert str(MAX_LIMITED_BYTES) in error["message"]


async def test_tools_have_a_limit_together(http: httpx.AsyncClient) -> None:
    tool = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(100)}}
    tools = [{"type": "function", "function": {"name": f"f{n}", "parameters": tool}} for n in range(500)]
    assert MAX_TOOLS_BYTES < len(json.dumps(tools, separators=(",", ":"))) < MAX_LIMITED_BYTES
    for path in ("/v1/chat/completions", "/v1/tokenize"):
        body = {"messages": [{"role": "user", "content": "a"}], "tools": tools}
        response = await http.post(path, json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")
        assert str(MAX_TOOLS_BYTES) in response.json()["error"]["message"]
