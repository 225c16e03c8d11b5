"""`fourfold bench accuracy` on a tiny model, as a user runs it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from fourfold import LLM, SamplingParams
from fourfold.cli.main import main

TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 3


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FOURFOLD_CACHE_DIR", str(tmp_path))
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def measured(capsys: pytest.CaptureFixture[str], model: Path, text: Path, *flags: str) -> dict[str, Any]:
    command = ["bench", "accuracy", str(model), "--text", str(text), "--json", "--threads", "1", *flags]
    assert main(command) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def test_perplexity_is_that_of_prompt_logprobs(
    tiny_model: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with LLM(str(tiny_model), threads=1) as llm:
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        (output,) = llm.generate([TEXT], params)
    assert output.prompt_logprobs is not None
    losses = [-entry.logprob for entry in output.prompt_logprobs if entry is not None]
    report = measured(capsys, tiny_model, text, "--against", "none", "--ctx-size", "512")
    assert report["scored_tokens"] == len(losses) == len(TEXT) - 1
    assert report["perplexity"] == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-6)
    assert "reference" not in report


def test_against_exact(tiny_model: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--ctx-size", "64", "--stride", "32", "--tokens", "200")
    exact = measured(capsys, tiny_model, text, *flags, "--dtype", "float32", "--kv-cache-dtype", "float32")
    assert exact["scored_tokens"] == 199
    assert exact["context"] == 64
    assert exact["reference"]["kl_max"] == 0
    assert exact["reference"]["same_top"] == 1
    assert exact["reference"]["perplexity"] == exact["perplexity"]
    rounded = measured(capsys, tiny_model, text, *flags)
    assert 0 < rounded["reference"]["kl_mean"] < 1e-2
    assert rounded["reference"]["perplexity"] == pytest.approx(exact["perplexity"], rel=1e-6)


def test_for_people(tiny_model: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "bench",
                "accuracy",
                str(tiny_model),
                "--text",
                str(text),
                "-c",
                "128",
                "-t",
                "1",
                "--dtype",
                "int8",
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert "int8 activations, bfloat16 KV cache; 235 tokens scored in 2 windows of 128" in out
    assert "KL divergence" in out
    assert "same top token" in out


@pytest.mark.parametrize(
    "flags,code,words",
    [
        ([], 2, "give --text FILE, or --against FILE"),
        (["--text", "{text}", "--against", "{text}"], 1, "is not a file of llama-perplexity"),
        (["--against", "exat"], 1, "exat: cannot be read"),
        (["--text", "gone.txt"], 2, "gone.txt"),
        (["--text", "{text}", "--tokens", "1"], 2, "1 tokens leave nothing to predict; give a longer text"),
        (["--text", "{text}", "-c", "64", "--stride", "65"], 2, "stride must be between 1 and 64, got 65"),
        (["--text", "{text}", "-c", "1024"], 1, "more than the 512 tokens this model supports"),
    ],
)
def test_wrong_use(
    tiny_model: Path,
    text: Path,
    flags: list[str],
    code: int,
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = [flag.format(text=text) for flag in flags]
    assert main(["bench", "accuracy", str(tiny_model), *arguments]) == code
    assert words in capsys.readouterr().err
