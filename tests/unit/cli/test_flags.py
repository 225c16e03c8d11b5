"""Every habit of spelling a flag, and what is answered to a wrong one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fourfold.cli.main import main
from fourfold.config import EngineConfig
from fourfold.server.settings import ServerSettings


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `fourfold serve` would have served."""
    seen: dict[str, Any] = {}

    def serve(config: EngineConfig, settings: ServerSettings, log_level: str, launched: object) -> int:
        seen.update(config=config, settings=settings, log_level=log_level)
        return 0

    monkeypatch.setattr("fourfold.server.run.serve", serve)
    for name in ("FOURFOLD_API_KEY", "FOURFOLD_LOG_LEVEL"):
        monkeypatch.delenv(name, raising=False)
    return seen


@pytest.mark.parametrize(
    "flags,field,value",
    [
        (["--max-model-len", "2048"], "max_model_len", 2048),
        (["--max_model_len=2048"], "max_model_len", 2048),
        (["--ctx-size", "2048"], "max_model_len", 2048),
        (["-c", "2048"], "max_model_len", 2048),
        (["--max-num-seqs", "8"], "max_num_seqs", 8),
        (["--parallel", "8"], "max_num_seqs", 8),
        (["-np", "8"], "max_num_seqs", 8),
        (["--max-num-batched-tokens", "64"], "max_num_batched_tokens", 64),
        (["--batch_size", "64"], "max_num_batched_tokens", 64),
        (["--threads", "3"], "threads", 3),
        (["-t", "3"], "threads", 3),
        (["--seed", "7"], "seed", 7),
        (["--dtype", "auto"], "activation_dtype", "auto"),
        (["--activation-dtype", "bf16"], "activation_dtype", "bfloat16"),
        (["--dtype", "bf16"], "activation_dtype", "bfloat16"),
        (["--dtype", "FLOAT32"], "activation_dtype", "float32"),
        (["--kv-cache-dtype", "auto"], "kv_cache_dtype", "bfloat16"),
        (["--kv_cache_dtype", "fp32"], "kv_cache_dtype", "float32"),
        (["--kv-cache-dtype", "int8"], "kv_cache_dtype", "int8"),
        (["--kv-cache-dtype", "FP8"], "kv_cache_dtype", "fp8"),
        (["--kv-cache-dtype", "fp8_e4m3"], "kv_cache_dtype", "fp8"),
        (["--kv-cache-memory", "1.5G"], "kv_cache_bytes", 3 * 2**29),
        (["--kv-cache-memory-bytes", "4096"], "kv_cache_bytes", 4096),
        (["--kv-cache-memory", "512MiB"], "kv_cache_bytes", 2**29),
        (["--isa", "avx2"], "isa", "avx2"),
        (["--no-prefix-caching"], "prefix_caching", False),
        (["--no-enable-prefix-caching"], "prefix_caching", False),
        (["--enable-prefix-caching"], "prefix_caching", True),
        (["--max-waiting", "5"], "max_waiting", 5),
        ([], "prefix_caching", True),
        ([], "max_model_len", None),
    ],
)
def test_engine_flags(
    served: dict[str, Any], tiny: Path, flags: list[str], field: str, value: object
) -> None:
    assert main(["serve", str(tiny), *flags]) == 0
    assert getattr(served["config"], field) == value
    assert served["config"].model == str(tiny)


@pytest.mark.parametrize(
    "flags,field,value",
    [
        (["--host", "0.0.0.0", "--port", "9"], "port", 9),
        (["--served-model-name", "a", "--alias", "b"], "served_model_names", ("a", "b")),
        ([], "served_model_names", ("tiny",)),
        (["--api-key", "k", "--api_key", "l"], "api_keys", ("k", "l")),
        ([], "api_keys", ()),
        (["--chat-template", "{{ messages }}"], "chat_template", "{{ messages }}"),
        (["--allowed-origins", "http://a"], "cors_origins", ("http://a",)),
        (["--trust-request-chat-template"], "allow_request_chat_template", True),
        (["--drain-timeout", "2.5"], "drain_timeout", 2.5),
    ],
)
def test_server_flags(
    served: dict[str, Any], tiny: Path, flags: list[str], field: str, value: object
) -> None:
    assert main(["serve", "--model", str(tiny), *flags]) == 0
    assert getattr(served["settings"], field) == value


def test_environment(served: dict[str, Any], tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOURFOLD_API_KEY", "secret")
    monkeypatch.setenv("FOURFOLD_LOG_LEVEL", "debug")
    assert main(["serve", str(tiny)]) == 0
    assert served["settings"].api_keys == ("secret",)
    assert served["log_level"] == "debug"


def test_chat_template_from_a_file(served: dict[str, Any], tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("{{ x }}")
    assert main(["serve", str(tiny), "--chat-template", str(tmp_path / "t.jinja")]) == 0
    assert served["settings"].chat_template == "{{ x }}"


@pytest.mark.parametrize(
    "arguments,words",
    [
        (["serve", "--prot", "1"], "no such option --prot; did you mean --port?"),
        (["serve", "--max_modellen", "1"], "did you mean --max-model-len?"),
        (["serve", "--xyzzy"], "no such option --xyzzy; did you mean --"),
        (["serve", "-z"], "no such option -z; did you mean -"),
        (["srve"], "no such command 'srve'; did you mean serve?"),
        (["bench", "engin"], "did you mean engine?"),
        (["serve", "--port", "70000"], "70000 is not in the range 0<=x<=65535"),
        (["serve", "--port", "http"], "'http' is not a valid integer"),
        (["serve", "--threads", "0"], "0 is not in the range 1<=x<=4096"),
        (["serve", "--max-num-seqs", "9999999999"], "not in the range 1<=x<=2147483647"),
        (["serve", "--dtype", "int4"], "'int4' is not one of 'auto', 'bfloat16'"),
        (["serve", "--kv-cache-memory", "4X"], "'4X' is not a size between 1 byte and 1024T"),
        (["serve", "--kv-cache-memory", "0"], "'0' is not a size"),
        (["serve", "--kv-cache-memory", "9999999T"], "is not a size"),
        (["serve", "--chat-template", "gone.jinja"], "'gone.jinja' is neither a readable file"),
        (["serve", "--max-model-len"], "requires an argument"),
        (["serve", "a", "--model", "b"], "two models, 'a' and --model 'b'"),
        (["run", "m", "hi", "--temperature", "101"], "101.0 is not in the range 0<=x<=100"),
        (["run", "m", "hi", "--top-p", "0"], "0.0 is not in the range 0<x<=1"),
        (["run", "m", "hi", "-n", "-2"], "-2 is not in the range x>=-1"),
        (["run", "m", "hi", "--prompt", "ho"], "two prompts"),
        (["run", "m", "hi", "--raw", "--system", "s"], "--system needs the chat template"),
        (["pull"], "Missing argument 'NAME'"),
    ],
)
def test_wrong_usage(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err
    assert captured.err.count("\n") == 1
    assert "--help" in captured.err
