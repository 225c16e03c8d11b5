from __future__ import annotations

import asyncio

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from fourfold import _version
from fourfold.errors import EngineDeadError
from fourfold.server import admin
from fourfold.text.tokenizer import Tokenizer
from fourfold.types import EngineStats

from .fakes import FakeClient

pytestmark = pytest.mark.anyio


async def test_models(http: httpx.AsyncClient) -> None:
    models = (await http.get("/v1/models")).json()
    assert models["object"] == "list"
    card = models["data"][0]
    assert (card["id"], card["object"], card["owned_by"], card["max_model_len"]) == (
        "tiny",
        "model",
        "fourfold",
        128,
    )
    assert isinstance(card["created"], int)
    assert (await http.get("/v1/models/tiny")).json() == card


async def test_health(http: httpx.AsyncClient, engine: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in ("/health", "/ping"):
        assert (await http.get(path)).status_code == 200
        engine.health = (False, "no step for 31 s")
        response = await http.get(path)
        assert response.status_code == 503
        assert response.json()["error"]["message"] == "no step for 31 s"
        engine.health = (True, "")

    async def hang() -> tuple[bool, str]:
        await asyncio.sleep(60)
        return True, ""

    monkeypatch.setattr(admin, "ENGINE_ANSWER_SECONDS", 0.01)
    monkeypatch.setattr(engine, "healthy", hang)
    assert (await http.get("/health")).status_code == 503


async def test_version_and_openapi(http: httpx.AsyncClient) -> None:
    assert (await http.get("/version")).json() == {"version": _version.__version__}
    document = (await http.get("/openapi.json")).json()
    chat = document["paths"]["/v1/chat/completions"]["post"]
    name = chat["requestBody"]["content"]["application/json"]["schema"]["$ref"].rsplit("/", 1)[1]
    assert "messages" in document["components"]["schemas"][name]["properties"]
    assert document["paths"]["/v1/models/{name}"]["get"]["parameters"][0]["name"] == "name"
    assert (await http.get("/docs")).status_code == 200


async def test_kv_ledger(http: httpx.AsyncClient, engine: FakeClient) -> None:
    engine.numbers = EngineStats(free_blocks=50, cached_blocks=10, live_blocks=4, total_blocks=64, running=2)
    ledger = (await http.get("/debug/kv")).json()
    assert ledger["balanced"] is True
    assert (ledger["free"], ledger["cached"], ledger["live"], ledger["total"], ledger["running"]) == (
        50,
        10,
        4,
        64,
        2,
    )
    engine.numbers = EngineStats(free_blocks=50, cached_blocks=10, live_blocks=3, total_blocks=64)
    assert (await http.get("/debug/kv")).json()["balanced"] is False


async def _metrics(http: httpx.AsyncClient) -> dict[str, float]:
    response = await http.get("/metrics")
    assert response.status_code == 200
    samples = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k != "model_name"}
            samples[sample.name + "".join(f",{k}={v}" for k, v in sorted(labels.items()))] = sample.value
    return samples


async def test_metrics(http: httpx.AsyncClient, engine: FakeClient) -> None:
    engine.numbers = EngineStats(
        step=9, running=3, waiting=2, free_blocks=48, live_blocks=16, total_blocks=64, prompt_tokens=100,
        generation_tokens=50, cached_prompt_tokens=30, preemptions=1,
    )  # fmt: skip
    await http.post("/v1/completions", json={"prompt": "abcd", "n": 2})
    await http.post("/v1/completions", json={"prompt": "abcd", "max_tokens": 1})
    await http.post("/v1/completions", json={"prompt": []})
    metrics = await _metrics(http)
    expected = {
        "vllm:num_requests_running": 3,
        "vllm:num_requests_waiting": 2,
        "vllm:kv_cache_usage_perc": 0.25,
        "vllm:num_preemptions_total": 1,
        "vllm:prompt_tokens_total": 100,
        "vllm:generation_tokens_total": 50,
        "vllm:prefix_cache_queries_total": 100,
        "vllm:prefix_cache_hits_total": 30,
        "vllm:request_success_total,finished_reason=stop": 2,
        "vllm:request_success_total,finished_reason=length": 1,
        "vllm:request_success_total,finished_reason=abort": 0,
        "fourfold:http_errors_total,status=400": 1,
        "fourfold:sequences_in_flight": 0,
        "vllm:time_to_first_token_seconds_count": 3,
        "vllm:e2e_request_latency_seconds_count": 3,
        # Seven tokens each are six gaps each.
        "vllm:inter_token_latency_seconds_count": 12,
        "vllm:request_prompt_tokens_sum": 9,
        "vllm:request_generation_tokens_sum": 15,
        "vllm:request_generation_tokens_bucket,le=1.0": 1,
        "vllm:request_generation_tokens_bucket,le=10.0": 3,
        "vllm:request_generation_tokens_bucket,le=+Inf": 3,
        "vllm:cache_config_info,block_size=16,num_gpu_blocks=64": 1,
    }
    assert {name: metrics.get(name) for name in expected} == expected


