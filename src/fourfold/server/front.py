"""What all endpoints share, and how a body becomes sequences for the engine."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from fourfold.answers.answer import AnswerParser, Expected
from fourfold.engine.client import EngineClient
from fourfold.engine.requests import RequestMaker
from fourfold.errors import InvalidRequestError
from fourfold.server.answers import Formats
from fourfold.server.checker import Checker
from fourfold.server.constraints import constraint_of
from fourfold.server.deadlines import Allowed, allowed
from fourfold.server.errors import HTTPError
from fourfold.server.gate import cache_salt, read_body
from fourfold.server.generate import Generation, Job
from fourfold.server.metrics import Metrics
from fourfold.server.reading import PartReader
from fourfold.server.settings import ServerSettings
from fourfold.server.stream import OpenWork
from fourfold.server.traces import Record, Records
from fourfold.server.wire import Body, BodyReader, GenerationBody
from fourfold.text.chat import ChatTemplate
from fourfold.text.output import OutputProcessor
from fourfold.text.tokenizer import Tokenizer
from fourfold.types import Constraint, ModelInfo, SamplingParams

MAX_PREDICTION = 16_384
"""Characters of a prediction that are looked at."""

T = TypeVar("T")

_INLINE_CHARACTERS = 50_000
"""Longer texts are tokenized in a thread: half a millisecond per thousand characters would hold up every
stream."""


class Front(msgspec.Struct, frozen=True):
    """One application's parts. template: None if there is no chat template.  formats: of chat answers."""

    client: EngineClient
    tokenizer: Tokenizer
    settings: ServerSettings
    formats: Formats
    template: ChatTemplate | None = None
    metrics: Metrics = msgspec.field(default_factory=Metrics)
    records: Records = msgspec.field(default_factory=Records)
    open_work: OpenWork = msgspec.field(default_factory=OpenWork)
    checker: Checker = msgspec.field(default_factory=Checker)
    reader: BodyReader = msgspec.field(default_factory=BodyReader)
    created: int = msgspec.field(default_factory=lambda: int(time.time()))

    @property
    def model(self) -> ModelInfo:
        return self.client.model

    @property
    def names(self) -> tuple[str, ...]:
        return self.settings.served_model_names or (self.model.name,)

    @property
    def token_limit(self) -> int:
        """Ids at or above it have no token."""
        return min(self.model.vocab_size, self.tokenizer.vocab_size)

    async def body(self, request: Request, kind: type[Body]) -> tuple[Body, dict[str, object]]:
        return self.reader.read(await read_body(request, self.settings.max_body_bytes), kind)

    def check_model(self, name: str | None) -> str:
        """The name to answer with. Raises HTTPError 404 for one that is not served."""
        if name is None or name in self.names:
            return name or self.names[0]
        raise HTTPError(
            404,
            f"the model {name[:200]!r} does not exist; this server has {', '.join(self.names)}",
            "not_found_error",
            "model",
            "model_not_found",
        )

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return await self.in_thread_if_long(
            len(text), lambda: self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        )

    async def in_thread_if_long(self, size: int, work: Callable[[], T]) -> T:
        return await asyncio.to_thread(work) if size > _INLINE_CHARACTERS else work()

    def check_ids(self, ids: object, field: str) -> list[int]:
        """`ids` as token ids. Raises InvalidRequestError naming the first that is none."""
        try:
            checked = msgspec.convert(ids, list[int])
        except msgspec.ValidationError as error:
            raise InvalidRequestError(f"{field} must be a list of token ids: {error}", field) from error
        if checked and not (min(checked) >= 0 and max(checked) < self.token_limit):
            bad = next(i for i in checked if not 0 <= i < self.token_limit)
            raise InvalidRequestError(
                f"{field} names token {bad}, but ids run from 0 to {self.token_limit - 1}", field
            )
        return checked

    def chat_template(self) -> ChatTemplate:
        """Raises InvalidRequestError if the model has none."""
        return self.template or ChatTemplate.of(self.tokenizer)

    def jobs(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, ask: Ask, per_prompt: int
    ) -> list[Job]:
        """`per_prompt` sequences for each prompt, with seeds that differ by one. Raises
        InvalidRequestError."""
        count = len(prompts) * per_prompt
        if count > self.settings.max_sequences:
            raise InvalidRequestError(
                f"{len(prompts)} prompts times {per_prompt} completions are {count} sequences, but one "
                f"request may have at most {self.settings.max_sequences}; send several requests",
                "n",
            )
        make = RequestMaker(self.model, self.token_limit, tuple(sorted(self.tokenizer.eos_ids)))
        # All are checked before any is made: a request is refused as a whole.
        limits = [
            make.max_tokens(
                len(prompt.ids), sampling, default=ask.default_max_tokens, prompt_field=ask.prompt_field
            )
            for prompt in prompts
        ]
        answer = ask.expected
        shown = frozenset[int]() if answer is None else self.formats.shown(answer.format)
        group = uuid.uuid4().hex
        # What lies beyond only costs speed; this much is encoded in milliseconds.
        expected = ask.prediction[:MAX_PREDICTION]
        predicted = self.tokenizer.encode(expected, add_special_tokens=False) if expected else []
        self.records.add(Record(group, ask.tenant, ask.request_id, count))
        jobs: list[Job] = []
        for number, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
            first = number * per_prompt
            requests = make.siblings(
                [f"{group}-{first + sibling}" for sibling in range(per_prompt)],
                prompt.ids,
                sampling,
                limit,
                cache_salt=ask.salt,
                tenant=ask.tenant,
                user=ask.user,
                weight=ask.weight,
                priority=ask.priority,
                arrival=ask.arrival,
                timeout=ask.allowed.timeout,
                ttft_timeout=ask.allowed.first_token,
                constraint=ask.constraint,
                prediction_ids=predicted,
            )
            for sibling, request in enumerate(requests):
                output = OutputProcessor(
                    self.tokenizer,
                    request.sampling,
                    request.eos_ids,
                    prompt.continues_text,
                    prompt.echoed,
                    shown,
                )
                parts = None if answer is None else PartReader(output, AnswerParser(answer))
                jobs.append(Job(first + sibling, number, sibling, request, output, parts))
            self.metrics.max_tokens.observe(limit)
        self.metrics.n.observe(per_prompt)
        return jobs

    def generation(self, jobs: Sequence[Job], return_trace: bool | None = False) -> Generation:
        """return_trace: whether its answer says what became of it in the engine."""
        record = self.records.of_sequence(jobs[0].request.request_id)
        return Generation(
            self.client,
            jobs,
            self.metrics,
            self.model.max_num_seqs,
            record=record,
            return_trace=bool(return_trace),
        )


