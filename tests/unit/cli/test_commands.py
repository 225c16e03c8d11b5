"""The commands as a user runs them, over a scripted backend."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fourfold import LLM, SamplingParams
from fourfold.cli.chat import Chat
from fourfold.cli.conversation import Conversation, command, read_message
from fourfold.cli.main import main
from fourfold.engine.batch import Batch

from .conftest import ScriptedBackend

Say = Callable[..., ScriptedBackend]
Capture = pytest.CaptureFixture[str]


def test_run_streams_the_answer(tiny: Path, say: Say, capsys: Capture) -> None:
    say("héllo, wörld")
    assert main(["run", str(tiny), "hi", "--temp", "0", "--verbose"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "héllo, wörld\n"
    assert "tok/s" in captured.err
    assert "first token after" in captured.err
    assert "ended by stop" in captured.err


def test_run_applies_template_system_and_raw(tiny: Path, say: Say, capsys: Capture) -> None:
    prompts: list[str] = []

    def note(batch: Batch) -> None:
        if batch.seq_context[0] == 0:
            prompts.append(bytes(t for t in batch.tokens.tolist() if t < 256).decode())

    say("ok\n", note)
    assert main(["run", str(tiny), "hi", "--system", "be brief"]) == 0
    assert main(["run", "-m", str(tiny), "-p", "hi", "--raw"]) == 0
    assert main(["run", "-m", str(tiny), "hi", "--chat-template", "[{{ messages[0].content }}]"]) == 0
    assert prompts == ["system\nbe brief\nuser\nhi\nassistant\n", "hi", "[hi]"]
    assert capsys.readouterr().out == "ok\n" * 3


def test_run_stops(tiny: Path, say: Say, capsys: Capture) -> None:
    say("abcdef")
    assert main(["run", str(tiny), "hi", "-n", "3"]) == 0
    assert main(["run", str(tiny), "hi", "--stop", "de"]) == 0
    assert main(["run", str(tiny), "hi", "--predict", "8", "--ignore-eos", "-v"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("abc\nabc\nabcdef")
    assert "8 tokens at" in captured.err
    assert "ended by length" in captured.err


def test_run_reads_standard_input(
    tiny: Path, say: Say, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    say("x")
    import io

    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe"))
    assert main(["run", str(tiny)]) == 0
    assert capsys.readouterr().out == "x\n"


def test_errors_are_one_line_and_exit_1(tiny: Path, say: Say, capsys: Capture) -> None:
    say("x")
    assert main(["run", "gone.gguf", "hi"]) == 1
    assert main(["run", str(tiny), "a" * 600]) == 1
    lines = capsys.readouterr().err.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert len(errors) == 2
    assert "gone.gguf" in errors[0]
    assert "shorten the prompt" in errors[1]


def test_damaged_file_is_one_line(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    assert main(["run", str(bad), "hi"]) == 1
    assert str(bad) in capsys.readouterr().err


def test_interrupt_is_130(tiny: Path, say: Say) -> None:
    def interrupt(batch: Batch) -> None:
        raise KeyboardInterrupt

    say("x", interrupt)
    assert main(["run", str(tiny), "hi"]) == 130


def test_closed_pipe_is_quiet() -> None:
    read, write = os.pipe()
    os.close(read)
    result = subprocess.run(
        [sys.executable, "-m", "fourfold", "models", "--json"],
        stdout=write,
        stderr=subprocess.PIPE,
        timeout=60,
    )
    os.close(write)
    assert result.returncode == 141
    assert result.stderr == b""


@pytest.mark.parametrize("arguments", [[], ["bench"], ["--help"], ["serve", "-h"]])
def test_help(arguments: list[str], capsys: Capture) -> None:
    assert main(arguments) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("Usage: fourfold")
    assert captured.err == ""


def test_pull_prints_the_path(tiny: Path, capsys: Capture) -> None:
    assert main(["pull", str(tiny)]) == 0
    assert capsys.readouterr().out == f"{tiny}\n"


def test_models(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOURFOLD_CACHE_DIR", str(tmp_path))
    artefact = tmp_path / "artefacts" / "abc"
    artefact.mkdir(parents=True)
    (artefact / "weights").write_bytes(bytes(1500))
    assert main(["models", "--json"]) == 0
    entries = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert entries["smollm2"]["path"] is None
    assert entries["smollm2"]["bytes"] == 98362432
    assert "Apache-2.0" in entries["smollm2"]["about"]
    assert entries["abc"] == {
        "kind": "artefact", "name": "abc", "bytes": 1500, "path": str(artefact), "about": "",
    }  # fmt: skip
    assert main(["models"]) == 0
    assert "not fetched (SmolLM2" in capsys.readouterr().out


def test_version_comes_from_one_place(capsys: Capture) -> None:
    from fourfold import __version__

    assert main(["version"]) == 0
    assert main(["--version"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"fourfold {__version__} (Python ")
    assert second == f"fourfold {__version__}"


def test_bench_engine(tiny: Path, say: Say, capsys: Capture) -> None:
    say("a" * 200)
    arguments = ["bench", "engine", str(tiny), "--repeats", "2", "--max-model-len", "600", "--no-limits"]
    wanted = [flag for name in ("prefill-512", "prefill-2048", "decode-32") for flag in ("--only", name)]
    assert main([*arguments, *wanted, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [
        (each["name"], each["prompt_tokens"], len(each["tokens_per_second"]["runs"]))
        for each in report["workloads"]
    ] == [("prefill-512", 512, 2), ("decode-32", 32, 2)]
    assert all(each["tokens_per_second"]["median"] > 0 for each in report["workloads"])
    assert report["peak_memory_bytes"] > 1e6
    assert main([*arguments, *wanted]) == 0
    assert "longer than the context of 600 tokens: prefill-2048" in capsys.readouterr().out


class TestMessages:
    @pytest.mark.parametrize(
        "lines,message",
        [
            (["plain"], "plain"),
            (["one\\", "two\\", "three"], "one\ntwo\nthree"),
            (['"""one', "", 'two"""'], "one\n\ntwo"),
            (['"""', "one", '"""'], "one"),
            (['"""all in one"""'], "all in one"),
            (["cut\\"], "cut"),
            (['"""cut'], "cut"),
        ],
    )
    def test_forms(self, lines: list[str], message: str) -> None:
        assert read_message(reader(lines)) == message

    def test_end_of_input(self) -> None:
        with pytest.raises(EOFError):
            read_message(reader([]))


