"""The native backend: every family against the interpreter, and the same bits however the work is cut."""

from __future__ import annotations

import dataclasses
import functools
import subprocess
import sys
import threading
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from models.tiny_models import ADMITTED, CASES, VOCAB, Case, load_weights, make_model, write_gguf
from msgspec.structs import replace

from backends.driver import BLOCK, LIMITS, Floats, Model, Quantized, Run, batch_of, in_chunks, pack, records
from fourfold import _native
from fourfold.engine.batch import Batch
from fourfold.errors import LoadError
from fourfold.models.registry import Definition, load_model_definition
from fourfold.program.interpret import interpret
from fourfold.program.passes import optimize
from fourfold.weights.gguf import open_gguf
from fourfold.weights.hf import open_hf
from fourfold.weights.source import WeightSource

# The kernels work on heads of whole vectors of 16; that others are refused is tested below.
WHOLE_HEADS = {
    name: dataclasses.replace(case, fields={**case.fields, "head_dim": 32})
    if case.fields.get("head_dim") == 24
    else case
    for name, case in CASES.items()
}
UNTIED = {
    "llama": CASES["llama-biases-llama3-rope"],
    "gemma2": Case("Gemma2Config", {**CASES["gemma2"].fields, "tie_word_embeddings": False}),
    "gemma3": Case("Gemma3TextConfig", {**CASES["gemma3"].fields, "tie_word_embeddings": False}),
}
FORMATS = ("Q4_1", "Q8_0", "Q4_0", "Q5_1", "BF16", "Q5_0")
EXACT: dict[str, Any] = {"activation_dtype": "float32", "kv_dtype": "float32"}
FAST: dict[str, Any] = {"activation_dtype": "int8", "kv_dtype": "bfloat16"}

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def tokens_for(name: str, seed: int = 0) -> list[int]:
    count = 40 if name in ADMITTED else 90
    return [int(t) for t in np.random.default_rng(seed).integers(3, VOCAB, count)]


@functools.cache
def saved(name: str) -> TemporaryDirectory[str]:
    folder = TemporaryDirectory(prefix="fourfold-test-")
    make_model(WHOLE_HEADS[name]).save_pretrained(folder.name)
    return folder


@functools.cache
def checkpoint(name: str) -> tuple[Definition, WeightSource]:
    source = open_hf(Path(saved(name).name))
    return load_model_definition(source, ADMITTED.get(name)), source


@functools.cache
def exact_model(name: str) -> Model:
    definition, source = checkpoint(name)
    return Model(optimize(definition.program), pack(definition, source, exact=True), EXACT)


@functools.cache
def fast_source(name: str) -> WeightSource:
    return Quantized(checkpoint(name)[1], FORMATS, {})


@functools.cache
def fast_model(name: str) -> Model:
    definition, _ = checkpoint(name)
    return Model(optimize(definition.program), pack(definition, fast_source(name), exact=False), FAST)


