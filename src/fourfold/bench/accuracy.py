"""How good the engine's distributions are: perplexity of a text, and divergence from a reference.

A text is cut into windows that are computed from an empty cache. Perplexity is exp of the mean negative
log-likelihood of the scored tokens. Divergence is KL(reference || tested) of the next-token distributions in
nats, and how often both rank the same token first. The reference is this engine with float32 activations and
KV cache, which differs from transformers in fp32 by rounding only (tests/model), or a file of llama.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fourfold import _native
from fourfold.build.load import load_engine_backend
from fourfold.config import EngineConfig
from fourfold.engine.batch import SAMPLE_DTYPE, Backend, Batch, StepResult
from fourfold.errors import FourfoldError
from fourfold.progress import Progress, silent
from fourfold.types import ModelInfo

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Tokens = NDArray[np.int32]

_STEP_ELEMENTS = 1 << 25
"""Logits held at a time (128 MiB)."""
_ROWS = 16
"""Rows whose float64 scratch is held at a time."""


@dataclass(frozen=True, slots=True)
class Window:
    """tokens: int32 [n], computed from an empty cache.  first: index of the first scored one, at least 1."""

    tokens: Tokens
    first: int

    def steps(self, size: int) -> Iterator[tuple[range, range]]:
        """(positions computed, those of them that predict a scored token), in steps of at most `size`."""
        for begin in range(0, len(self.tokens) - 1, size):
            end = min(begin + size, len(self.tokens) - 1)
            yield range(begin, end), range(max(begin, min(self.first - 1, end)), end)


def cut(tokens: Sequence[int], prefix: Sequence[int], context: int, stride: int) -> list[Window]:
    """Windows of at most `context` tokens, `prefix` (mostly BOS) included; beginnings are `stride` apart.

    Each token is scored in the first window that has it; without a prefix, the very first token of a window
    that shares none with the one before has nothing to be predicted from and is not scored.
    Raises ValueError if a token would fall between two windows or nothing could be scored.
    """
    room = context - len(prefix)
    if not 1 <= stride <= room:
        raise ValueError(f"stride must be between 1 and {room}, got {stride}")
    windows = []
    scored = 0
    for begin in range(0, len(tokens), stride):
        end = min(begin + room, len(tokens))
        window = Window(
            np.array([*prefix, *tokens[begin:end]], np.int32), max(1, len(prefix) + scored - begin)
        )
        if window.first < len(window.tokens):
            windows.append(window)
        scored = end
        if end == len(tokens):
            break
    if not windows:
        raise ValueError(f"{len(tokens)} tokens leave nothing to predict; give a longer text")
    return windows


@dataclass(frozen=True, slots=True)
class Rows:
    """Distributions: log p = logits - log_z.

    logits: float32 [R, vocab].  log_z: float64 [R].  floor: log-probabilities up to it are not exact.
    """

    logits: Floats
    log_z: Doubles
    floor: float = -math.inf


class Reference(Protocol):
    def rows(self, index: int, window: Window, size: int) -> Iterator[Rows]:
        """Of window number `index`, one for every element of window.steps(size) that scores anything."""
        ...


class Scorer:
    """Runs windows on a backend that nothing else uses."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.step_size = max(1, min(backend.max_batch_tokens, _STEP_ELEMENTS // backend.vocab_size))

    def losses(self, window: Window) -> Doubles:
        """Negative log-likelihood in nats of each scored token, as the engine reports it."""
        size = self._backend.max_batch_tokens
        found = [self._run(window, done, rows, False).logprob for done, rows in window.steps(size)]
        return -np.concatenate(found).astype(np.float64)

    def rows(self, index: int, window: Window, size: int) -> Iterator[Rows]:
        for done, rows in window.steps(size):
            logits = self._run(window, done, rows, True).logits
            assert logits is not None
            if rows:
                yield Rows(logits, log_normalizer(logits))

    def _run(self, window: Window, done: range, rows: range, logits: bool) -> StepResult:
        samples = np.zeros(len(rows), SAMPLE_DTYPE)
        samples["row"] = np.array(rows, np.int32) - done.start
        samples["target"] = window.tokens[rows.start + 1 : rows.stop + 1]
        samples["mask"] = -1
        samples["allowed_vocab"] = self._backend.vocab_size
        for off in ("top_p", "typical_p", "repetition_penalty"):
            samples[off] = 1
        blocks = np.arange(-(-done.stop // self._backend.block_size), dtype=np.int32)
        none = np.zeros(0, np.int32)
        result = self._backend.run(
            Batch(
                tokens=window.tokens[done.start : done.stop],
                seq_tokens=np.array([len(done)], np.int32),
                seq_context=np.array([done.start], np.int32),
                block_start=np.array([0, len(blocks)], np.int32),
                blocks=blocks,
                samples=samples,
                history=none,
                bias_ids=none,
                bias_values=np.zeros(0, np.float32),
                ban_ids=none,
                return_logits=logits,
            )
        )
        if result.status.any():
            row = rows[int(result.status.argmax())]
            raise FourfoldError(
                f"the logits after token {row} of a window are not finite; the model is damaged"
            )
        return result


@contextmanager
def opened(
    config: EngineConfig, context: int, progress: Progress = silent
) -> Iterator[tuple[Scorer, ModelInfo]]:
    """A backend of `config` with a cache for one window of `context` tokens.

    Raises ConfigError if the model supports fewer, and what load_engine_backend raises.
    """
    blocks = -(-context // int(_native.BLOCK_TOKENS))
    small = replace(config, max_model_len=context, num_kv_blocks=blocks)
    backend, info = load_engine_backend(small, lambda what, done: progress(what, round(done * 100), 100, "%"))
    with closing(backend):
        yield Scorer(backend), info


@dataclass(frozen=True, slots=True)
class Likelihood:
    """losses: float64 [tokens], negative log-likelihoods in nats."""

    losses: Doubles

    @property
    def perplexity(self) -> float:
        return math.exp(float(self.losses.mean()))

    @property
    def error(self) -> float:
        """Standard error of the perplexity, tokens taken as independent."""
        spread = float(self.losses.std(ddof=1)) if len(self.losses) > 1 else math.nan
        return self.perplexity * spread / math.sqrt(len(self.losses))


@dataclass(frozen=True, slots=True)
class Divergence:
    """kl: float64 [tokens], nats.  same_top: bool [tokens], the same token is the likeliest."""

    kl: Doubles
    same_top: NDArray[np.bool_]

    @property
    def mean(self) -> float:
        return float(self.kl.mean())

    @property
    def error(self) -> float:
        """Standard error of the mean, tokens taken as independent."""
        return float(self.kl.std(ddof=1)) / math.sqrt(len(self.kl)) if len(self.kl) > 1 else math.nan

    def quantile(self, share: float) -> float:
        return float(np.quantile(self.kl, share))

    @property
    def agreement(self) -> float:
        return float(self.same_top.mean())


@dataclass(frozen=True, slots=True)
class Comparison:
    tested: Likelihood
    reference: Likelihood
    divergence: Divergence


def perplexity(scorer: Scorer, windows: Sequence[Window], progress: Progress = silent) -> Likelihood:
    """Raises FourfoldError if logits are not finite."""
    losses = []
    for index, window in enumerate(windows):
        progress("scoring", index, len(windows), "windows")
        losses.append(scorer.losses(window))
    return Likelihood(np.concatenate(losses))


def compare(
    tested: Scorer, reference: Reference, windows: Sequence[Window], progress: Progress = silent
) -> Comparison:
    """Raises FourfoldError if logits are not finite."""
    size = tested.step_size
    ours, theirs, kl, same = [], [], [], []
    for index, window in enumerate(windows):
        progress("comparing", index, len(windows), "windows")
        scored = [rows for _, rows in window.steps(size) if rows]
        pairs = zip(
            scored, tested.rows(index, window, size), reference.rows(index, window, size), strict=True
        )
        for rows, q, p in pairs:
            targets = window.tokens[rows.start + 1 : rows.stop + 1]
            ours.append(_losses(q, targets))
            theirs.append(_losses(p, targets))
            kl.append(kl_divergence(p, q))
            same.append(p.logits.argmax(1) == q.logits.argmax(1))
    return Comparison(
        Likelihood(np.concatenate(ours)),
        Likelihood(np.concatenate(theirs)),
        Divergence(np.concatenate(kl), np.concatenate(same)),
    )


def log_normalizer(logits: Floats) -> Doubles:
    """log sum exp of each row, [R]."""
    largest = logits.max(1).astype(np.float64)
    sums = [
        np.exp(logits[i : i + _ROWS] - largest[i : i + _ROWS, None]).sum(1)
        for i in range(0, len(logits), _ROWS)
    ]
    normalizer: Doubles = largest + np.log(np.concatenate(sums))
    return normalizer


def kl_divergence(p: Rows, q: Rows) -> Doubles:
    """KL(p || q) of each row in nats, [R]; tokens at or below p's floor are left out of the sum."""
    out = np.empty(len(p.log_z))
    for i in range(0, len(out), _ROWS):
        part = slice(i, i + _ROWS)
        log_p = p.logits[part] - p.log_z[part, None]
        log_q = q.logits[part] - q.log_z[part, None]
        terms = np.exp(log_p) * (log_p - log_q)
        out[part] = terms.sum(1, where=log_p > p.floor)
    return out


def _losses(rows: Rows, targets: Tokens) -> Doubles:
    chosen: Doubles = rows.log_z - rows.logits[np.arange(len(targets)), targets]
    return chosen
