"""Adapters on recorded outputs of the programs they run; turns, ratios and failures with made-up peers."""

from __future__ import annotations

import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fourfold.bench.compare.llama_cpp import LlamaCpp, batched_bench_speed, llama_bench_speed
from fourfold.bench.compare.peer import ServerCommand, ServerNeeds
from fourfold.bench.compare.run import compare
from fourfold.bench.compare.serving import ServerLoad
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


def test_llama_outputs() -> None:
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
        LlamaCpp.find(tmp_path, Path("m.gguf"), 2)
    program(tmp_path / "llama-bench", LLAMA_BENCH)
    found = LlamaCpp.find(tmp_path, Path("m.gguf"), 2)
    assert found is not None
    assert found.run(WORKLOADS["decode-32"]) == 6.76553
    assert found.run(WORKLOADS["batch-8"]) is None
    assert found.server(ServerNeeds(1, 2, 3, 4)) is None
    program(tmp_path / "llama-batched-bench", BATCHED_BENCH)
    program(tmp_path / "llama-server", "")
    found = LlamaCpp.find(tmp_path, Path("m.gguf"), 2)
    assert found is not None
    assert found.run(WORKLOADS["batch-8"]) == pytest.approx(8 / 5.785256)
    assert found.run(WORKLOADS["shared-prefix"]) is None
    server = found.server(ServerNeeds(port=81, threads=2, sequences=32, kv_tokens=1000))
    assert server is not None
    assert list(server.command)[1:] == [
        "-m", "m.gguf", "-t", "2", "-tb", "2", "--host", "127.0.0.1", "--port", "81",
        "--parallel", "32", "-c", "1000", "--no-warmup",
    ]  # fmt: skip
    program(tmp_path / "llama-bench", "", status=3)
    with pytest.raises(
        FourfoldError, match=r"ended with 3: \['-m', 'm.gguf', '-t', '2', '-p', '512', '-n', '0'"
    ):
        found.run(WORKLOADS["prefill-512"])


class MadeUp:
    """A peer whose n-th run gives the n-th number; None cannot run, an exception is raised."""

    def __init__(self, name: str, turns: list[str], results: list[float | Exception | None]) -> None:
        self.name = name
        self._turns = turns
        self._results = iter(results)

    def version(self) -> str:
        return "1"

    def run(self, workload: Workload) -> float | None:
        self._turns.append(f"{self.name} {workload.name}")
        result = next(self._results)
        if isinstance(result, Exception):
            raise result
        return result

    def server(self, needs: ServerNeeds) -> ServerCommand | None:
        return ServerCommand([sys.executable, "-c", "import sys; sys.exit('no model')"])

    def close(self) -> None:
        pass


JOBS = [WORKLOADS["decode-32"], WORKLOADS["prefill-512"]]


def test_turns_and_ratios() -> None:
    turns: list[str] = []
    ours = MadeUp("fourfold", turns, [10.0, 100.0, 30.0, 100.0])
    other = MadeUp("other", turns, [5.0, None, 10.0, None])
    result = compare([ours, other], JOBS, [], 2, threads=1, with_servers=False)
    one_round = ["fourfold decode-32", "other decode-32", "fourfold prefill-512", "other prefill-512"]
    assert turns == one_round * 2
    decode, prefill = result.figures
    ratio = decode.times_better("fourfold", "other")
    assert ratio is not None
    assert ratio.values == (2.0, 3.0)
    assert decode.best_other("fourfold") == "other"
    assert (prefill.best_other("fourfold"), prefill.times_better("fourfold", "other")) == (None, None)


def test_a_failing_peer_is_left_out() -> None:
    turns: list[str] = []
    ours = MadeUp("fourfold", turns, [1.0] * 4)
    other = MadeUp("other", turns, [5.0, FourfoldError("out of memory")])
    result = compare([ours, other], JOBS, [], 2, threads=1, with_servers=False)
    assert result.failures == {"other": "prefill-512: out of memory"}
    assert turns.count("other decode-32") == 1
    assert [list(figure.runs) for figure in result.figures] == [["fourfold"], ["fourfold"]]


def test_a_server_that_ends_says_why() -> None:
    peer = MadeUp("broken", [], [])
    loads = [ServerLoad("serve", 1, 1, 8, 2)]
    result = compare([peer], [], loads, 1, threads=1, with_servers=True)
    assert result.failures == {"broken": "server: the server ended with 1: no model"}


SCRIPT = """
import time
from loop import run
def load(settings):
    print("the engine talks")
    def generate(prompts, tokens):
        if tokens == 13: raise RuntimeError("unlucky")
        time.sleep(settings["pause"] * tokens)
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
    peer = WorkerPeer("fake", lambda: Worker(sys.executable, "fake.py", {"pause": 0.01}))
    try:
        assert peer.version() == "9.9"
        decode = peer.run(Workload("d", "decode", 1, 8, 6))
        assert decode == pytest.approx(100, rel=0.5)
        assert peer.run(Workload("b", "batch", 4, 8, 10)) == pytest.approx(400, rel=0.5)
        with pytest.raises(FourfoldError, match="6 tokens, not with 7 each"):
            peer.run(Workload("b", "batch", 1, 8, 7))
        with pytest.raises(FourfoldError, match=r"(?s)fake.py ended: .*unlucky"):
            peer.run(Workload("b", "batch", 1, 8, 13))
    finally:
        peer.close()
    assert peer.server(ServerNeeds(1, 1, 1, 1)) is None


@pytest.mark.usefixtures("scripts")
def test_worker_that_cannot_load() -> None:
    with pytest.raises(FourfoldError, match=r"none.py ended: .*No such file"):
        WorkerPeer("x", lambda: Worker(sys.executable, "none.py", {})).version()
    with pytest.raises(FourfoldError, match="cannot be run"):
        Worker("/no/such/python", "fake.py", {})