def with_company(model: Model, tokens: list[int], **options: Any) -> Floats:
    """Logits of a sequence among others that come, go, and take steps of other sizes."""
    run, rng = Run(model.backend(**options)), np.random.default_rng(5)
    others = {n: [int(t) for t in rng.integers(3, VOCAB, 40)] for n in ("b", "c")}
    position = 0
    for turn, size in enumerate([3, 1, 30, 1, 1, 20, 50, 90]):
        work = {}
        if turn > 1:
            work["b"] = others["b"][6 * (turn - 2) : 6 * (turn - 1)]
        mine = tokens[position : position + size]
        position += len(mine)
        if mine:
            work["a"] = mine
        if turn % 2:
            work["c"] = others["c"][turn : turn + 1 + turn // 3]
        run.step(work)
    return run.of("a")


@pytest.mark.parametrize("name", WHOLE_HEADS)
def test_float32_gives_the_logits_of_the_interpreter(name: str) -> None:
    definition, source = checkpoint(name)
    tokens = tokens_for(name)
    want = interpret(definition.program, load_weights(definition, source), tokens)
    model = exact_model(name)
    fused = in_chunks(model.backend(), tokens, 128)
    np.testing.assert_allclose(fused, want, atol=1e-4, rtol=0)
    unfused = in_chunks(model.unfused(definition).backend(), tokens, 128)
    np.testing.assert_allclose(fused, unfused, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", WHOLE_HEADS)
@pytest.mark.parametrize("mode", ["float32", "int8"])
def test_any_cut_and_company_and_number_of_threads_gives_the_same_bits(name: str, mode: str) -> None:
    model = exact_model(name) if mode == "float32" else fast_model(name)
    tokens = tokens_for(name)
    whole = in_chunks(model.backend(), tokens, 128)
    for size in (1, 7, 16, 64):
        np.testing.assert_array_equal(in_chunks(model.backend(), tokens, size), whole, err_msg=f"by {size}")
    np.testing.assert_array_equal(with_company(model, tokens), whole)
    for threads in (2, 3):
        found = in_chunks(model.backend(threads=threads), tokens, 37)
        np.testing.assert_array_equal(found, whole, err_msg=f"{threads} threads")
    np.testing.assert_array_equal(with_company(model, tokens, threads=2), whole)


@pytest.mark.parametrize("kv", ["int8", "fp8"])
@pytest.mark.parametrize("mode", ["float32", "int8"])
@pytest.mark.parametrize("name", ["llama-tied", "gemma3"])
def test_eight_bit_caches_give_the_same_bits_in_any_cut_and_company(name: str, mode: str, kv: str) -> None:
    model = exact_model(name) if mode == "float32" else fast_model(name)
    tokens = tokens_for(name)
    whole = in_chunks(model.backend(kv_dtype=kv), tokens, 128)
    for size in (1, 7, 64):
        np.testing.assert_array_equal(in_chunks(model.backend(kv_dtype=kv), tokens, size), whole)
    np.testing.assert_array_equal(with_company(model, tokens, kv_dtype=kv, threads=2), whole)
    for isa in _native.isas() if mode == "float32" else ():
        np.testing.assert_array_equal(in_chunks(model.backend(kv_dtype=kv, isa=isa), tokens, 128), whole)


@pytest.mark.parametrize("kv, share", [("int8", 0.02), ("fp8", 0.1)])
@pytest.mark.parametrize("name", ["llama-tied", "gemma2", "qwen3"])
def test_eight_bit_caches_stay_close_to_float32(name: str, kv: str, share: float) -> None:
    """RMS error against the spread of the logits of tiny random models, which amplify rounding."""
    model, tokens = exact_model(name), tokens_for(name)
    want = in_chunks(model.backend(), tokens, 128)
    error = in_chunks(model.backend(kv_dtype=kv), tokens, 128) - want
    assert 0 < np.sqrt((error**2).mean()) < share * want.std()


@pytest.mark.parametrize("name", ["llama-tied", "gemma3", "gemma2", "qwen3", "phi3-window"])
def test_int8_logits_stay_close_to_the_interpreter_on_the_same_weights(name: str) -> None:
    """Tiny random models amplify rounding; 5 % of the logits' spread separates it from a mistake."""
    definition, _ = checkpoint(name)
    tokens = tokens_for(name)
    want = interpret(definition.program, load_weights(definition, fast_source(name)), tokens)
    error = in_chunks(fast_model(name).backend(), tokens, 128) - want
    assert np.sqrt((error**2).mean()) < 0.05 * want.std()


@pytest.mark.parametrize("name", ["llama-tied", "gemma2", "qwen3"])
def test_integer_weights_are_exact_with_float32_activations(name: str) -> None:
    definition, _ = checkpoint(name)
    tokens = tokens_for(name)
    weights = pack(definition, fast_source(name), exact=True)
    want = interpret(definition.program, load_weights(definition, fast_source(name)), tokens)
    found = in_chunks(Model(optimize(definition.program), weights, EXACT).backend(), tokens, 128)
    np.testing.assert_allclose(found, want, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["llama-tied", "gemma2", "qwen3-bias", "phi3-longrope-partial"])
def test_float32_gives_the_same_bits_on_every_instruction_set(name: str) -> None:
    tokens = tokens_for(name)
    first, *others = [in_chunks(exact_model(name).backend(isa=isa), tokens, 128) for isa in _native.isas()]
    for other in others:
        np.testing.assert_array_equal(other, first)


def test_gguf_rows_are_reordered_to_halves(tmp_path: Path) -> None:
    """The llama converters interleave q and k rows: the logits are those of the Hugging Face files."""
    model = make_model(CASES["llama-tied"])
    source = open_gguf(write_gguf(model, tmp_path / "tiny.gguf"))
    definition = load_model_definition(source, None)
    assert any(b.interleaved_heads for b in definition.bindings.values())
    packed = Model(optimize(definition.program), pack(definition, source, exact=True), EXACT)
    tokens = tokens_for("llama-tied")
    want = in_chunks(exact_model("llama-tied").backend(), tokens, 128)
    np.testing.assert_array_equal(in_chunks(packed.backend(), tokens, 128), want)


@pytest.mark.parametrize("family", UNTIED)
@pytest.mark.parametrize("mode", ["float32", "int8"])
def test_nan_ends_one_sequence_and_leaves_no_trace(family: str, mode: str, tmp_path: Path) -> None:
    """One token's embedding is NaN: its sequence has status 1 from there on, its neighbours their old bits.

    So do sequences that get its KV blocks afterwards.
    """
    make_model(UNTIED[family]).save_pretrained(tmp_path)
    source = open_hf(tmp_path)
    definition = load_model_definition(source, None)
    exact = mode == "float32"
    options = EXACT if exact else FAST
    embedding = definition.bindings["embed.weight"].source
    bad = 77
    formats = ("BF16",) if exact else ("Q4_1", "Q8_0")
    poisoned = Quantized(source, formats, {embedding: bad})
    model = Model(optimize(definition.program), pack(definition, poisoned, exact=exact), options)
    rng = np.random.default_rng(3)
    names = ["a", "b", "c"]
    texts = {n: [int(t) for t in rng.integers(3, bad, 20)] for n in names}
    clean = {n: in_chunks(model.backend(), texts[n], 128) for n in names}

    run = Run(model.backend(threads=2))
    texts["b"][5] = bad
    run.step(texts)
    run.step({n: [9] for n in names})
    for name in ("a", "c"):
        np.testing.assert_array_equal(run.of(name)[:20], clean[name])
        assert run.status_of(name) == [0] * 21
    assert run.status_of("b")[5] == 1
    if not definition.program.kv[0].window:  # a window may slide past it
        assert run.status_of("b")[5:] == [1] * 16

    run.drop("b")
    run.free.sort(key=lambda block: block in run.tables["a"] + run.tables["c"])
    run.step({"d": texts["a"]})
    np.testing.assert_array_equal(run.of("d"), clean["a"])


@pytest.mark.parametrize("kv", ["bfloat16", "float32", "int8", "fp8"])
def test_copied_blocks_continue_with_the_same_bits(kv: str) -> None:
    model, tokens = fast_model("llama-tied"), tokens_for("llama-tied")
    whole = in_chunks(model.backend(kv_dtype=kv), tokens, 128)
    run = Run(model.backend(kv_dtype=kv))
    run.step({"a": tokens[:50]})
    copies = [run.free.pop() for _ in run.tables["a"]]
    run.backend.copy_blocks(list(zip(run.tables["a"], copies, strict=True)))
    run.tables["b"], run.done["b"] = copies, 50
    run.step({"a": tokens[60:70]})  # the original goes another way
    run.step({"b": tokens[50:]})
    np.testing.assert_array_equal(run.of("b"), whole[50:])
    with pytest.raises(ValueError, match="KV block does not exist"):
        run.backend.copy_blocks([(0, LIMITS.num_blocks)])
    with pytest.raises(ValueError, match="KV block does not exist"):
        run.backend.copy_blocks([(-1, 0)])


@pytest.mark.parametrize("kv", ["bfloat16", "float32", "int8", "fp8"])
def test_blocks_that_left_as_bytes_and_came_back_continue_with_the_same_bits(kv: str) -> None:
    model, tokens = fast_model("llama-tied"), tokens_for("llama-tied")
    whole = in_chunks(model.backend(kv_dtype=kv), tokens, 128)
    run, other = Run(model.backend(kv_dtype=kv)), Run(model.backend(kv_dtype=kv))
    run.step({"a": tokens[:50]})
    content = np.empty(run.backend.block_bytes, np.uint8)
    blocks = [other.free.pop() for _ in run.tables["a"]]
    for source, destination in zip(run.tables["a"], blocks, strict=True):
        run.backend.read_block(source, content)
        other.backend.write_block(destination, content)
    other.tables["b"], other.done["b"] = blocks, 50
    other.step({"b": tokens[50:]})
    np.testing.assert_array_equal(other.of("b"), whole[50:])
    for block in (-1, LIMITS.num_blocks):
        with pytest.raises(ValueError, match="KV block does not exist"):
            run.backend.read_block(block, content)
    for size in (0, len(content) - 1, len(content) + 1):
        with pytest.raises(ValueError, match="kv_block_bytes"):
            run.backend.write_block(0, np.zeros(size, np.uint8))


def test_a_step_without_logit_rows_computes_the_cache() -> None:
    model, tokens = fast_model("qwen3"), tokens_for("qwen3")
    backend = model.backend()
    whole = in_chunks(model.backend(), tokens, 128)
    table = [3, 1, 2]
    result = backend.run(batch_of([(tokens[:70], 0, table)], [], VOCAB))
    assert result.token.shape == (0,)
    result = backend.run(batch_of([(tokens[70:], 70, table)], [0, 19], VOCAB))
    assert result.logits is not None
    np.testing.assert_array_equal(result.logits, whole[[70, 89]])
    np.testing.assert_array_equal(result.token, whole[[70, 89]].argmax(1))


def base() -> Batch:
    return batch_of([([5, 6, 7], 0, [0]), ([8], 40, [1, 2])], [2, 3], VOCAB)


def sample(**fields: Any) -> dict[str, Any]:
    changed = records([2, 3], VOCAB)
    for key, value in fields.items():
        changed[key][1] = value
    return {"samples": changed}


def masks(rows: int, words: int, dtype: Any = np.uint32, flags: int = 1) -> Any:
    return SimpleNamespace(rows=np.zeros((rows, words), dtype), ready=np.ones(flags, np.uint8))


def ints(*values: int) -> np.ndarray[Any, Any]:
    return np.array(values, np.int32)


FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"tokens": ints(5, 6, VOCAB, 8)}, "token id outside the vocabulary"),
    ({"tokens": ints(5, -1, 7, 8)}, "token id outside the vocabulary"),
    ({"tokens": ints(5, 6, 7)}, "sequences and tokens differ in number"),
    ({"tokens": ints()}, "tokens for one step"),
    ({"tokens": np.full(LIMITS.max_batch_tokens + 1, 5, np.int32)}, "too many tokens for one step"),
    ({"seq_tokens": ints(3, 0)}, "sequence longer than the context|at least one token"),
    ({"seq_tokens": ints(3, -1)}, "sequence longer than the context|at least one token"),
    ({"seq_tokens": ints(3)}, "one entry per sequence"),
    ({"seq_tokens": ints(*[1] * 9)}, "too many sequences"),
    ({"seq_context": ints(0, -40)}, "context"),
    ({"seq_context": ints(0, LIMITS.max_context)}, "longer than the context"),
    ({"seq_context": ints(0, 2**31 - 1)}, "longer than the context"),
    ({"seq_context": ints(0, 64)}, "too few KV blocks"),
    ({"block_start": ints(0, 1)}, "one entry per sequence"),
    ({"block_start": ints(0, 2, 1)}, "block_start is not ascending"),
    ({"block_start": ints(0, 1, 4)}, "block_start is not ascending"),
    ({"block_start": ints(-1, 1, 3)}, "block_start is not ascending"),
    ({"blocks": ints(0, 1, LIMITS.num_blocks)}, "KV block does not exist"),
    ({"blocks": ints(0, -1, 2)}, "KV block does not exist"),
    (sample(row=4), "logit row outside the batch"),
    (sample(row=-1), "logit row outside the batch"),
    (sample(target=VOCAB), "target outside the vocabulary"),
    (sample(allowed_vocab=0), "allowed_vocab"),
    (sample(history_end=1), "history range"),
    (sample(history_start=-1), "history range"),
    (sample(bias_end=1), "bias range"),
    (sample(ban_start=1, ban_end=0), "ban range"),
    (sample(mask=0), "mask row"),
    ({**sample(mask=1), "masks": masks(1, 5)}, "mask row"),
    ({"masks": masks(1, 4)}, "masks are too narrow"),
    ({"masks": masks(1, 5, flags=2)}, "masks_ready is one flag"),
    ({"bias_ids": ints(1), "bias_values": np.zeros(2, np.float32)}, "one bias value per id"),
    ({"bias_ids": ints(VOCAB), "bias_values": np.zeros(1, np.float32)}, "token id outside the vocabulary"),
    ({"ban_ids": ints(-1)}, "token id outside the vocabulary"),
    ({"history": ints(VOCAB)}, "token id outside the vocabulary"),
]


