"""What constraints cost with the real vocabulary, over the collection of real schemas: CPU time, for others
may use the machine at the same time."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator

import numpy as np
import pytest

from fourfold.errors import FourfoldError, InvalidRequestError
from fourfold.grammar.compile import Compiler
from fourfold.grammar.guide import Guide
from fourfold.grammar.sources import make_constraint
from fourfold.hub import resolve
from fourfold.text.tokenizer import Tokenizer, load_tokenizer
from fourfold.types import Constraint
from fourfold.weights.open import open_checkpoint

from .test_schema_answers import COLLECTION

BATCH = 32
WALK = 40
"""Tokens drawn under each schema."""
FORWARD = 0.01
"""Seconds that 32 rows of a model of 135M take where computing is fastest: 8.6e9 operations at 0.88e12/s."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not COLLECTION.is_dir(), reason="the collection of schemas is not on this machine"),
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    try:
        return load_tokenizer(open_checkpoint(resolve("smollm2", offline=True).path))
    except FourfoldError as error:
        pytest.skip(f"smollm2 is not on this machine: {error}")


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Compiler:
    made = Compiler(lambda: tokenizer, tokenizer.vocab_size)
    made.warm()
    make_constraint("json", {"uniqueItems": True}, "f")  # imports
    return made


def percentiles(seconds: list[float]) -> str:
    middle, ninety, last = np.quantile(seconds, [0.5, 0.9, 0.99]) * 1e3
    return f"p50 {middle:.2f}, p90 {ninety:.2f}, p99 {last:.2f}, most {max(seconds) * 1e3:.2f} ms"


def test_compiling(compiler: Compiler) -> None:
    """Checking and translating, in the server, and compiling, in the engine: 99 % under 50 ms each."""
    translated, compiled = [], []
    for file in sorted(COLLECTION.glob("*.json")):
        schema = json.loads(file.read_text())["schema"]
        begin = time.process_time()
        try:
            constraint = make_constraint("json", schema, "f")
        except InvalidRequestError:
            continue
        end = time.process_time()
        translated.append(end - begin)
        compiler.compile(constraint, "compiling")
        compiled.append(time.process_time() - end)
    print(f"translating: {percentiles(translated)}; compiling: {percentiles(compiled)}")
    assert len(compiled) >= 0.95 * 161
    assert np.quantile(translated, 0.99) < 0.05
    assert np.quantile(compiled, 0.99) < 0.05


def walk(guide: Guide, rng: random.Random, eos: tuple[int, ...]) -> Iterator[float]:
    """Draws tokens evenly of those allowed; yields what each mask took."""
    row = np.zeros((1, guide.words), np.uint32)
    for _ in range(WALK):
        for token in guide.forced_tokens(WALK):
            guide.accept(token, forced=True)
        if guide.error is not None or guide.finished:
            return
        begin = time.thread_time()
        guide.fill_masks(row, (), (0,))
        yield time.thread_time() - begin
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        if not len(allowed) or (token := int(rng.choice(allowed.tolist()))) in eos:
            return
        guide.accept(token)


def test_masks(compiler: Compiler, tokenizer: Tokenizer) -> None:
    """Of 32 sequences under different schemas, the worst case: 99 % of the masks take less than 1 ms, and all
    32, one after the other, less than the forward pass beside which they are computed."""
    rng = random.Random(1)
    constraints: list[Constraint] = []
    for file in sorted(COLLECTION.glob("*.json")):
        try:
            constraints.append(make_constraint("json", json.loads(file.read_text())["schema"], "f"))
        except InvalidRequestError:
            continue
    coming = rng.sample(constraints, len(constraints))
    walks: list[Iterator[float]] = []
    single: list[float] = []
    batches: list[float] = []
    while coming:
        while coming and len(walks) < BATCH:
            walks.append(walk(compiler.compile(coming.pop(), ""), rng, tokenizer.eos_ids))
        took = [next(each, None) for each in walks]
        walks = [each for each, seconds in zip(walks, took, strict=True) if seconds is not None]
        step = [seconds for seconds in took if seconds is not None]
        single += step
        if len(step) == BATCH:
            batches.append(sum(step))
    print(f"one mask: {percentiles(single)} of {len(single)}; 32: {percentiles(batches)} of {len(batches)}")
    assert len(single) > 1000
    assert len(batches) > 20
    assert np.quantile(single, 0.99) < 0.001
    assert np.quantile(batches, 0.99) < FORWARD
