"""An engine that says what it is told to, and a real but tiny tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from fourfold.engine.operations import CacheOperation, CacheOutcome
from fourfold.errors import EngineDeadError, FourfoldError
from fourfold.text.bpe import LibraryEncoder
from fourfold.text.tokenizer import Tokenizer, TokenizerSpec
from fourfold.text.vocabulary import TokenKind, Vocabulary, byte_alphabet
from fourfold.timeline import EngineView, LiveRequest, Timeline, TimelineEvent, Totals, TreeView
from fourfold.types import EngineEvent, EngineRequest, EngineStats, ModelInfo, TokenLogprob

TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == 'system' and not loop.first -%}
{{ raise_exception('system must come first') }}
{%- endif -%}
<|start|>{{ message.role }}
{{ message.content }}<|end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant
{% endif -%}"""

SPECIALS = ("<|bos|>", "<|eos|>", "<|start|>", "<|end|>")
MERGES = [("H", "e"), ("l", "l"), ("He", "ll"), ("Hell", "o"), ("Ġ", "w"), ("a", "b"), ("c", "d")]


def tiny_tokenizer(template: str | None = TEMPLATE) -> Tokenizer:
    """Byte-level BPE: 256 bytes, seven merges, four special tokens. BOS comes first; EOS and <|end|> end."""
    texts = sorted(byte_alphabet(), key=byte_alphabet().__getitem__)
    texts += ["".join(pair) for pair in MERGES]
    library = tokenizers.Tokenizer(models.BPE({text: id for id, text in enumerate(texts)}, MERGES))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIALS])
    kinds = bytes([TokenKind.NORMAL] * len(texts) + [TokenKind.CONTROL] * len(SPECIALS))
    first = len(texts)
    vocabulary = Vocabulary([*texts, *SPECIALS], kinds, "byte-level")
    spec = TokenizerSpec(
        bos_id=first,
        eos_ids=(first + 1, first + 3),
        prefix_ids=(first,),
        special_tokens={"bos_token": SPECIALS[0], "eos_token": SPECIALS[1]},
        chat_templates={} if template is None else {"default": template},
    )
    return Tokenizer(vocabulary, LibraryEncoder(library), spec)


MODEL = ModelInfo(
    name="tiny", path="tiny.gguf", family="llama", parameters=1234, vocab_size=300, max_model_len=128,
    block_size=16, num_blocks=64, max_num_seqs=4, max_num_batched_tokens=64, weight_bytes=4321,
)  # fmt: skip


def timeline_of(request: EngineRequest, finished: bool) -> Timeline:
    return Timeline(
        request_id=request.request_id, arrived=1e9, state="finished",
        totals=Totals(prompt_tokens=len(request.prompt_ids)),
        events=[
            TimelineEvent(event="queued", at=0.0, tokens=len(request.prompt_ids)),
            TimelineEvent(event="held", at=0.25, steps=2, until=0.5, reason="prefix_in_flight"),
            TimelineEvent(event="finished", at=1.0),
        ],
        finish_reason="stop" if finished else "abort",
    )  # fmt: skip