class TestChatCommands:
    def test_each(self, tmp_path: Path) -> None:
        conversation = Conversation("be kind")
        conversation.ask("hi")
        conversation.answer("hello")
        file = tmp_path / "c.json"
        assert command(conversation, f"/save {file}") == f"saved 3 messages to {file}"
        assert json.loads(file.read_text()) == [
            {"role": "system", "content": "be kind"},
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "hello"},
        ]
        assert command(conversation, "/clear") == "conversation cleared"
        assert conversation.messages() == [{"role": "system", "content": "be kind"}]
        assert command(conversation, "/system") == "be kind"
        assert command(conversation, "/system be brief") == "system message set"
        assert conversation.system == "be brief"
        assert "/save FILE" in (command(conversation, "/help") or "")
        assert "no command /frob" in (command(conversation, "/frob") or "")
        assert "needs a file name" in (command(conversation, "/save") or "")
        assert "cannot write" in (command(conversation, f"/save {tmp_path}") or "")
        assert command(conversation, "/exit") is None


class TestChat:
    def talk(self, tiny: Path, lines: list[str]) -> Conversation:
        conversation = Conversation()
        with LLM(str(tiny)) as llm:
            chat = Chat(llm, llm.chat_template(), SamplingParams(max_tokens=100), conversation, sys.stdout)
            chat.talk(reader(lines))
            assert llm._engine.stats().live_blocks == 0
        return conversation

    def test_history_grows(self, tiny: Path, say: Say, capsys: Capture) -> None:
        say("sure")
        conversation = self.talk(tiny, ["one", "", "/frob", "two", "/exit", "three"])
        assert [turn["content"] for turn in conversation.turns] == ["one", "sure", "two", "sure"]
        assert capsys.readouterr().out == "sure\nsure\n"

    def test_interrupt_stops_the_answer_and_keeps_the_session(
        self, tiny: Path, say: Say, capsys: Capture
    ) -> None:
        # A background job starts with the signal ignored.
        found = signal.signal(signal.SIGINT, signal.default_int_handler)
        steps = 0

        def interrupt(batch: Batch) -> None:
            nonlocal steps
            steps += 1
            if steps == 3:
                os.kill(os.getpid(), signal.SIGINT)

        say("a" * 50, interrupt)
        conversation = self.talk(tiny, ["one", "two"])
        assert [turn["content"] for turn in conversation.turns] == ["one", "aaa", "two", "a" * 50]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        signal.signal(signal.SIGINT, found)

    def test_interrupt_at_the_prompt_only_says_how_to_leave(
        self, tiny: Path, say: Say, capsys: Capture
    ) -> None:
        say("x")

        def lines() -> Iterator[str]:
            yield "one"
            raise KeyboardInterrupt

        source = lines()

        def read(prompt: str) -> str:
            try:
                return next(source)
            except StopIteration:
                raise EOFError from None

        conversation = Conversation()
        with LLM(str(tiny)) as llm:
            Chat(llm, llm.chat_template(), SamplingParams(), conversation, sys.stdout).talk(read)
        assert len(conversation.turns) == 2
        assert "Ctrl-D or /exit leaves" in capsys.readouterr().err

    def test_too_long_a_question_is_taken_back(self, tiny: Path, say: Say, capsys: Capture) -> None:
        say("ok")
        conversation = self.talk(tiny, ["a" * 600, "short"])
        assert [turn["content"] for turn in conversation.turns] == ["short", "ok"]
        assert "/clear starts over" in capsys.readouterr().err


def reader(lines: list[str]) -> Callable[[str], str]:
    source = iter(lines)

    def read(prompt: str) -> str:
        try:
            return next(source)
        except StopIteration:
            raise EOFError from None

    return read
