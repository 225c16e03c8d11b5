from __future__ import annotations

from typing import Any

import httpx
import pytest

from fourfold.text.tokenizer import Tokenizer

from .fakes import FakeClient
from .sse import stream, texts

pytestmark = pytest.mark.anyio

PATH = "/v1/completions"


async def post(http: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await http.post(PATH, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def refused(http: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await http.post(PATH, json=body)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    return error


async def test_answer_has_openais_shape(http: httpx.AsyncClient, engine: FakeClient) -> None:
    engine.cached = 1
    answer = await post(http, model="tiny", prompt="abcd")
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    assert answer["model"] == "tiny"
    assert answer["choices"] == [
        {"index": 0, "text": "Hello world", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    # BOS, ab, cd; Hello, " w", o, r, l, d, EOS.
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 7,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    assert not engine.aborted


async def test_prompts_of_every_kind(
    http: httpx.AsyncClient, engine: FakeClient, tokenizer: Tokenizer
) -> None:
    for prompt, expected in (
        ("ab", [[263, 261]]),
        (["ab", "cd"], [[263, 261], [263, 262]]),
        ([261, 98], [[261, 98]]),
        ([[261], [262, 99]], [[261], [262, 99]]),
    ):
        engine.requests.clear()
        answer = await post(http, prompt=prompt)
        assert [request.prompt_ids for request in engine.requests] == expected
        assert [choice["index"] for choice in answer["choices"]] == list(range(len(expected)))
    assert tokenizer.decode([263, 261], skip_special_tokens=True) == "ab"


async def test_empty_text_is_bos_alone(http: httpx.AsyncClient, engine: FakeClient) -> None:
    """B16: documented: an empty text is what the tokenizer puts before it."""
    await post(http, prompt="")
    assert engine.requests[0].prompt_ids == [263]
    assert "empty" in (await refused(http, prompt="", add_special_tokens=False))["message"]


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        ([[-1]], "-1"), ([267], "267"), ([4294967295], "4294967295"), ([2**70], str(2**70)), ([], "empty"),
        ([[]], "empty"), ([1.5], "float"), ([True], "bool"), (["a", 1], "str"), ([None], "null"),
        (None, "required"),
        ({"a": 1}, "object"), (7, "int"), ([["a"]], "str"),
    ],
)  # fmt: skip
async def test_bad_prompts_are_named(
    http: httpx.AsyncClient, engine: FakeClient, prompt: Any, named: str
) -> None:
    """B16."""
    error = await refused(http, prompt=prompt)
    assert error["param"] == "prompt"
    assert named in error["message"] or named in error["message"].replace("None", "null")
    assert not engine.requests
    await post(http, prompt="still alive")


async def test_sampling_reaches_the_engine(http: httpx.AsyncClient, engine: FakeClient) -> None:
    await post(
        http, prompt="a", max_tokens=5, temperature=0.5, top_p=0.9, top_k=2**40, min_p=0.1, typical_p=0.8,
        seed=7, presence_penalty=1, frequency_penalty=-1, repeat_penalty=1.1,
        logit_bias={"97": -100, "98": 5.5},
        stop="x", stop_token_ids=[5], ignore_eos=True, min_tokens=2, skip_special_tokens=False,
        include_stop_str_in_output=True, priority=-3, user="someone",
    )  # fmt: skip
    request = engine.requests[0]
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (
        5,
        0.5,
        0.9,
        2**31 - 1,
    )
    assert (sampling.min_p, sampling.typical_p, sampling.seed, sampling.repetition_penalty) == (
        0.1,
        0.8,
        7,
        1.1,
    )
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1, -1)
    assert sampling.logit_bias == {97: -100, 98: 5.5}
    assert (sampling.stop, sampling.stop_token_ids, sampling.ignore_eos) == (("x",), (5,), True)
    assert (sampling.min_tokens, sampling.skip_special_tokens, request.priority) == (2, False, -3)
    assert request.eos_ids == (264, 266)
    assert request.allowed_vocab == 267  # the model's logits have 300 rows


async def test_null_means_default(http: httpx.AsyncClient, engine: FakeClient) -> None:
    names = ("temperature", "top_p", "n", "stop", "seed", "logprobs", "stream", "echo", "best_of", "suffix")
    await post(http, prompt="a", max_tokens=None, logit_bias={}, stream_options=None, **dict.fromkeys(names))
    assert engine.requests[0].sampling.max_tokens == 16
    assert engine.requests[0].sampling.temperature == 1.0


async def test_whole_floats_are_integers(http: httpx.AsyncClient, engine: FakeClient) -> None:
    await post(http, prompt="a", max_tokens=5.0)
    assert engine.requests[0].sampling.max_tokens == 5
    assert "max_tokens" in (await refused(http, prompt="a", max_tokens=5.5))["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0), ("n", 129), ("n", 10**6), ("n", 10**30), ("temperature", -1), ("temperature", 1e9),
        ("top_p", 0),
        ("top_p", 1.1), ("min_p", -0.1), ("typical_p", 0), ("top_k", -2), ("repetition_penalty", 0),
        ("presence_penalty", 3), ("frequency_penalty", -3), ("max_tokens", -1), ("min_tokens", -1),
        ("min_tokens", 999),
        ("seed", 2**64), ("logprobs", 21), ("logprobs", -1), ("prompt_logprobs", 21), ("stop", [""]),
        ("stop", ["a"] * 65),
        ("stop", 5), ("stop", [5]), ("stop", "x" * 5000), ("stop_token_ids", [267]), ("priority", 2**40),
        ("temperature", "hot"), ("best_of", 0), ("stream", "yes"), ("logit_bias", [1]),
        ("temperature", 10**400),
    ],
)  # fmt: skip
async def test_values_out_of_range_are_named(
    http: httpx.AsyncClient, engine: FakeClient, field: str, value: Any
) -> None:
    error = await refused(http, prompt="a", **{field: value})
    assert error["param"] == field
    assert field in error["message"]
    assert not engine.requests


@pytest.mark.parametrize(
    "bias", [{"267": 1}, {"97": 1, "4294967295": 1}, {"x": 1}, {"-1": 1}, {"1.5": 1}, {"97": 101}]
)
async def test_bad_logit_bias(http: httpx.AsyncClient, engine: FakeClient, bias: dict[str, float]) -> None:
    """B18."""
    assert (await refused(http, prompt="a", logit_bias=bias))["param"] == "logit_bias"
    assert not engine.requests
    await post(http, prompt="a", logit_bias={})


@pytest.mark.parametrize(
    ("tokens", "max_tokens", "fits"),
    [
        (127, None, True), (127, 1, True), (127, 2, False), (128, None, False), (128, 1, False),
        (129, None, False),
        (129, 1, False), (128, 0, True), (129, 0, False), (1, 10**9, False), (1, 127, True), (1, 128, False),
    ],
)  # fmt: skip
async def test_context_limit(
    http: httpx.AsyncClient, engine: FakeClient, tokens: int, max_tokens: int | None, fits: bool
) -> None:
    """B45, B19: the advertised limit is the enforced one, and an error gives both numbers."""
    limit = (await http.get("/v1/models")).json()["data"][0]["max_model_len"]
    assert limit == 128
    body: dict[str, Any] = {"prompt": [97] * tokens, "max_tokens": max_tokens}
    if fits:
        answer = await post(http, **body)
        if tokens == 127:
            assert answer["usage"]["completion_tokens"] == 1
            assert answer["choices"][0]["finish_reason"] == "length"
    else:
        error = await refused(http, **body)
        assert error["code"] == "context_length_exceeded"
        assert "128" in error["message"]
        assert str(tokens) in error["message"]
        assert not engine.requests


async def test_n_seeds_differ_and_prompt_counts_once(http: httpx.AsyncClient, engine: FakeClient) -> None:
    answer = await post(http, prompt=["ab", "cd"], n=3, seed=2**64 - 1)
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    # In a fixed order per prompt, wrapping where 64 bits end.
    seeds = sorted(
        (request.prompt_ids[-1], int(request.request_id.split("-")[1]), request.sampling.seed)
        for request in engine.requests
    )
    assert [seed for _, _, seed in seeds] == [2**64 - 1, 0, 1] * 2
    assert answer["usage"]["prompt_tokens"] == 4
    assert answer["usage"]["completion_tokens"] == 6 * 7


async def test_more_sequences_than_slots(http: httpx.AsyncClient, engine: FakeClient) -> None:
    """B19: n above the batch's slots is queued and completes, without flooding the engine's queue."""
    engine.step = 0.001
    answer = await post(http, prompt="a", n=128, max_tokens=2)
    assert len(answer["choices"]) == 128
    assert engine.most_active == 4
    assert len({request.request_id for request in engine.requests}) == 128


async def test_too_many_sequences(http: httpx.AsyncClient, engine: FakeClient) -> None:
    assert "2048" in (await refused(http, prompt=["a"] * 100, n=100))["message"]
    assert "2048" in (await refused(http, prompt=["a"] * 3000))["message"]
    assert not engine.requests


async def test_best_of(http: httpx.AsyncClient, engine: FakeClient) -> None:
    answers = {1: "Hello", 2: "ab", 3: "cd"}
    engine.reply = lambda request: answers[request.sampling.seed or 0]
    answer = await post(http, prompt="a", n=2, best_of=3, seed=1)
    assert len(answer["choices"]) == 2
    assert answer["choices"][0]["logprobs"] is None
    assert answer["usage"]["completion_tokens"] == 6
    assert (await refused(http, prompt="a", n=3, best_of=2))["param"] == "best_of"
    assert (await refused(http, prompt="a", best_of=2, stream=True))["param"] == "best_of"


async def test_logprobs(http: httpx.AsyncClient) -> None:
    choice = (await post(http, prompt="a", logprobs=2))["choices"][0]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["Hello", " w", "o", "r", "l", "d", "<|eos|>"]
    assert logprobs["token_logprobs"] == [-0.5] * 7
    # The two best and, beside them, the chosen one.
    assert logprobs["top_logprobs"][0] == {"a": -0.1, "b": -1.1, "Hello": -0.5}
    assert logprobs["text_offset"] == [0, 5, 7, 8, 9, 10, 11]


async def test_logprobs_zero(http: httpx.AsyncClient) -> None:
    """B22: the chosen token's logprob, no alternatives, nothing null."""
    logprobs = (await post(http, prompt="a", logprobs=0))["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [-0.5] * 7
    assert logprobs["top_logprobs"] == [{}] * 7


async def test_infinity_never_reaches_json(http: httpx.AsyncClient, engine: FakeClient) -> None:
    """B24: it is clamped to -9999."""
    engine.logprob = float("-inf")
    answer = await post(http, prompt="ab", echo=True, logprobs=1, temperature=1, top_k=1)
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == [None] + [-9999.0] * 8
    answer = await post(http, prompt="ab", prompt_logprobs=0)
    assert answer["choices"][0]["prompt_logprobs"][1]["261"]["logprob"] == -9999.0


async def test_echo_without_tokens(http: httpx.AsyncClient) -> None:
    """B25."""
    answer = await post(http, prompt="abcd!", echo=True, max_tokens=0, logprobs=1)
    choice = answer["choices"][0]
    assert choice["text"] == "abcd!"
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"]["tokens"] == ["<|bos|>", "ab", "cd", "!"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5, -0.5]
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert choice["logprobs"]["text_offset"] == [0, 0, 2, 4]
    assert answer["usage"]["completion_tokens"] == 0


async def test_echo_of_token_ids_shows_all_of_them(http: httpx.AsyncClient) -> None:
    choice = (await post(http, prompt=[263, 261], echo=True, max_tokens=1, logprobs=0))["choices"][0]
    assert choice["text"] == "<|bos|>abHello"
    assert choice["logprobs"]["text_offset"] == [0, 7, 9]


async def test_echo_as_evaluation_harnesses_ask(http: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    """B26: entries == prompt tokens + 1; offsets point at the tokens' text."""
    ids = tokenizer.encode("Hello wörld ab", add_special_tokens=False)
    choice = (await post(http, prompt=ids, echo=True, max_tokens=1, logprobs=1))["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"] == "Hello wörld abHello"
    assert {len(column) for column in logprobs.values()} == {len(ids) + 1}
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert token.startswith("bytes:") or choice["text"].startswith(token, offset)


async def test_partial_characters_have_names(http: httpx.AsyncClient, engine: FakeClient) -> None:
    engine.reply = lambda _: "é"
    logprobs = (await post(http, prompt="a", logprobs=0))["choices"][0]["logprobs"]
    assert logprobs["tokens"][:2] == ["bytes:\\xc3", "bytes:\\xa9"]
    as_ids = await post(http, prompt="a", logprobs=0, return_tokens_as_token_ids=True)
    assert as_ids["choices"][0]["logprobs"]["tokens"][0] == "token_id:195"


async def test_prompt_logprobs(http: httpx.AsyncClient) -> None:
    answer = await post(http, prompt="ab", prompt_logprobs=1)
    first, second = answer["choices"][0]["prompt_logprobs"]
    assert first is None
    assert second == {
        "97": {"logprob": -0.1, "rank": 1, "decoded_token": "a"},
        "261": {"logprob": -0.5, "rank": 2, "decoded_token": "ab"},
    }
    assert (await refused(http, prompt="ab", prompt_logprobs=1, stream=True))["param"] == "prompt_logprobs"


async def test_stop_string(http: httpx.AsyncClient, engine: FakeClient) -> None:
    """B01: nothing of the stop string is sent, and what the engine would still do is aborted."""
    engine.reply = lambda _: "abcdefghijklmnopqrstuvwxyz"
    whole = await post(http, prompt="a", max_tokens=60, stop=["hijklmn", "zz"])
    assert whole["choices"][0]["text"] == "abcdefg"
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert whole["choices"][0]["stop_reason"] == "hijklmn"
    assert len(engine.aborted) == 1
    chunks = await stream(http, PATH, prompt="a", max_tokens=60, stop=["hijklmn", "zz"])
    assert texts(chunks) == {0: "abcdefg"}
    assert [
        chunk["choices"][0]["finish_reason"] for chunk in chunks if chunk["choices"][0]["finish_reason"]
    ] == ["stop"]
    assert not engine.active


async def test_stop_token(http: httpx.AsyncClient, engine: FakeClient) -> None:
    engine.reply = lambda _: "Hello"
    answer = await post(http, prompt="a", stop_token_ids=[264], ignore_eos=True)
    assert answer["choices"][0]["stop_reason"] == 264


async def test_stop_that_never_matches_changes_nothing(http: httpx.AsyncClient) -> None:
    """B02: same text, and never chunks without content."""
    for stop in (None, ["zzzz"], ["worldz"]):
        chunks = await stream(http, PATH, prompt="a", stop=stop)
        assert texts(chunks) == {0: "Hello world"}
        empty = [chunk for chunk in chunks if not chunk["choices"][0]["text"]]
        assert all(chunk["choices"][0]["finish_reason"] for chunk in empty)


async def test_stream_sends_only_what_is_new(http: httpx.AsyncClient) -> None:
    """B08."""
    chunks = await stream(http, PATH, prompt="a")
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["Hello", " w", "o", "r", "l", "d", ""]
    assert {(chunk["id"], chunk["object"], chunk["model"]) for chunk in chunks} == {
        (chunks[0]["id"], "text_completion", "tiny")
    }


async def test_half_characters_are_never_sent(http: httpx.AsyncClient, engine: FakeClient) -> None:
    engine.reply = lambda _: "a😀é"
    chunks = await stream(http, PATH, prompt="a", logprobs=0)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a", "😀", "é", ""]
    assert sum(len(chunk["choices"][0]["logprobs"]["tokens"]) for chunk in chunks) == 8


async def test_stream_with_echo_and_logprobs(http: httpx.AsyncClient) -> None:
    whole = (await post(http, prompt=["ab", "cd"], echo=True, logprobs=1))["choices"]
    chunks = await stream(http, PATH, prompt=["ab", "cd"], echo=True, logprobs=1)
    assert texts(chunks) == {0: "abHello world", 1: "cdHello world"}
    for index in (0, 1):
        parts = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["index"] == index]
        for column in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [entry for part in parts for entry in part[column]] == whole[index]["logprobs"][column]


async def test_tokens_do_not_depend_on_events(http: httpx.AsyncClient, engine: FakeClient) -> None:
    """Several tokens in one event; those after a stop string count for nothing."""
    engine.per_event = 4
    answer = await post(http, prompt="a", stop=[" w"])
    assert answer["choices"][0]["text"] == "Hello"
    assert answer["usage"]["completion_tokens"] == 2
