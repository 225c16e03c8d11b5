"""Many streams at once: nothing is lost, nothing is mixed up, and everybody gets what he gets alone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from openai import AsyncOpenAI

from .running import Server

TOKENS = 128


async def _stream(client: AsyncOpenAI, model: str, prompt: list[int]) -> tuple[list[str], str, int]:
    """Token ids as the API names them, text, and the usage's count."""
    tokens: list[str] = []
    text, counted, finished = "", 0, 0
    stream = await client.completions.create(
        model=model, prompt=prompt, max_tokens=TOKENS, temperature=0, logprobs=0, stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True, "return_tokens_as_token_ids": True},
    )  # fmt: skip
    async for chunk in stream:
        for choice in chunk.choices:
            text += choice.text
            finished += choice.finish_reason is not None
            if choice.logprobs is not None:
                tokens += choice.logprobs.tokens or []
        if chunk.usage is not None:
            counted = chunk.usage.completion_tokens
    assert finished == 1
    return tokens, text, counted


async def _check(server: Server, count: int, alone: int) -> None:
    def prompt(index: int) -> list[int]:
        return [(index * 37 + i * i) % 250 for i in range(1 + index % 40)]

    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=600) as client:
        generated = server.metrics()["vllm:generation_tokens_total"]
        results = await asyncio.gather(*(_stream(client, server.name, prompt(i)) for i in range(count)))
        for tokens, _, counted in results:
            assert len(tokens) == counted == TOKENS
        for index in range(0, count, count // alone):
            assert await _stream(client, server.name, prompt(index)) == results[index]
    assert server.metrics()["vllm:generation_tokens_total"] - generated >= count * TOKENS
    assert server.await_idle()["balanced"]


@pytest.mark.anyio
async def test_64_streams(tiny_server: Server) -> None:
    await _check(tiny_server, 64, 8)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.anyio
async def test_64_streams_of_the_real_model(real_server: Server) -> None:
    await _check(real_server, 64, 8)


@pytest.mark.anyio
async def test_more_streams_than_places(tiny_server: Server) -> None:
    """B19: what is above the batch's places waits and is served."""
    async with AsyncOpenAI(base_url=f"{tiny_server.url}/v1", api_key="none", max_retries=0) as client:
        ask: dict[str, Any] = {"model": "tiny", "max_tokens": 3, "seed": 1, "n": 100}
        answer = await client.completions.create(prompt="ab", **ask)
    assert [choice.index for choice in answer.choices] == list(range(100))
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 300
