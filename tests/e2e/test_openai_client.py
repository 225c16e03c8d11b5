"""The official client against a real server, engine and model."""

from __future__ import annotations

import math
import os
import signal

import openai
import pytest
from openai import OpenAI

from .running import Server, wait_for

CAPITAL = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]


def test_chat(real: OpenAI) -> None:
    answer = real.chat.completions.create(model="smollm2", messages=CAPITAL, temperature=0, max_tokens=16)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    # The template's system message is part of the prompt; transformers' own rendering has as many tokens.
    assert answer.usage.prompt_tokens == 42
    chunks = list(
        real.chat.completions.create(
            model="smollm2", messages=CAPITAL, temperature=0, max_tokens=16, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == answer.choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens


def test_completion(real: OpenAI) -> None:
    answer = real.completions.create(
        model="smollm2", prompt="The capital of France is", temperature=0, max_tokens=8
    )
    assert answer.choices[0].text.startswith(" Paris")
    stream = real.completions.create(
        model="smollm2", prompt="The capital of France is", temperature=0, max_tokens=8, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == answer.choices[0].text


def test_stop_string(real: OpenAI) -> None:
    """B01: the letters are no single token, and none of them is ever sent."""
    ask = {"model": "smollm2", "prompt": "a b c d e f g h i j k l", "temperature": 0, "max_tokens": 40}
    whole = real.completions.create(**ask)
    stop = "q r s t"
    assert stop in whole.choices[0].text
    cut = real.completions.create(**ask, stop=[stop])
    assert cut.choices[0].text == whole.choices[0].text.partition(stop)[0]
    assert cut.choices[0].finish_reason == "stop"
    chunks = list(real.completions.create(**ask, stop=[stop], stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == cut.choices[0].text
    assert chunks[-1].choices[0].finish_reason == "stop"
    # B02: one that never matches changes nothing, and no chunk is empty but perhaps the last.
    chunks = list(real.completions.create(**ask, stop=["zzzz"], stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert all(chunk.choices[0].text for chunk in chunks[:-1])


def test_n(real: OpenAI) -> None:
    """B10: right indices, one role and one finish reason each, usage of all; and seeds hold."""
    ask = {"model": "smollm2", "messages": CAPITAL, "n": 2, "temperature": 1, "seed": 7, "max_tokens": 12}
    answer = real.chat.completions.create(**ask)
    assert [choice.index for choice in answer.choices] == [0, 1]
    texts = [choice.message.content for choice in answer.choices]
    streamed, roles, finished = ["", ""], [0, 0], [0, 0]
    usage = None
    for chunk in real.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
            roles[choice.index] += choice.delta.role is not None
            finished[choice.index] += choice.finish_reason is not None
    assert streamed == texts
    assert roles == finished == [1, 1]
    assert usage is not None
    assert answer.usage is not None
    assert usage.completion_tokens == answer.usage.completion_tokens


def test_logprobs(real: OpenAI) -> None:
    """B22, B24-B26: what echo says of a text is what was said when the text was generated."""
    prompt = "The quick brown fox"
    first = real.completions.create(
        model="smollm2", prompt=prompt, temperature=0, max_tokens=10, logprobs=3
    ).choices[0]
    assert first.logprobs is not None
    assert first.logprobs.token_logprobs is not None
    tokens, values = first.logprobs.tokens or [], first.logprobs.token_logprobs
    assert "".join(tokens) == first.text
    assert all(math.isfinite(value) and value <= 0 for value in values)
    for token, value, top in zip(tokens, values, first.logprobs.top_logprobs or [], strict=True):
        # Greedy takes the best.
        assert top[token] == value == max(top.values())
    again = real.completions.create(
        model="smollm2", prompt=prompt + first.text, temperature=0, max_tokens=0, echo=True, logprobs=3
    )
    echo = again.choices[0].logprobs
    assert echo is not None
    assert again.choices[0].text == prompt + first.text
    assert again.usage is not None
    assert again.usage.completion_tokens == 0
    assert echo.token_logprobs is not None
    assert echo.token_logprobs[0] is None
    assert len(echo.token_logprobs) == again.usage.prompt_tokens
    # The text's own tokens are those that were generated, and a row does not depend on how it was computed.
    assert echo.tokens is not None
    assert echo.tokens[-len(tokens) :] == tokens
    assert echo.token_logprobs[-len(values) :] == values
    one_more = real.completions.create(
        model="smollm2", prompt=prompt, temperature=0, max_tokens=1, echo=True, logprobs=1
    ).choices[0]
    assert one_more.logprobs is not None
    assert len(one_more.logprobs.tokens or []) == len(echo.tokens) - len(tokens) + 1
    chat = real.chat.completions.create(
        model="smollm2", messages=CAPITAL, max_tokens=3, logprobs=True, top_logprobs=0
    ).choices[0]
    assert chat.logprobs is not None
    for entry in chat.logprobs.content or []:
        assert entry.top_logprobs == []
        assert entry.logprob <= 0
        assert bytes(entry.bytes or []).decode(errors="replace") == entry.token


def test_errors(tiny: OpenAI) -> None:
    ask = {"model": "tiny", "prompt": "ab", "max_tokens": 2}
    assert tiny.completions.create(**ask).choices[0].finish_reason in ("length", "stop")
    bad: list[tuple[dict[str, object], str]] = [
        ({"temperature": -1}, "temperature"),
        ({"prompt": [[-1]]}, "prompt"),
        ({"prompt": [288]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"max_tokens": 10**9}, "max_tokens"),
        ({"n": 10**6}, "n"),
        ({"logit_bias": {"9999": 1}}, "logit_bias"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"prompt": "a" * 513}, "prompt"),
    ]
    for change, param in bad:
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as error:
                tiny.completions.create(**{**ask, **change}, stream=stream)
            assert error.value.param == param, change
    with pytest.raises(openai.NotFoundError):
        tiny.completions.create(**{**ask, "model": "nothing"})
    assert tiny.completions.create(**ask, logit_bias={}).choices


def test_context_limit(tiny: OpenAI) -> None:
    """B45: what is advertised is what is enforced."""
    limit = tiny.models.retrieve("tiny").to_dict()["max_model_len"]
    assert isinstance(limit, int)
    answer = tiny.completions.create(model="tiny", prompt=[65] * (limit - 1))
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 1
    assert answer.choices[0].finish_reason == "length"
    for size in (limit, limit + 1):
        for wanted in ({}, {"max_tokens": 1}):
            with pytest.raises(openai.BadRequestError, match=str(limit)) as error:
                tiny.completions.create(model="tiny", prompt=[65] * size, **wanted)  # type: ignore[call-overload]
            assert str(size) in error.value.message


def test_leaving_aborts(real: OpenAI, real_server: Server) -> None:
    """B43, B42: work stops, every block is given back, and the prompt's blocks serve the next turn."""
    messages = [{"role": "user", "content": "Tell me of the sea and of the land. " * 20}]
    ask = {"model": "smollm2", "messages": messages, "max_tokens": 1000, "extra_body": {"ignore_eos": True}}
    before = real_server.kv()["aborted"]
    stream = real.chat.completions.create(**ask, stream=True)
    next(iter(stream))
    stream.close()
    wait_for(lambda: real_server.kv()["aborted"] == before + 1, 10)
    with pytest.raises(openai.APITimeoutError):
        real.with_options(timeout=1.0).chat.completions.create(**ask, n=3)
    wait_for(lambda: real_server.kv()["aborted"] == before + 4, 10)
    assert real_server.await_idle(10)["balanced"]
    next_turn = real.chat.completions.create(
        model="smollm2", messages=[*messages, {"role": "user", "content": "Go on."}], max_tokens=1
    )
    assert next_turn.usage is not None
    assert next_turn.usage.prompt_tokens_details is not None
    assert (next_turn.usage.prompt_tokens_details.cached_tokens or 0) >= 128


def test_leaving_the_queue_aborts(tiny: OpenAI, tiny_server: Server) -> None:
    """B43: the client leaves while the engine has not looked at its request yet."""
    ask = {"model": "tiny", "prompt": "ab", "max_tokens": 400, "n": 8, "extra_body": {"ignore_eos": True}}
    tiny.completions.create(**{**ask, "max_tokens": 1})
    before = tiny_server.kv()["aborted"]
    engine = tiny_server.engine_pid
    os.kill(engine, signal.SIGSTOP)
    try:
        with pytest.raises(openai.APITimeoutError):
            tiny.with_options(timeout=1.0).completions.create(**ask)
    finally:
        os.kill(engine, signal.SIGCONT)
    wait_for(lambda: tiny_server.kv()["aborted"] == before + 8, 10)
    assert tiny_server.await_idle(10)["balanced"]
