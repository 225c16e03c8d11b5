"""From the tokens of one sequence to what its client sees."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from fourfold.text.detokenizer import Detokenizer
from fourfold.text.stop import StopMatcher, compile_stops
from fourfold.text.tokenizer import Tokenizer
from fourfold.types import FinishReason, SamplingParams, TokenLogprob

MIN_LOGPROB = -9999.0
"""What a log-probability of minus infinity is reported as: JSON has no infinities."""


class TopLogprob(msgspec.Struct, frozen=True):
    """One of the most likely tokens at a place.  bytes: UTF-8 of the token, perhaps part of a character."""

    token: str
    token_id: int
    logprob: float
    bytes: list[int]


class TokenInfo(msgspec.Struct, frozen=True):
    """One token with its log-probability.

    token: its text; U+FFFD for bytes that are no whole character.
    text_offset: where its text begins, in characters of the sequence's decoded text (plus the base offset).
    rank: 1 for the most likely token; 0 if unknown.
    """

    token: str
    token_id: int
    logprob: float
    bytes: list[int]
    text_offset: int
    rank: int = 0
    top: list[TopLogprob] = []


class Delta(msgspec.Struct):
    """What a feed brought.

    text: may be empty while a character or a possible stop string is unfinished.
    token_ids: tokens taken, those without text included; what came after a stop string is left out.
    stop_reason: the stop string, or the id of stop_token_ids, that ended the answer; None for EOS and length.
    done: nothing more will come. When the engine has not said so yet, abort the request there.
    """

    text: str
    token_ids: list[int]
    logprobs: list[TokenInfo] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    done: bool = False


def describe_token(tokenizer: Tokenizer, token_id: int) -> tuple[str, list[int]]:
    """Text (U+FFFD for a part of a character) and bytes of a token."""
    data = tokenizer.token_bytes(token_id)
    return data.decode("utf-8", "replace"), list(data)


def token_info(tokenizer: Tokenizer, logprob: TokenLogprob, text_offset: int) -> TokenInfo:
    """One entry of a logprobs list. Minus infinity is reported as MIN_LOGPROB."""
    text, data = describe_token(tokenizer, logprob.token_id)
    return TokenInfo(
        token=text,
        token_id=logprob.token_id,
        logprob=_finite(logprob.logprob),
        bytes=data,
        text_offset=text_offset,
        rank=logprob.rank,
        top=[_top(tokenizer, id, value) for id, value in logprob.top],
    )


def _top(tokenizer: Tokenizer, token_id: int, logprob: float) -> TopLogprob:
    text, data = describe_token(tokenizer, token_id)
    return TopLogprob(token=text, token_id=token_id, logprob=_finite(logprob), bytes=data)


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else MIN_LOGPROB


class OutputProcessor:
    """Detokenizes one sequence and ends it at a stop string.

    The deltas joined do not depend on how the tokens were cut (design rule 6).

    eos_ids: those that end the answer unless sampling.ignore_eos.
    keep_leading_space: the answer continues the prompt's text (completions), so that the first space a
        SentencePiece vocabulary begins a word with belongs to it; in a chat it is dropped.
    text_offset: where the answer begins in the text that logprobs count in (the length of an echoed prompt).
    shown: special tokens that are text even if special tokens are skipped: markup that a parser must see.
    Raises InvalidRequestError if the stop strings are too long.
    """

    __slots__ = (
        "_count", "_detokenizer", "_done", "_matcher", "_min_tokens", "_sampling", "_stop_ids",
        "_text_offset", "_tokenizer",
    )  # fmt: skip

    def __init__(
        self,
        tokenizer: Tokenizer,
        sampling: SamplingParams,
        eos_ids: Sequence[int],
        keep_leading_space: bool = False,
        text_offset: int = 0,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._detokenizer = Detokenizer(tokenizer, sampling.skip_special_tokens, keep_leading_space, shown)
        self._matcher = StopMatcher(compile_stops(sampling.stop)) if sampling.stop else None
        # EOS comes last, so that an id in both lists counts as EOS.
        self._stop_ids: dict[int, int | None] = {id: id for id in sampling.stop_token_ids}
        if not sampling.ignore_eos:
            self._stop_ids.update(dict.fromkeys(eos_ids))
        self._min_tokens = sampling.min_tokens
        self._count = 0
        self._text_offset = text_offset
        self._done = False

    @property
    def num_tokens(self) -> int:
        """Tokens taken so far; the completion tokens of the usage."""
        return self._count

    def feed(
        self,
        token_ids: list[int],
        logprobs: list[TokenLogprob] | None = None,
        finished: FinishReason | None = None,
    ) -> Delta:
        """The next tokens of the sequence, in any cut. finished: the engine's reason, with the last ones.

        A token that ended the answer (EOS or of stop_token_ids) is the last of token_ids; its text is not
        shown, unless include_stop_str_in_output. After a delta with done, everything else is ignored.
        """
        if self._done:
            return Delta("", [], done=True)
        stop_reason: str | int | None = None
        shown = len(token_ids)
        if finished == "stop" and token_ids and token_ids[-1] in self._stop_ids:
            stop_reason = self._stop_ids[token_ids[-1]]
            if not self._sampling.include_stop_str_in_output:
                shown -= 1
        infos: list[TokenInfo] | None = None if logprobs is None else []
        pieces: list[str] = []
        for index, token_id in enumerate(token_ids):
            self._count += 1
            if infos is not None and logprobs is not None:
                infos.append(token_info(self._tokenizer, logprobs[index], self._text_offset))
            if index >= shown:
                continue
            text = self._detokenizer.push((token_id,))
            self._text_offset += len(text)
            stopped = self._take(text, pieces)
            if stopped is not None:
                return self._end(pieces, token_ids[: index + 1], infos, "stop", stopped)
        if finished is None:
            return Delta("".join(pieces), token_ids, infos)
        stopped = self._take(self._detokenizer.finish(), pieces)
        if stopped is not None:
            return self._end(pieces, token_ids, infos, "stop", stopped)
        if self._matcher is not None:
            pieces.append(self._matcher.finish())
        return self._end(pieces, token_ids, infos, finished, stop_reason)

    def _take(self, text: str, pieces: list[str]) -> str | None:
        """Adds what may be shown of `text` to `pieces`; returns the stop string that ended the answer."""
        if self._matcher is None:
            pieces.append(text)
            return None
        text, stopped = self._matcher.push(text, armed=self._count > self._min_tokens)
        pieces.append(text)
        if stopped is not None and self._sampling.include_stop_str_in_output:
            pieces.append(stopped)
        return stopped

    def _end(
        self,
        pieces: list[str],
        token_ids: list[int],
        infos: list[TokenInfo] | None,
        reason: FinishReason,
        stop_reason: str | int | None,
    ) -> Delta:
        self._done = True
        return Delta("".join(pieces), token_ids, infos, reason, stop_reason, done=True)