class FakeClient:
    """An EngineClient. reply: what to say to a request; an exception is raised instead of the first event.

    step: seconds per token.  gate: while clear, requests wait as if they were queued.
    """

    def __init__(
        self, tokenizer: Tokenizer, reply: Callable[[EngineRequest], str | FourfoldError] | None = None
    ) -> None:
        self.model = MODEL
        self.tokenizer = tokenizer
        self.reply = reply or (lambda _: "Hello world")
        self.step = 0.0
        self.gate = asyncio.Event()
        self.gate.set()
        self.per_event = 1
        self.cached = 0
        self.fail_after: tuple[int, FourfoldError] | None = None
        self.health: tuple[bool, str] = (True, "")
        self.requests: list[EngineRequest] = []
        self.active: set[str] = set()
        self.most_active = 0
        self.aborted: list[str] = []
        self.numbers = EngineStats(total_blocks=64, free_blocks=64)
        self.logprob = -0.5
        self.queue_seconds = 0.0
        self.known: dict[str, Timeline] = {}
        """Timelines of ended requests."""
        self.mute = False
        self.tree: TreeView | None = None
        self.asked_salts: Sequence[str] | None = None
        self.operations: list[CacheOperation] = []
        self.outcome = CacheOutcome()

    async def submit(self, request: EngineRequest) -> AsyncGenerator[EngineEvent]:
        assert request.request_id not in self.active
        assert request.sampling.n == 1
        self.requests.append(request)
        self.active.add(request.request_id)
        self.most_active = max(self.most_active, len(self.active))
        finished = False
        try:
            await self.gate.wait()
            said = self.reply(request)
            if isinstance(said, FourfoldError):
                raise said
            async for event in self._events(request, said):
                finished = event.finish_reason is not None
                yield event
        finally:
            self.known[request.request_id] = timeline_of(request, finished)
            self.active.discard(request.request_id)
            if not finished:
                self.aborted.append(request.request_id)

    async def _events(self, request: EngineRequest, said: str) -> AsyncGenerator[EngineEvent]:
        sampling = request.sampling
        ids = [*self.tokenizer.encode(said, add_special_tokens=False), self.tokenizer.eos_ids[0]]
        reason, stop = "stop", ids[-1]
        if sampling.max_tokens is not None and len(ids) > sampling.max_tokens:
            ids, reason, stop = ids[: sampling.max_tokens], "length", None
        prompt = None
        if sampling.prompt_logprobs is not None:
            prompt = [None, *(self._logprob(id, sampling.prompt_logprobs) for id in request.prompt_ids[1:])]
        pieces = [ids[i : i + self.per_event] for i in range(0, len(ids), self.per_event)] or [[]]
        for number, piece in enumerate(pieces):
            await asyncio.sleep(self.step)
            if self.fail_after is not None and number == self.fail_after[0]:
                raise self.fail_after[1]
            last = number == len(pieces) - 1
            yield EngineEvent(
                request_id=request.request_id,
                token_ids=piece,
                logprobs=None
                if sampling.logprobs is None
                else [self._logprob(id, sampling.logprobs) for id in piece],
                prompt_logprobs=prompt if number == 0 else None,
                finish_reason=reason if last else None,
                stop_token=stop if last else None,
                cached_tokens=self.cached if number == 0 else 0,
                queue_seconds=self.queue_seconds if number == 0 else 0.0,
            )

    def _logprob(self, id: int, k: int) -> TokenLogprob:
        """The chosen token is the second best; the best one and those after it are the letters a, b, c..."""
        return TokenLogprob(id, self.logprob, 2, tuple((97 + i, -0.1 - i) for i in range(k)))

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    async def stats(self) -> EngineStats:
        return self.numbers

    async def timelines(self, request_ids: Sequence[str]) -> list[Timeline | None]:
        if self.mute:
            raise EngineDeadError("the engine died")
        return [self.known.get(request_id) for request_id in request_ids]

    async def view(self, salts: Sequence[str] | None) -> EngineView:
        if self.mute:
            raise EngineDeadError("the engine died")
        self.asked_salts = salts
        lines = [
            LiveRequest(
                request_id=name, state="decode", age=1.5, prompt_tokens=3, cached_tokens=1, computed_tokens=2,
                generated_tokens=5, preemptions=0, tokens_per_second=10.0,
            )
            for name in sorted(self.active)
        ]  # fmt: skip
        return EngineView(stats=self.numbers, requests=lines, open_requests=len(lines), tree=self.tree)

    async def operate(self, operation: CacheOperation) -> CacheOutcome:
        if self.mute:
            raise EngineDeadError("the engine died")
        self.operations.append(operation)
        return self.outcome

    async def healthy(self) -> tuple[bool, str]:
        return self.health

    async def close(self) -> None:
        pass
