"""The official client against a real server on loopback."""

from __future__ import annotations

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from fourfold.errors import OverloadedError
from fourfold.server.settings import ServerSettings

from .conftest import Start
from .fakes import FakeClient

USER = [{"role": "user", "content": "ab"}]


@pytest.fixture
def client(live: Start) -> OpenAI:
    server = live(ServerSettings(api_keys=("secret",), served_model_names=("small", "tiny")))
    return OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0)


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["small", "tiny"]
    assert client.models.retrieve("tiny").owned_by == "fourfold"


def test_chat(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=USER, n=2, logprobs=True, top_logprobs=1, seed=1
    )
    assert [choice.message.content for choice in answer.choices] == ["Hello world"] * 2
    assert answer.model == "tiny"
    assert answer.choices[0].finish_reason == "stop"
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert logprobs.content[0].token == "Hello"
    assert logprobs.content[0].top_logprobs[0].token == "a"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 14
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_chat_stream(client: OpenAI) -> None:
    text: dict[int, str] = {}
    usage = None
    for chunk in client.chat.completions.create(
        model="tiny", messages=USER, n=2, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage
        for choice in chunk.choices:
            text[choice.index] = text.get(choice.index, "") + (choice.delta.content or "")
    assert text == {0: "Hello world", 1: "Hello world"}
    assert usage is not None
    assert usage.completion_tokens == 14


def test_completions(client: OpenAI) -> None:
    answer = client.completions.create(
        model="small", prompt=["ab", "cd"], echo=True, logprobs=1, stop=[" wor"], max_tokens=9
    )
    assert [choice.text for choice in answer.choices] == ["abHello", "cdHello"]
    assert answer.choices[0].logprobs is not None
    stream = client.completions.create(model="small", prompt="ab", stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "Hello world"


def test_errors(client: OpenAI, engine: FakeClient) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-9", messages=USER)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="tiny", messages=USER, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    engine.reply = lambda _: OverloadedError("full")
    for stream in (False, True):
        with pytest.raises(openai.RateLimitError):
            client.chat.completions.create(model="tiny", messages=USER, stream=stream)
    engine.reply = lambda _: "Hello world"
    engine.fail_after = (2, OverloadedError("full"))
    with pytest.raises(openai.APIError, match="full"):
        list(client.chat.completions.create(model="tiny", messages=USER, stream=True))


def test_leaving_a_stream_aborts(client: OpenAI, engine: FakeClient) -> None:
    engine.step = 0.02
    engine.reply = lambda _: "abcd" * 50
    stream = client.chat.completions.create(model="tiny", messages=USER, stream=True, max_tokens=90)
    next(iter(stream))
    stream.close()
    engine.step = 0
    client.chat.completions.create(model="tiny", messages=USER, max_tokens=1)
    assert len(engine.aborted) == 1


async def test_async_client(live: Start) -> None:
    server = live()
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        answer = await client.chat.completions.create(model="tiny", messages=USER)
        assert answer.choices[0].message.content == "Hello world"


test_async_client.pytestmark = [pytest.mark.anyio]  # type: ignore[attr-defined]