async def test_metrics_without_an_engine(
    http: httpx.AsyncClient, engine: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def dead() -> EngineStats:
        raise EngineDeadError("gone")

    monkeypatch.setattr(engine, "stats", dead)
    engine.mute = True
    metrics = await _metrics(http)
    assert metrics["fourfold:engine_up"] == 0
    assert "vllm:num_requests_running" not in metrics
    assert (await http.get("/debug/kv")).status_code == 503


async def test_tokenize_as_vllm(http: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    for path in ("/tokenize", "/v1/tokenize"):
        answer = (await http.post(path, json={"prompt": "abcd", "return_token_strs": True})).json()
        assert answer == {
            "count": 3, "max_model_len": 128, "tokens": [263, 261, 262],
            "token_strs": ["<|bos|>", "ab", "cd"],
        }  # fmt: skip
        answer = (await http.post(path, json={"prompt": "abcd", "add_special_tokens": False})).json()
        assert answer["tokens"] == [261, 262]
        answer = (await http.post(path, json={"messages": [{"role": "user", "content": "ab"}]})).json()
        assert tokenizer.decode(answer["tokens"], False) == "<|start|>user\nab<|end|>\n<|start|>assistant\n"
        body = {"messages": [{"role": "user", "content": "ab"}], "add_generation_prompt": False}
        answer = (await http.post(path, json=body)).json()
        assert tokenizer.decode(answer["tokens"], False) == "<|start|>user\nab<|end|>\n"


async def test_tokenize_as_llama_cpp(http: httpx.AsyncClient) -> None:
    assert (await http.post("/tokenize", json={"content": "abcd"})).json() == {"tokens": [261, 262]}
    answer = (await http.post("/tokenize", json={"content": "ab", "add_special": True})).json()
    assert answer == {"tokens": [263, 261]}
    answer = (await http.post("/tokenize", json={"content": "é", "with_pieces": True})).json()
    assert answer["tokens"] == [{"id": 195, "piece": [0xC3]}, {"id": 169, "piece": [0xA9]}]


async def test_detokenize(http: httpx.AsyncClient) -> None:
    for path in ("/detokenize", "/v1/detokenize"):
        answer = (await http.post(path, json={"tokens": [263, 261, 262]})).json()
        assert answer == {"prompt": "<|bos|>abcd", "content": "<|bos|>abcd"}
    body = {"tokens": [263, 261], "skip_special_tokens": True}
    assert (await http.post("/detokenize", json=body)).json()["prompt"] == "ab"
    assert (await http.post("/detokenize", json={"tokens": []})).json()["prompt"] == ""


@pytest.mark.parametrize("tokens", [[-1], [267], ["a"], "ab", None, [2**70]])
async def test_bad_tokens(http: httpx.AsyncClient, tokens: object) -> None:
    response = await http.post("/detokenize", json={"tokens": tokens})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tokens"


@pytest.mark.parametrize(
    "body", [{}, {"prompt": "a", "content": "b"}, {"prompt": "a", "messages": []}, {"prompt": 5}]
)
async def test_bad_tokenize(http: httpx.AsyncClient, body: dict[str, object]) -> None:
    assert (await http.post("/tokenize", json=body)).status_code == 400


async def test_long_texts_are_tokenized_aside(http: httpx.AsyncClient) -> None:
    """The event loop goes on while a large prompt is tokenized."""
    text = "Hello world " * 20_000
    big = asyncio.create_task(http.post("/tokenize", json={"prompt": text}))
    await http.get("/version")
    assert (await big).json()["count"] > 100_000
