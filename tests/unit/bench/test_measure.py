"""Limits, kernels and costs on small models of random weights; checked against independent sums."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from fourfold import _native
from fourfold.bench import kernels as kernels_module
from fourfold.bench.kernels import measure_kernels
from fourfold.bench.limits import measure_limits, thread_counts
from fourfold.bench.model_costs import model_costs
from fourfold.bench.process import first_output_seconds, peak_memory, process_tree
from fourfold.bench.random_model import MIXES, Shape, write_random_model
from fourfold.build.pack import pack_matrix
from fourfold.cli.bench import bench
from fourfold.config import EngineConfig
from fourfold.errors import ConfigError, FourfoldError
from fourfold.models.registry import load_model_definition
from fourfold.text.vocabulary import byte_alphabet
from fourfold.weights.gguf_writer import write_gguf
from fourfold.weights.open import open_checkpoint

SHAPE = Shape(hidden=256, layers=9, heads=4, kv_heads=2, feed_forward=512, context=4096)
VOCAB = 320


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file that is nothing but a vocabulary of bytes."""
    path = tmp_path_factory.mktemp("tokenizer") / "bytes.gguf"
    words = list(byte_alphabet())
    tokens = [str(word) for word in words] + [f"<{i}>" for i in range(VOCAB - len(words))]
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.ones(VOCAB, np.int32),
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": VOCAB - 1,
    }
    write_gguf(path, metadata, [])
    return path


