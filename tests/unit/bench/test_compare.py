"""Adapters on recorded outputs of the programs they run; turns, ratios and failures with made-up peers."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fourfold.bench.compare.commands import output_of
from fourfold.bench.compare.figures import Note
from fourfold.bench.compare.llama_cpp import LlamaCpp, batched_bench_speed, llama_bench_speed, llama_version
from fourfold.bench.compare.openvino import openvino_peer
from fourfold.bench.compare.peer import CannotRun, CannotStart, ServerCommand, ServerNeeds
from fourfold.bench.compare.pinning import pinned_to
from fourfold.bench.compare.run import Plan, compare
from fourfold.bench.compare.serving import SERVER_LOADS, ServerLoad, requests_of
from fourfold.bench.compare.vllm import vllm_peer
from fourfold.bench.compare.worker import Worker, WorkerPeer
from fourfold.bench.engine import WORKLOADS, Workload
from fourfold.errors import ConfigError, FourfoldError

# llama.cpp 0.6.0-dev, shortened.
LLAMA_BENCH = """\
warning: asserts enabled, performance may be affected
{"build_commit": "unknown", "model_type": "llama 256M Q4_1", "n_prompt": 0, "n_gen": 4, "n_depth": 8, \
"avg_ns": 591232509, "avg_ts": 6.76553, "samples_ns": [ 591232509 ],"samples_ts": [ 6.76553 ]}
"""
BATCHED_BENCH = """\
llama_batched_bench: n_kv_max = 1024
{"n_kv_max": 1024, "n_batch": 2048, "pp": 16, "tg": 4, "pl": 2, "n_kv": 40, "t_pp": 2.345320, \
"speed_pp": 13.644194, "t_tg": 3.439936, "speed_tg": 2.325625, "t": 5.785256, "speed": 6.914128}
"""
VERSION = """\
version: 0.6.0-dev (unknown)
built with GNU 12.2.0 for Linux x86_64
"""


def test_llama_outputs() -> None:
    assert llama_version(VERSION) == "0.6.0-dev (unknown)"
    assert llama_version("") == "unknown"
    assert llama_bench_speed(LLAMA_BENCH) == 6.76553
    assert batched_bench_speed(BATCHED_BENCH) == pytest.approx(8 / 5.785256)


@pytest.mark.parametrize("parse", [llama_bench_speed, batched_bench_speed])
@pytest.mark.parametrize(
    "output", ["", "error: out of memory", "{}", '{"samples_ts": []}', '{"t": 0, "tg": 1, "pl": 1}']
)
def test_llama_says_nothing(parse: Callable[[str], float], output: str) -> None:
    with pytest.raises(FourfoldError, match="gave no speed"):
        parse(output)
    with pytest.raises(FourfoldError, match="not the JSON"):
        parse("{cut")


def program(path: Path, says: str, status: int = 0) -> None:
    path.write_text(
        f"#!{sys.executable}\nimport sys\nprint({says!r})\n"
        f"print(sys.argv[1:], file=sys.stderr)\nsys.exit({status})\n"
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_llama_programs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no llama-bench"):
        LlamaCpp.find(tmp_path, Path("m.gguf"), 2, 60)
    program(tmp_path / "llama-bench", LLAMA_BENCH)
    found = LlamaCpp.find(tmp_path, Path("m.gguf"), 2, 60)
    assert found is not None
    assert found.run(WORKLOADS["decode-32"]) == 6.76553
    with pytest.raises(CannotRun, match="no llama-batched-bench"):
        found.run(WORKLOADS["batch-8"])
    with pytest.raises(CannotRun, match="no llama-server"):
        found.server(ServerNeeds(1, 2, 3, 4))
    assert found.version() == "unknown"
    program(tmp_path / "llama-batched-bench", BATCHED_BENCH)
    program(tmp_path / "llama-server", VERSION)
    found = LlamaCpp.find(tmp_path, Path("m.gguf"), 2, 60)
    assert found is not None
    assert found.run(WORKLOADS["batch-8"]) == pytest.approx(8 / 5.785256)
    assert found.version() == "0.6.0-dev (unknown)"
    with pytest.raises(CannotRun, match="whole prompts"):
        found.run(WORKLOADS["shared-prefix"])
    server = found.server(ServerNeeds(port=81, threads=2, sequences=32, kv_tokens=1000))
    assert list(server.command)[1:] == [
        "-m", "m.gguf", "-t", "2", "-tb", "2", "--host", "127.0.0.1", "--port", "81",
        "--parallel", "32", "-c", "1000", "--no-warmup",
        "--cache-ram", "0",
    ]  # fmt: skip
    program(tmp_path / "llama-bench", "", status=3)
    with pytest.raises(
        FourfoldError, match=r"ended with 3: \['-m', 'm.gguf', '-t', '2', '-p', '512', '-n', '0'"
    ):
        found.run(WORKLOADS["prefill-512"])


def test_a_program_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    script = tmp_path / "slow"
    script.write_text(f"#!/bin/sh\nsleep 60 & echo $! > {tmp_path}/pid; wait")
    script.chmod(0o755)
    with pytest.raises(FourfoldError, match=r"slow took longer than 0.5 s"):
        output_of([str(script)], 0.5)
    child = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}/stat")
    for _ in range(200):  # what it started is ended too: gone, or a zombie
        if not child.exists() or child.read_text().split()[2] == "Z":
            break
        time.sleep(0.01)
    else:
        pytest.fail("a process that the program started still runs")
    with pytest.raises(FourfoldError, match="cannot be run"):
        output_of([str(tmp_path / "none")], 1)


def test_other_engines_are_told_their_threads(tmp_path: Path) -> None:
    python, needs = tmp_path / "bin/python", ServerNeeds(81, 2, 32, 1000)
    vllm = vllm_peer(python, Path("folder"), [2, 5], {"OMP_NUM_THREADS": "7", "A": "b"}, 60)
    server = vllm.server(needs)
    assert server.command[:5] == [
        str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", "folder",
    ]  # fmt: skip
    assert server.environment["VLLM_CPU_OMP_THREADS_BIND"] == "2,5"
    assert (server.environment["OMP_NUM_THREADS"], server.environment["A"]) == ("7", "b")
    names = [
        openvino_peer(python, Path(model), 2, {}, 60).name for model in ("x/ov-int4.2", "x/model-q8_0.gguf")
    ]
    assert names == ["OpenVINO ov-int4.2", "OpenVINO model-q8_0"]
    with pytest.raises(CannotRun, match="no server"):
        openvino_peer(python, Path("m"), 2, {}, 60).server(needs)
    with pytest.raises(CannotStart, match="cannot be run"):
        vllm.run(WORKLOADS["decode-32"])


def test_all_run_on_the_same_cores() -> None:
    before = os.sched_getaffinity(0)
    with pinned_to(1) as cpus:
        assert os.sched_getaffinity(0) == set(cpus)
        assert len(cpus) == 1
        inside = subprocess.run(
            [sys.executable, "-c", "import os; print(*os.sched_getaffinity(0))"],
            capture_output=True,
            text=True,
        )
        assert inside.stdout.split() == [str(cpus[0])]
    assert os.sched_getaffinity(0) == before
    with pytest.raises(ConfigError, match="4096 threads for each engine"), pinned_to(4096):
        pass


class MadeUp:
    """A peer whose n-th run gives the n-th number; an exception is raised."""

    def __init__(self, name: str, turns: list[str], results: list[float | Exception]) -> None:
        self.name = name
        self._turns = turns
        self._results = iter(results)

    def version(self) -> str:
        return "1"

    def run(self, workload: Workload) -> float:
        self._turns.append(f"{self.name} {workload.name}")
        result = next(self._results)
        if isinstance(result, Exception):
            raise result
        return result

    def server(self, needs: ServerNeeds) -> ServerCommand:
        return ServerCommand([sys.executable, "-c", "import sys; sys.exit('no model')"])

    def close(self) -> None:
        pass


JOBS = [WORKLOADS["decode-32"], WORKLOADS["prefill-512"]]


def plan(repeats: int, **more: Any) -> Plan:
    settings: dict[str, Any] = {"workloads": JOBS, "loads": [], "start": False, "threads": 1, **more}
    return Plan(repeats=repeats, **settings)


def test_turns_and_ratios() -> None:
    turns: list[str] = []
    ours = MadeUp("fourfold", turns, [10.0, 100.0, 30.0, 100.0])
    other = MadeUp("other", turns, [5.0, CannotRun("no way"), 10.0])
    result = compare([ours, other], plan(2))
    assert turns == [
        "fourfold decode-32", "other decode-32", "fourfold prefill-512", "other prefill-512",
        "fourfold decode-32", "other decode-32", "fourfold prefill-512",
    ]  # fmt: skip
    decode, prefill = result.figures
    ratio = decode.times_better("fourfold", "other")
    assert ratio is not None
    assert ratio.values == (2.0, 3.0)
    assert decode.best_other("fourfold") == "other"
    assert (prefill.best_other("fourfold"), prefill.times_better("fourfold", "other")) == (None, None)
    assert (result.gaps, result.failures) == ([Note("other", "prefill-512", "no way")], [])


def test_a_peer_that_failed_at_something_is_not_asked_for_it_again() -> None:
    turns: list[str] = []
    ours = MadeUp("fourfold", turns, [1.0] * 4)
    other = MadeUp("other", turns, [5.0, FourfoldError("out of memory"), 7.0])
    result = compare([ours, other], plan(2))
    assert result.failures == [Note("other", "prefill-512", "out of memory")]
    assert turns.count("other prefill-512") == 1
    assert [list(figure.runs) for figure in result.figures] == [["fourfold", "other"], ["fourfold"]]


def test_a_peer_that_does_not_come_up_is_left_out() -> None:
    turns: list[str] = []
    ours = MadeUp("fourfold", turns, [1.0] * 4)
    other = MadeUp("other", turns, [CannotStart("no such model")])
    result = compare([ours, other], plan(2, start=False))
    assert result.failures == [Note("other", "decode-32", "no such model")]
    assert [turn for turn in turns if "other" in turn] == ["other decode-32"]


def test_slow_peers_run_less_often() -> None:
    turns: list[str] = []
    ours = MadeUp("fourfold", turns, [4.0, 5.0, 9.0])
    slow = MadeUp("slow", turns, [2.0])
    result = compare([ours, slow], plan(3, workloads=JOBS[:1], fewer={"slow": 1}))
    (figure,) = result.figures
    ratio = figure.times_better("fourfold", "slow")
    assert ratio is not None
    assert ratio.values == (2.0, 2.5, 4.5)  # each run beside the median of the other's


def test_what_takes_long_is_not_repeated() -> None:
    turns: list[str] = []
    peers = [MadeUp("fourfold", turns, [1.0]), MadeUp("other", turns, [1.0])]
    result = compare(peers, plan(5, workloads=JOBS[:1], repeat_within=1e-9))
    assert len(turns) == 2
    assert [note.reason for note in result.gaps] == ["not repeated: it took 0 s"] * 2


def test_own_workloads_are_run_by_the_first_only() -> None:
    turns: list[str] = []
    peers = [MadeUp("fourfold", turns, [1.0, 2.0]), MadeUp("other", turns, [1.0])]
    compare(peers, plan(1, workloads=JOBS[:1], own=JOBS[1:]))
    assert turns == ["fourfold decode-32", "other decode-32", "fourfold prefill-512"]


@pytest.mark.parametrize("start", [False, True])
def test_a_server_that_ends_says_why(start: bool) -> None:
    loads = [] if start else [ServerLoad("serve", 1, 1, 8, 2)]
    result = compare([MadeUp("broken", [], [])], plan(2, workloads=[], loads=loads, start=start))
    (failure,) = result.failures
    assert failure.reason == "the server ended with 1: no model"
    assert result.figures == []


SERVER = """
import json, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args): pass
    def answer(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        self.answer(b'{"data": [{"id": "m"}]}')
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if asked["max_tokens"] == 14:
            time.sleep(60)
        if asked["max_tokens"] == 13:
            return self.answer(b'data: {"error": "unlucky"}\\n\\ndata: [DONE]\\n\\n')
        token = b'data: {"choices": [{"text": "a"}]}\\n\\n'
        usage = b'data: {"choices": [], "usage": {"completion_tokens": %d}}\\n\\n' % asked["max_tokens"]
        self.answer(token * asked["max_tokens"] + usage + b"data: [DONE]\\n\\n")
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


class Serves(MadeUp):
    needs: list[ServerNeeds]

    def server(self, needs: ServerNeeds) -> ServerCommand:
        self.needs = [*getattr(self, "needs", []), needs]
        return ServerCommand([sys.executable, "-c", SERVER, str(needs.port)])


@pytest.mark.slow
def test_servers_under_load() -> None:
    peer = Serves("fourfold", [], [])
    loads = [
        ServerLoad("eight", 4, 2, 8, 3),
        ServerLoad("unlucky", 1, 1, 8, 13),
        ServerLoad("later", 1, 1, 8, 2),
    ]
    result = compare([peer], plan(1, workloads=[], loads=loads, start=True))
    assert [(each.sequences, each.kv_tokens) for each in peer.needs] == [(2, 2 * 64), (1, 4096)]
    assert [note.what for note in result.failures] == ["unlucky"]
    assert "unlucky" in result.failures[0].reason
    found = {figure.name: figure.runs["fourfold"].median for figure in result.figures}
    assert set(found) == {
        "eight", "eight ttft p50", "eight tpot p50", "start",
        "peak RSS under load", "PSS under load", "peak RSS of one stream", "PSS of one stream",
    }  # fmt: skip
    assert 0 < found["start"] < 10
    assert 5 < found["PSS of one stream"] <= found["peak RSS of one stream"] < 500


def test_free_and_constrained_chats_differ_in_the_schema_alone() -> None:
    loads = [SERVER_LOADS[name] for name in ("serve-free", "serve-json")]
    free, constrained = ([each.body for each in requests_of(load, "m", 1)] for load in loads)
    assert len(free) == len(constrained) == 32
    prompts = [str(body.pop("messages")) for body in (*free, *constrained)]
    assert len(set(prompts)) == 64, "nothing of one load's prompts is cached by the other"
    for with_schema, without in zip(constrained, free, strict=True):
        asked = with_schema.pop("response_format")["json_schema"]["schema"]
        assert len(asked["properties"]) == 8
        assert without.pop("ignore_eos") is True
        assert with_schema == without
        assert (without["max_tokens"], without["temperature"]) == (160, 0.8)
    assert len({body["seed"] for body in free}) == 32


@pytest.mark.slow
def test_a_load_that_takes_too_long() -> None:
    loads = [ServerLoad("slow", 2, 1, 8, 14), ServerLoad("later", 1, 1, 8, 2)]
    result = compare([Serves("fourfold", [], [])], plan(1, workloads=[], loads=loads, timeout=1.0))
    assert [(note.what, note.reason) for note in result.failures] == [("slow", "slow took longer than 1 s")]
    assert "later" not in [figure.name for figure in result.figures]


SCRIPT = """
import time
from loop import run
now = [0.0]
time.perf_counter = lambda: now[0]
def load(settings):
    print("the engine talks")
    def generate(prompts, tokens):
        if tokens == 13: raise RuntimeError("unlucky")
        if tokens == 1000: time.sleep(60)
        now[0] += settings["pause"] * tokens
        return len(prompts) * tokens - (tokens == 7)
    return "9.9", generate
run(load)
"""


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fourfold.bench.compare import worker

    loop = worker.WORKERS / "loop.py"
    monkeypatch.setattr(worker, "WORKERS", tmp_path)
    (tmp_path / "loop.py").write_text(loop.read_text())
    (tmp_path / "fake.py").write_text(SCRIPT)


@pytest.mark.usefixtures("scripts")
def test_worker() -> None:
    peer = WorkerPeer("fake", lambda: Worker(sys.executable, "fake.py", {"pause": 0.01}), 2.0)
    try:
        assert peer.version() == "unknown"
        decode = peer.run(Workload("d", "decode", 1, 8, 6))
        assert decode == pytest.approx(100)
        assert peer.version() == "9.9"
        assert peer.run(Workload("b", "batch", 4, 8, 10)) == pytest.approx(400)
        with pytest.raises(FourfoldError, match="6 tokens, not with 7 each"):
            peer.run(Workload("b", "batch", 1, 8, 7))
        with pytest.raises(FourfoldError, match=r"(?s)fake.py ended: .*unlucky"):
            peer.run(Workload("b", "batch", 1, 8, 13))
        with pytest.raises(FourfoldError, match="took longer than 2 s"):
            peer.run(Workload("b", "batch", 1, 8, 1000))
        assert peer.run(Workload("b", "batch", 4, 8, 10)) == pytest.approx(400)  # started again
    finally:
        peer.close()
    with pytest.raises(CannotRun, match="no server"):
        peer.server(ServerNeeds(1, 1, 1, 1))


@pytest.mark.usefixtures("scripts")
def test_worker_that_cannot_load() -> None:
    with pytest.raises(CannotStart, match=r"none.py ended: .*No such file"):
        WorkerPeer("x", lambda: Worker(sys.executable, "none.py", {}), 1).run(WORKLOADS["batch-8"])
    with pytest.raises(CannotStart, match="cannot be run"):
        Worker("/no/such/python", "fake.py", {})