class Prompt(msgspec.Struct, frozen=True):
    """Token ids to continue.

    continues_text: the answer goes on in the middle of a text, so that its first space belongs to it.
    echoed: characters of the prompt that the answer begins with.
    """

    ids: list[int]
    continues_text: bool = False
    echoed: int = 0


MAX_USER = 256
"""Characters of `user` that tell one from another."""


class Ask(msgspec.Struct, frozen=True):
    """Who asks, and what is no sampling parameter.

    tenant, weight: by API key.  user: by the body; users of one tenant share what it gets.
    prompt_field: how the body calls its prompt.  default_max_tokens: None for "until the context is full".
    constraint: what every answer must be.
    prediction: what the answers will probably be.
    request_id: of the HTTP request.
    expected: what answers may hold; None if that is content and nothing else.
    """

    salt: str
    tenant: str
    user: str
    weight: float
    priority: int
    arrival: float
    allowed: Allowed
    prompt_field: str
    default_max_tokens: int | None
    constraint: Constraint | None = None
    prediction: str = ""
    request_id: str = ""
    expected: Expected | None = None

    @staticmethod
    async def of(
        front: Front,
        request: Request,
        body: GenerationBody,
        prompt_field: str,
        default_max_tokens: int | None = None,
    ) -> Ask:
        priority = body.priority or 0
        if not -(2**31) <= priority < 2**31:
            raise InvalidRequestError(f"priority must be a 32-bit integer, got {priority}", "priority")
        return Ask(
            cache_salt(request.state.tenant, body.cache_salt),
            request.state.tenant,
            (body.user or "")[:MAX_USER],
            request.state.weight,
            priority,
            time.monotonic(),
            allowed(request, body, front.settings),
            prompt_field,
            default_max_tokens,
            await constraint_of(body, front.checker),
            _prediction(body.prediction),
            request.state.request_id,
        )


def _prediction(given: dict[str, Any] | None) -> str:
    """The text of OpenAI's `prediction`: {"type": "content", "content": text, or parts of type text}."""
    if given is None:
        return ""
    content = given.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if given.get("type") != "content" or not (
        isinstance(parts, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in parts)
    ):
        raise InvalidRequestError(
            'prediction must be {"type": "content", "content": a text or a list of text parts}', "prediction"
        )
    return "".join(part["text"] for part in parts)