@pytest.fixture(scope="module", params=["Q4_0", "Q4_K_M", "BF16"])
def model(request: pytest.FixtureRequest, tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / f"{request.param}.gguf"
    write_random_model(path, request.param, SHAPE, tokenizer)
    return path


def test_thread_counts() -> None:
    assert [thread_counts(n) for n in (1, 2, 3, 8, 12)] == [
        [1], [1, 2], [1, 2, 3], [1, 2, 4, 8], [1, 2, 4, 8, 12],
    ]  # fmt: skip


@pytest.mark.parametrize("isa", _native.isas())
def test_limits(isa: str) -> None:
    limits = measure_limits([1, 2], 2, isa=isa, buffer_bytes=8 << 20, peak_seconds=0.002)
    kinds = {"read", "fp32"} | ({"int8"} if isa != "scalar" else set())
    kinds |= {"bf16"} if isa in ("avx512", "amx") else set()
    measured = [(each.kind, each.threads) for each in limits.measured]
    assert sorted(measured) == sorted((kind, threads) for kind in kinds for threads in (1, 2))
    # How fast exactly, a busy machine does not tell.
    assert all(1e6 < each.runs.median < 1e15 for each in limits.measured)
    assert limits.median("read", 3) is None
    assert {len(each.runs.values) for each in limits.measured} == {2}


def test_bad_limits() -> None:
    with pytest.raises(ValueError, match="instruction set sse9"):
        measure_limits([1], 1, isa="sse9")
    for threads, size in ((0, 1), (2000, 1), (1, 0)):
        with pytest.raises(ValueError, match="must be"):
            _native.LimitBench("scalar", threads, size)
    with pytest.raises(ValueError, match="unknown kind fp7"):
        _native.LimitBench("scalar", 1, 1).peak("fp7", 0.001)
    with pytest.raises(ValueError, match="has no int8"):
        _native.LimitBench("scalar", 1, 1).peak("int8", 0.001)


@pytest.mark.parametrize("mix", MIXES)
def test_random_models(mix: str, tokenizer: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_random_model(path, mix, SHAPE, tokenizer)
    source = open_checkpoint(path)
    program = load_model_definition(source, None).program
    assert (program.vocab_size, program.hidden_size, len(program.kv)) == (VOCAB, 256, SHAPE.layers)
    head, query = source.tensor("output.weight").format, source.tensor("blk.0.attn_q.weight").format
    assert head == (mix if mix in ("F16", "BF16", "Q8_0") else "Q6_K")
    assert query == ("Q4_K" if mix == "Q4_K_M" else mix)
    if mix == "Q4_K_M":  # 9 layers: the first, the last two, and every third from the fourth on
        down = [source.tensor(f"blk.{i}.ffn_down.weight").format for i in range(SHAPE.layers)]
        assert [i for i, kind in enumerate(down) if kind == "Q6_K"] == [0, 3, 6, 7, 8]
    weights = source.tensor("blk.1.attn_q.weight")
    from fourfold.quant.registry import get_format

    values = get_format(weights.format).decode(weights.data, weights.shape)
    assert float(values.std()) == pytest.approx(0.02, rel=0.1)


def test_models_that_cannot_be(tokenizer: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="blocks of 256"):
        write_random_model(tmp_path / "m", "Q4_K_M", Shape(128, 1, 2, 1, 128), tokenizer)
    with pytest.raises(ConfigError, match="unknown format 'Q9'"):
        write_random_model(tmp_path / "m", "Q9", SHAPE, tokenizer)
    with pytest.raises(ConfigError, match="each must be a multiple"):
        Shape(hidden=256, heads=3)
    write_gguf(tmp_path / "empty.gguf", {"general.architecture": "llama"}, [])
    with pytest.raises(ConfigError, match="has no tokenizer"):
        write_random_model(tmp_path / "m", "Q4_0", SHAPE, tmp_path / "empty.gguf")


def _is_late(name: str) -> bool:
    return (
        re.match(rf"blk\.{SHAPE.layers - 1}\.(attn_output|ffn_gate|ffn_up|ffn_down)\.weight", name)
        is not None
    )


def test_costs(model: Path) -> None:
    costs = model_costs(model, EngineConfig())
    source = open_checkpoint(model)
    sizes = {name: source.tensor(name) for name in source.names()}
    row = sizes["token_embd.weight"].data.nbytes / VOCAB
    in_file = sum(t.data.nbytes for name, t in sizes.items() if name != "token_embd.weight")
    assert costs.decode_file_bytes() == pytest.approx(in_file + row)
    matrices = [t for name, t in sizes.items() if len(t.shape) == 2 and name != "token_embd.weight"]
    layers = sum(t.shape[0] * t.shape[1] for t in matrices if t.name != "output.weight")
    # Of the last layer, what follows attention is computed for the last token only, like the head.
    late = sum(t.shape[0] * t.shape[1] for t in matrices if _is_late(t.name))
    assert costs.prefill_operations(10) == 2 * (10 * (layers - late) + late + VOCAB * 256)

    definition = load_model_definition(source, None)
    packed = sum(
        pack_matrix(source, definition.bindings[name], exact=False).data.nbytes
        for name, spec in definition.program.weights.items()
        if len(spec.shape) == 2 and "embed" not in name
    )
    vectors = sum(t.data.nbytes for t in sizes.values() if len(t.shape) == 1)
    kv = SHAPE.layers * 2 * 2 * 64 * 2
    assert costs.kv_bytes_per_token() == kv
    read = costs.decode_bytes(99)
    embedding = costs.packed_bytes[next(n for n in definition.program.weights if "embed" in n)] * 256
    assert read == pytest.approx(packed + vectors + embedding + kv * 101, rel=0.01)


def test_kernels(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels_module, "COLD_BYTES", 1 << 20)
    monkeypatch.setattr(kernels_module, "ENOUGH_OPERATIONS", 1e6)
    monkeypatch.setattr(kernels_module, "ATTENTION_CASES", (("decode", 2, 1, 40), ("prefill", 1, 16, 40)))
    times = measure_kernels(model, EngineConfig(activation_dtype="int8"), 1, (1, 6), 2)
    assert all(each.seconds.low > 0 and each.speed > 0 for each in times)
    for rows in (1, 6):
        matmuls = [each for each in times if each.rows == rows and each.name.startswith("matmul")]
        costs = model_costs(model, EngineConfig())
        source = open_checkpoint(model)
        late = sum(math.prod(source.tensor(name).shape) for name in source.names() if _is_late(name))
        operations = sum(each.operations * each.count for each in matmuls)
        assert operations == costs.prefill_operations(rows) + (rows - 1) * 2 * (late + VOCAB * 256)
        assert {each.limit for each in matmuls} == (
            {"read"} if rows == 1 else {"bf16"} if model.stem == "BF16" else {"int8"}
        )
    attention = [each for each in times if each.name.startswith("attention")]
    assert [(each.count, each.rows, each.limit) for each in attention] == [(9, 2, "read"), (9, 16, "bf16")]
    assert attention[0].bytes == 2 * 2 * 64 * 2 * 2 * 41
    assert sum(each.name.startswith("sampling") for each in times) == len(kernels_module.SAMPLING_CASES)
    only = measure_kernels(model, EngineConfig(activation_dtype="float32"), 1, (1,), 1, "matmul head")
    assert [each.name.split()[:2] for each in only] == [["matmul", "head"]]


def test_commands(model: Path, tmp_path: Path) -> None:
    run = CliRunner().invoke
    limits = run(bench, ["limits", "-t", "2", "-r", "1", "--buffer", "8M"], catch_exceptions=False)
    assert limits.exit_code == 0
    assert "memory read" in limits.output
    out = tmp_path / "kernels.json"
    arguments = [
        "kernels",
        str(model),
        "-r",
        "1",
        "--rows",
        "1",
        "--only",
        "head",
        "--json",
        str(out),
        "-t",
        "1",
    ]
    kernels = run(bench, arguments, catch_exceptions=False)
    assert kernels.exit_code == 0
    assert "320" in kernels.output
    assert '"of_limit"' in out.read_text()


def test_first_output() -> None:
    quiet, slow = (
        "import sys; sys.exit('no')",
        "import time; time.sleep(.2); print('x', flush=True); time.sleep(60)",
    )
    assert 0.2 < first_output_seconds([sys.executable, "-c", slow]) < 30
    with pytest.raises(FourfoldError, match="it said: no"):
        first_output_seconds([sys.executable, "-c", quiet])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_of_a_family() -> None:
    import subprocess

    child = "import subprocess, sys; x = b'x' * (64 << 20); print(len(x), flush=True); sys.stdin.read()"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert len(process_tree(process.pid)) == 2
        assert 64 << 20 < peak_memory(process.pid) < 256 << 20
        process.communicate()
