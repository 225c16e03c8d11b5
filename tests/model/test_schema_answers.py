"""Answers of the real model under the collection of real schemas: valid, and the same however made."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher

from fourfold.build.load import load_engine_backend
from fourfold.config import EngineConfig
from fourfold.engine.loop import Engine
from fourfold.errors import FourfoldError, InvalidRequestError
from fourfold.grammar.sources import make_constraint
from fourfold.hub import resolve
from fourfold.text.tokenizer import Tokenizer, load_tokenizer
from fourfold.types import Constraint, EngineRequest, SamplingParams
from fourfold.weights.open import open_checkpoint

COLLECTION = Path(__file__).parents[3] / "shared" / "data" / "schemas" / "dev"
AMPLE = 500
"""Tokens of an answer."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not COLLECTION.is_dir(), reason="the collection of schemas is not on this machine"),
]


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    schema: Any
    constraint: Constraint
    hard: bool
    """The compiler alone refuses it."""


@dataclass(slots=True)
class Answer:
    """reason: of its end; error: if that is an error."""

    tokens: list[int]
    reason: str
    error: str = ""


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    """100 of the schemas, all the hard ones among them."""
    found = []
    for file in sorted(COLLECTION.glob("*.json")):
        schema = json.loads(file.read_text())["schema"]
        try:
            constraint = make_constraint("json", schema, "response_format")
        except InvalidRequestError:
            continue
        plain = LLMatcher.grammar_from_json_schema(json.dumps(schema))
        found.append(Case(file.stem, schema, constraint, bool(LLMatcher.validate_grammar(plain))))
    found.sort(key=lambda case: not case.hard)
    assert len(found) >= 0.95 * len(list(COLLECTION.glob("*.json")))
    return found[:100]


class Model:
    def __init__(self, path: Path) -> None:
        config = EngineConfig(str(path), seed=1, max_num_seqs=64, num_kv_blocks=2000)
        backend, info = load_engine_backend(config, lambda stage, done: None)
        self.tokenizer: Tokenizer = load_tokenizer(open_checkpoint(path))
        self.engine = Engine(backend, info, config, load_tokens=lambda: self.tokenizer)

    def answers(self, asked: Iterable[tuple[str, Constraint, SamplingParams]]) -> list[Answer]:
        """To chat prompts, in order."""
        answers = []
        for i, (prompt, constraint, sampling) in enumerate(asked):
            text = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
            request = EngineRequest(
                request_id=str(i),
                prompt_ids=self.tokenizer.encode(text, add_special_tokens=False, parse_special=True),
                sampling=sampling,
                eos_ids=tuple(self.tokenizer.eos_ids),
                allowed_vocab=self.tokenizer.vocab_size,
                constraint=constraint,
            )
            self.engine.add(request)
            answers.append(Answer([], ""))
        while self.engine.has_work:
            for event in self.engine.step():
                answer = answers[int(event.request_id)]
                answer.tokens += event.token_ids
                answer.reason, answer.error = event.finish_reason or answer.reason, event.error or ""
        return answers

    def text(self, answer: Answer) -> str:
        return self.tokenizer.decode(answer.tokens, skip_special_tokens=True)


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    try:
        path = resolve("smollm2", offline=True).path
    except FourfoldError as error:
        pytest.skip(f"smollm2 is not on this machine: {error}")
    made = Model(path)
    yield made
    made.engine.close()


def prompt_of(case: Case, number: int) -> str:
    what = case.schema.get("title") or case.schema.get("description") or case.name
    return f"Write example number {number} of this as JSON: {str(what)[:200]}"


def test_five_hundred_answers_are_valid(cases: list[Case], model: Model) -> None:
    """Temperature 1. An answer is valid, or cut by max_tokens, or an error that says that none was found."""
    asked = [(case, number) for number in range(5) for case in cases]
    answers = model.answers(
        (
            prompt_of(case, number),
            case.constraint,
            SamplingParams(temperature=1, seed=number, max_tokens=AMPLE),
        )
        for case, number in asked
    )
    ends: dict[str, int] = {}
    wrong = []
    for (case, number), answer in zip(asked, answers, strict=True):
        kind = f"{answer.reason}, {case.constraint.guarantee}"
        ends[kind] = ends.get(kind, 0) + 1
        if answer.reason == "error":
            assert "no valid answer was found" in answer.error or "no token is left" in answer.error, answer
        if answer.reason != "stop":
            continue
        try:
            value = json.loads(model.text(answer))
            validator = jsonschema.validators.validator_for(case.schema, jsonschema.Draft202012Validator)
            validator(case.schema).validate(value)
        except (ValueError, jsonschema.ValidationError) as error:
            wrong.append((case.name, number, str(error)[:200]))
    print(
        f"{len(answers)} answers under {len(cases)} schemas, {sum(c.hard for c in cases)} of them hard: "
        f"{ends}"
    )
    print(f"errors: {[(c.name, n, a.error) for (c, n), a in zip(asked, answers, strict=True) if a.error]}")
    assert not wrong
    assert len(answers) == 500


def test_jumping_forward_changes_no_answer(cases: list[Case], model: Model) -> None:
    """Greedy; with logprobs every token is drawn under its mask. Where they differ, the model spelled forced
    text with other tokens than its tokenizer does, and the first difference is inside forced text."""
    jumped = model.answers(
        (prompt_of(case, 0), case.constraint, SamplingParams(temperature=0, max_tokens=300)) for case in cases
    )
    masked = model.answers(
        (prompt_of(case, 0), case.constraint, SamplingParams(temperature=0, max_tokens=300, logprobs=0))
        for case in cases
    )
    differ = []
    for case, one, other in zip(cases, jumped, masked, strict=True):
        if one.tokens == other.tokens or one.reason != other.reason == "length":
            continue
        at = next(
            (i for i, (a, b) in enumerate(zip(one.tokens, other.tokens, strict=False)) if a != b),
            min(len(one.tokens), len(other.tokens)),
        )
        pieces = [
            model.tokenizer.token_bytes(x.tokens[at]) if at < len(x.tokens) else b"" for x in (one, other)
        ]
        retokenized = pieces[0].startswith(pieces[1]) or pieces[1].startswith(pieces[0])
        differ.append((case.name, at, *pieces, retokenized))
    print(f"{len(cases) - len(differ)} of {len(cases)} pairs equal to the token; the others: {differ}")
    assert all(retokenized for *_, retokenized in differ)
