"""The offline API: prompts in, finished answers out, with the engine in this process."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import operator
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from types import TracebackType
from typing import Any, cast

import msgspec

from fourfold.build.load import load_engine_backend
from fourfold.config import EngineConfig
from fourfold.engine.local import LocalEngine
from fourfold.engine.loop import Engine
from fourfold.engine.requests import RequestMaker
from fourfold.engine.speculate.build import load_draft
from fourfold.errors import ConfigError, FourfoldError, InvalidRequestError
from fourfold.hub import resolve
from fourfold.progress import Progress, ReportedProgress, silent
from fourfold.text.chat import ChatTemplate
from fourfold.text.conversation import for_template
from fourfold.text.output import Delta, OutputProcessor, TokenInfo
from fourfold.text.tokenizer import Tokenizer, load_tokenizer
from fourfold.text.tools import declared_tools
from fourfold.types import (
    EngineEvent,
    EngineRequest,
    FinishReason,
    ModelInfo,
    SamplingParams,
    TokenLogprob,
)
from fourfold.weights.open import open_checkpoint

Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]
DEFAULT_MODEL = EngineConfig().model


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer. index: which of the n.  token_ids: all sampled, an EOS or stop token at the end included.

    logprobs: one entry per token, if asked for.  cumulative_logprob: their sum.
    stop_reason: the stop string or token id that ended it; None for EOS or length.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenInfo] | None
    cumulative_logprob: float | None
    finish_reason: FinishReason
    stop_reason: str | int | None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The answers to one prompt. prompt: None if it was given as token ids."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprob | None] | None = None
    cached_tokens: int = 0


class LLM:
    """A loaded model. Use it as a context manager, or `close` it, to give its memory back.

    model: a path, an alias or a Hub id.  config: fields of EngineConfig.
    Raises ConfigError, ModelNotFoundError, DownloadError, LoadError.
    """

    def __init__(
        self, model: str = DEFAULT_MODEL, *, progress: Progress | None = None, **config: Any
    ) -> None:
        self.config = _engine_config(model, config)
        with ReportedProgress() as reported:
            report = progress or (reported if sys.stderr.isatty() else silent)
            found = resolve(model, progress=report)
            if found.notice:
                print(found.notice, file=sys.stderr)
            backend, info = load_engine_backend(self.config, _fractions(report))
            draft = load_draft(self.config, info, load_engine_backend, _fractions(report))
            self.tokenizer: Tokenizer = load_tokenizer(open_checkpoint(found.path))
        self._engine = LocalEngine(
            Engine(backend, info, self.config, load_tokens=lambda: self.tokenizer, draft=draft)
        )
        self._ids = itertools.count()

    @property
    def model(self) -> ModelInfo:
        """What was loaded, with the limits that are enforced."""
        return self._engine.model

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continues each prompt; the outputs are in the order of the prompts.

        prompts: one text, one list of token ids, vLLM's {"prompt": text} or {"prompt_token_ids": ids}, or a
            list of any of them.
        sampling_params: one for all, or one each; their structured_outputs say what the answer must be.
        use_tqdm: show progress if standard error is a terminal.
        Raises InvalidRequestError before anything runs if any of them cannot be served, and FourfoldError if
            no answer was found that the constraint allows.
        """
        batch = [_plain(prompt) for prompt in _as_batch(prompts)]
        sampling = _per_prompt(sampling_params, len(batch))
        texts = [prompt if isinstance(prompt, str) else None for prompt in batch]
        ids = [self.tokenizer.encode(p) if isinstance(p, str) else p for p in batch]
        return self._run(texts, ids, sampling, use_tqdm, continues_text=True)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation, or each of several; otherwise as `generate`.

        chat_template: Jinja2, instead of the model's own.  tools: that the template tells the model of, in
            OpenAI's form; calls stay in the answer's text.  chat_template_kwargs: variables of the template.
        continue_final_message: the answer goes on with the last message; then add_generation_prompt is False.
        """
        if not messages:
            raise InvalidRequestError("messages is empty; give at least one message", "messages")
        conversations: Sequence[Any] = [messages] if isinstance(messages[0], Mapping) else messages
        sampling = _per_prompt(sampling_params, len(conversations))
        template = self.chat_template(chat_template)
        shown = [tool.shown for tool in declared_tools(tools, "tools").values()]
        rendered = []
        for conversation in conversations:
            plain, given = for_template(conversation, shown, template)
            text = template.render(
                plain,
                tools=given or None,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                variables=chat_template_kwargs,
            )
            rendered.append((text, self.tokenizer.encode(text)))
        texts: list[str | None] = [text for text, _ in rendered]
        prompts = [ids for _, ids in rendered]
        return self._run(texts, prompts, sampling, use_tqdm, continues_text=continue_final_message)

    def chat_template(self, source: str | None = None) -> ChatTemplate:
        """The model's own template, or one of Jinja2 `source`. InvalidRequestError if there is none."""
        return ChatTemplate.of(self.tokenizer, source)

    def render_chat(self, messages: Sequence[Message], template: ChatTemplate) -> tuple[str, list[int]]:
        """The prompt that `messages` become, ready for an answer: its text and token ids."""
        text = template.render(messages, add_generation_prompt=True)
        return text, self.tokenizer.encode(text)

    def stream(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, continues_text: bool = False
    ) -> Generator[Delta]:
        """Increments of one answer. Leaving the iterator early (close) aborts it.

        continues_text: the answer goes on with the prompt's text, as in `generate`; False for a chat.
        """
        (request,) = self._requests(list(prompt_ids), msgspec.structs.replace(params, n=1))
        output = OutputProcessor(self.tokenizer, request.sampling, request.eos_ids, continues_text)
        with closing(cast("Generator[EngineEvent]", self._engine.generate([request]))) as events:
            for event in events:
                _raise_failure(event)
                delta = output.feed(event.token_ids, event.logprobs, event.finish_reason)
                yield delta
                if delta.done:
                    return

    def close(self) -> None:
        self._engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(
        self,
        texts: list[str | None],
        ids: list[list[int]],
        sampling: list[SamplingParams],
        show: bool,
        *,
        continues_text: bool,
    ) -> list[RequestOutput]:
        answers: dict[str, _Answer] = {}
        prompts = []
        for prompt_ids, params in zip(ids, sampling, strict=True):
            siblings = []
            for index, request in enumerate(self._requests(prompt_ids, params)):
                output = OutputProcessor(self.tokenizer, request.sampling, request.eos_ids, continues_text)
                answers[request.request_id] = _Answer(index, request, output)
                siblings.append(answers[request.request_id])
            prompts.append(siblings)
        with ReportedProgress() as reported:
            report = reported if show and sys.stderr.isatty() else silent
            self._collect(answers, report)
        return [
            RequestOutput(text, prompt_ids, [a.finished() for a in siblings], *siblings[0].about_prompt())
            for text, prompt_ids, siblings in zip(texts, ids, prompts, strict=True)
        ]

    def _collect(self, answers: dict[str, _Answer], report: Progress) -> None:
        """Runs all requests to their ends. A stop string ends its request in the engine too."""
        done = 0
        report("generating", 0, len(answers), "answers")
        for event in self._engine.generate([answer.request for answer in answers.values()]):
            answer = answers[event.request_id]
            if answer.done:
                continue
            _raise_failure(event)
            answer.take(event)
            if answer.done:
                done += 1
                report("generating", done, len(answers), "answers")
                if event.finish_reason is None:
                    self._engine.engine.abort(event.request_id)

    def _requests(self, ids: list[int], params: SamplingParams) -> list[EngineRequest]:
        """The n requests of one prompt, with seeds that differ by one."""
        constraint = None
        if params.structured_outputs is not None:
            from fourfold.grammar.sources import constraint_of_params  # most runs have no need of it

            constraint = constraint_of_params(params.structured_outputs)
            params = msgspec.structs.replace(params, structured_outputs=None)
        self.tokenizer.check_ids(ids)
        vocab = min(self.model.vocab_size, self.tokenizer.vocab_size)
        make = RequestMaker(self.model, vocab, tuple(self.tokenizer.eos_ids))
        max_tokens = make.max_tokens(len(ids), params)
        names = [f"local-{next(self._ids)}" for _ in range(params.n)]
        return make.siblings(names, ids, params, max_tokens, constraint=constraint)