@pytest.mark.parametrize(
    "change, fault", FAULTS, ids=[f"{i}-{fault[:24]}" for i, (_, fault) in enumerate(FAULTS)]
)
def test_a_batch_that_breaks_its_contract_is_refused_by_name(change: dict[str, Any], fault: str) -> None:
    backend = fast_model("llama-tied").backend()
    before = backend.run(base()).logits
    with pytest.raises(ValueError, match=fault):
        backend.run(replace(base(), **change))
    assert before is not None
    np.testing.assert_array_equal(backend.run(base()).logits, before)


def test_arrays_of_another_type_are_refused_not_converted() -> None:
    backend = fast_model("llama-tied").backend()
    for change in (
        {"tokens": np.array([5, 6, 7, 8], np.int64)},
        {"blocks": np.array([0, 1, 2], np.float64)},
        {"blocks": np.array([0, 9, 1, 9, 2], np.int32)[::2]},
        {"seq_context": np.array([[0, 40]], np.int32)},
        {"masks": masks(1, 5, np.int64)},
    ):
        with pytest.raises(TypeError):
            backend.run(replace(base(), **change))


def test_masks_may_come_while_the_step_runs() -> None:
    """It draws when they are there, not before."""
    backend = fast_model("llama-tied").backend()
    late = masks(1, 5)
    late.ready[0] = 0

    def arrive() -> None:
        late.rows[0, 3] = 1 << 5
        late.ready[0] = 1

    timer = threading.Timer(0.2, arrive)
    timer.start()
    result = backend.run(replace(base(), **sample(mask=0), masks=late))
    timer.join()
    assert result.token[1] == 3 * 32 + 5
    assert result.token[0] == backend.run(base()).token[0]


