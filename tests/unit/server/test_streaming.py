"""Design rule 6 over HTTP: a stream says what the whole answer says, however the tokens came in."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .fakes import FakeClient
from .sse import stream, texts

pytestmark = pytest.mark.anyio

TEXT = st.text(st.sampled_from('abcdHelo wé😀\n"\\'), max_size=20)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    reply=TEXT,
    per_event=st.integers(1, 5),
    stop=st.lists(TEXT.filter(bool), max_size=2),
    n=st.integers(1, 3),
    max_tokens=st.integers(1, 30),
    logprobs=st.none() | st.integers(0, 2),
    echo=st.booleans(),
    include=st.booleans(),
)
async def test_streams_say_what_answers_say(
    http: httpx.AsyncClient,
    engine: FakeClient,
    reply: str,
    per_event: int,
    stop: list[str],
    n: int,
    max_tokens: int,
    logprobs: int | None,
    echo: bool,
    include: bool,
) -> None:
    engine.reply = lambda _: reply
    engine.per_event = per_event
    common: dict[str, Any] = {
        "n": n, "stop": stop, "max_tokens": max_tokens, "include_stop_str_in_output": include,
    }  # fmt: skip
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "ab", "logprobs": logprobs, "echo": echo},
        "/v1/chat/completions": {
            "messages": [{"role": "user", "content": "ab"}],
            "logprobs": logprobs is not None,
            "top_logprobs": logprobs,
        },
    }
    for path, body in bodies.items():
        response = await http.post(path, json={**common, **body})
        assert response.status_code == 200, response.text
        whole = response.json()
        chunks = await stream(http, path, **common, **body, stream_options={"include_usage": True})
        assert chunks[-1]["usage"] == whole["usage"]
        said = texts(chunks)
        for choice in whole["choices"]:
            own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
            text = choice["text"] if "text" in choice else choice["message"]["content"]
            assert said[choice["index"]] == text
            assert [c["finish_reason"] for c in own if c["finish_reason"]] == [choice["finish_reason"]]
            assert own[-1]["stop_reason"] == choice["stop_reason"]
            parts = [c["logprobs"] for c in own if c["logprobs"]]
            for column in choice["logprobs"] or ():
                joined = [entry for part in parts for entry in part[column] or ()]
                assert joined == (choice["logprobs"][column] or [])
    assert not engine.active