class _Answer:
    """What has come so far of one request."""

    def __init__(self, index: int, request: EngineRequest, output: OutputProcessor) -> None:
        self.request = request
        self.done = False
        self._index = index
        self._output = output
        self._text: list[str] = []
        self._tokens: list[int] = []
        self._logprobs: list[TokenInfo] = []
        self._prompt_logprobs: list[TokenLogprob | None] | None = None
        self._cached = 0
        self._last: Delta | None = None

    def take(self, event: EngineEvent) -> None:
        delta = self._output.feed(event.token_ids, event.logprobs, event.finish_reason)
        self._text.append(delta.text)
        self._tokens += delta.token_ids
        self._logprobs += delta.logprobs or ()
        self._prompt_logprobs = self._prompt_logprobs or event.prompt_logprobs
        self._cached += event.cached_tokens
        self.done = delta.done
        self._last = delta

    def about_prompt(self) -> tuple[list[TokenLogprob | None] | None, int]:
        return self._prompt_logprobs, self._cached

    def finished(self) -> CompletionOutput:
        if self._last is None or self._last.finish_reason is None:
            raise FourfoldError(f"the engine ended {self.request.request_id} without saying why")
        wanted = self.request.sampling.logprobs is not None
        return CompletionOutput(
            index=self._index,
            text="".join(self._text),
            token_ids=self._tokens,
            logprobs=self._logprobs if wanted else None,
            cumulative_logprob=sum(entry.logprob for entry in self._logprobs) if wanted else None,
            finish_reason=self._last.finish_reason,
            stop_reason=self._last.stop_reason,
        )


