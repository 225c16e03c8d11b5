"""Whatever bytes come, the answer is an error object, and the next request is served."""

from __future__ import annotations

import gzip
import json
from contextlib import suppress

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fourfold.errors import InvalidRequestError
from fourfold.server.app import create_app
from fourfold.server.settings import ServerSettings
from fourfold.server.wire import BodyReader, ChatBody, CompletionBody, decode_object
from fourfold.text.tokenizer import Tokenizer

from .fakes import FakeClient

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"

BAD = {
    "empty": b"",
    "colon after the brace": b'{: "a"}',
    "array": b"[]",
    "number": b"3",
    "string": b'"x"',
    "null": b"null",
    "cut off": b'{"messages": [',
    "GBK": '{"messages": [{"role": "user", "content": "你好"}]}'.encode("gbk"),
    "Latin-1": '{"messages": [{"role": "user", "content": "café"}]}'.encode("latin-1"),
    "UTF-16": '{"messages": []}'.encode("utf-16"),
    "lone surrogate": b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    "deep": b'{"messages": ' + b"[" * 100_000,
    "deep and closed": b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    "deep unknown": b'{"x": ' + b'{"a":' * 5000 + b"1" + b"}" * 5001,
    "not a number": b'{"temperature": NaN}',
    "infinite": b'{"temperature": 1e999}',
    "huge integer": b'{"messages": [{"role": "user", "content": "a"}], "seed": 1' + b"0" * 5000 + b"}",
    "huge negative": b'{"messages": 1, "prompt": 1, "tokens": -1' + b"0" * 30 + b"}",
    "trailing": b'{"messages": []} x',
    "zeros": bytes(100),
    "gzip": gzip.compress(b"{}"),
    "form": b"prompt=a&model=b",
}


@pytest.mark.parametrize("name", BAD)
async def test_bad_bodies(http: httpx.AsyncClient, engine: FakeClient, name: str) -> None:
    """B11, B12."""
    for path in (CHAT, "/v1/completions", "/v1/tokenize", "/v1/detokenize"):
        response = await http.post(path, content=BAD[name], headers={"content-type": "application/json"})
        assert response.status_code == 400, (path, response.text)
        error = response.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["message"]
    assert not engine.requests
    assert (await http.post("/v1/completions", json={"prompt": "a"})).status_code == 200


async def test_content_type_does_not_matter(http: httpx.AsyncClient) -> None:
    """curl -d says it is a form; OpenAI's server does not mind either."""
    response = await http.post(
        "/v1/completions",
        content=b'{"prompt": "a"}',
        headers={"content-type": "application/x-www-form-urlencoded"},
    )
    assert response.status_code == 200


async def test_body_limit(engine: FakeClient, tokenizer: Tokenizer) -> None:
    app = create_app(engine, tokenizer, ServerSettings(max_body_bytes=1000))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        body = json.dumps({"prompt": "a", "user": "x" * 1000}).encode()

        async def pieces(size: int):  # type: ignore[no-untyped-def]
            for start in range(0, len(body), size):
                yield body[start : start + size]

        for content in (body, pieces(100)):  # with a length, and without one
            response = await http.post("/v1/completions", content=content)
            assert response.status_code == 413
            assert "1000" in response.json()["error"]["message"]
        assert (await http.post("/v1/completions", json={"prompt": "a"})).status_code == 200


async def test_bad_content_length(http: httpx.AsyncClient) -> None:
    for value in ("-1", "x", "1" * 40):
        response = await http.post("/v1/completions", content=b"{}", headers={"content-length": value})
        assert response.status_code in (400, 413)


async def test_paths_and_methods(http: httpx.AsyncClient) -> None:
    response = await http.get("/nowhere")
    assert response.status_code == 404
    assert response.json()["error"]["type"] == "not_found_error"
    response = await http.get(CHAT)
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
    assert "POST" in response.json()["error"]["message"]
    response = await http.post("/v1/completions", json={"model": "gpt-9", "prompt": "a"})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    assert (await http.get("/v1/models/gpt-9")).status_code == 404


async def test_unforeseen_errors_do_not_leak(
    http: httpx.AsyncClient, engine: FakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    def explode(_: object) -> str:
        raise RuntimeError("secret detail")

    engine.reply = explode
    for stream in (False, True):
        response = await http.post("/v1/completions", json={"prompt": "a", "stream": stream})
        assert response.status_code == 500
        assert "secret" not in response.text
    assert "secret detail" in caplog.text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
FIELDS = sorted({*CompletionBody.__struct_fields__, *ChatBody.__struct_fields__})


@given(data=st.binary(max_size=200))
def test_any_bytes_are_an_object_or_refused(data: bytes) -> None:
    with suppress(InvalidRequestError):
        assert isinstance(decode_object(data), dict)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(body=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4))
async def test_any_json_is_answered(http: httpx.AsyncClient, body: dict[str, object]) -> None:
    """Whatever the fields hold, the answer is 200, a stream, or a refusal; never a 500."""
    for path, base in (
        ("/v1/completions", {"prompt": "a"}),
        (CHAT, {"messages": [{"role": "user", "content": "a"}]}),
    ):
        response = await http.post(path, json={**base, **body})
        assert response.status_code in (200, 400, 404, 501), response.text


@given(name=st.sampled_from(FIELDS), value=JSON)
def test_reader_names_the_field(name: str, value: object) -> None:
    kind = ChatBody if name in ChatBody.__struct_fields__ else CompletionBody
    base = {"messages": []} if kind is ChatBody else {}
    refusal = ""
    try:
        BodyReader().read(json.dumps({**base, name: value}).encode(), kind)
    except InvalidRequestError as error:
        refusal = str(error)
    assert not refusal or name in refusal or "JSON" in refusal