def test_heads_of_broken_vectors_are_a_load_error(tmp_path: Path) -> None:
    make_model(CASES["llama-head-dim"]).save_pretrained(tmp_path)
    source = open_hf(tmp_path)
    definition = load_model_definition(source, None)
    model = Model(optimize(definition.program), pack(definition, source, exact=True), EXACT)
    with pytest.raises(LoadError, match="llama model: op 2: head_dim must be a multiple of 16"):
        model.backend()


def test_limits_out_of_range_are_load_errors() -> None:
    model = exact_model("llama-tied")
    for change in ({"max_batch_tokens": 0}, {"max_seqs": 0}, {"max_context": 0}, {"num_blocks": 0}):
        with pytest.raises(LoadError, match="limits must be positive"):
            model.backend(replace(LIMITS, **change))
    for threads in (0, 1025):
        with pytest.raises(LoadError, match="threads must be between 1 and 1024"):
            model.backend(threads=threads)
    with pytest.raises(LoadError, match="unknown instruction set neon"):
        model.backend(isa="neon")


LITTLE_MEMORY = """
import resource, sys
sys.path.insert(0, {tests!r})
from backends.test_native import exact_model
from fourfold.errors import LoadError
model = exact_model("llama-tied")
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), resource.RLIM_INFINITY))
try:
    model.backend(threads=1024)
except LoadError as error:
    print(error)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's address space limit")
def test_threads_that_cannot_be_started_are_a_load_error() -> None:
    """A thousand stacks do not fit; without care the process would be terminated."""
    code = LITTLE_MEMORY.format(tests=str(Path(__file__).parent.parent))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "the native runtime cannot run this llama model" in done.stdout


def test_sizes_are_those_of_the_model() -> None:
    backend = fast_model("llama-tied").backend()
    assert (backend.block_size, backend.num_blocks) == (BLOCK, 16)
    assert (backend.vocab_size, backend.max_batch_tokens) == (VOCAB, 160)
    backend.close()