def _fractions(report: Progress) -> Callable[[str, float], None]:
    return lambda stage, fraction: report(stage, round(fraction * 100), 100, "%")


def _raise_failure(event: EngineEvent) -> None:
    if event.refused_param is not None:
        raise InvalidRequestError(event.error or "the constraint was refused", event.refused_param)
    if event.finish_reason == "error":
        raise FourfoldError(event.error or "the engine failed on this request")


def _engine_config(model: str, config: Mapping[str, Any]) -> EngineConfig:
    known = [field.name for field in dataclasses.fields(EngineConfig) if field.name != "model"]
    for name in config:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, 0.0)
            raise ConfigError(
                f"LLM has no setting {name!r}; did you mean {near[0]}? Known: {', '.join(known)}"
            )
    if config.get("max_itl_ratio") is None:
        # Whoever waits for whole answers wants them all soon, not each at an even pace.
        config = {**config, "max_itl_ratio": 0.0}
    return EngineConfig(model=model, **config)


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    batch: list[Any] = list(prompts)
    return [batch] if batch and isinstance(batch[0], int) else batch


def _plain(prompt: Prompt) -> str | list[int]:
    """Raises InvalidRequestError if it is none of the forms that `generate` takes."""
    form: Any = prompt
    if isinstance(prompt, Mapping):
        known = [name for name in ("prompt", "prompt_token_ids") if prompt.get(name) is not None]
        if len(prompt) != 1 or len(known) != 1:
            raise InvalidRequestError(
                f"a prompt has the fields {sorted(map(str, prompt))}; give either prompt or prompt_token_ids",
                "prompt",
            )
        form = prompt[known[0]]
    if isinstance(form, str):
        return form
    try:
        return [operator.index(id) for id in form]
    except TypeError:
        raise InvalidRequestError(
            f"a prompt is a text or a list of token ids, got {str(form)[:40]!r}", "prompt"
        ) from None


def _per_prompt(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise InvalidRequestError(
            f"{len(params)} sampling params for {count} prompts; give one, or one for each"
        )
    return list(params)
