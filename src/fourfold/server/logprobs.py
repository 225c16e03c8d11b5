"""Log-probabilities in OpenAI's two shapes, and vLLM's prompt_logprobs.

Minus infinity is written as MIN_LOGPROB: JSON has no infinities.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from fourfold.text.output import TokenInfo, token_info
from fourfold.text.tokenizer import Tokenizer
from fourfold.types import TokenLogprob


class TokenNames:
    """How a token is written. as_ids: as "token_id:7", which is unambiguous (vLLM's
    return_tokens_as_token_ids)."""

    def __init__(self, tokenizer: Tokenizer, as_ids: bool = False) -> None:
        self.tokenizer = tokenizer
        self._as_ids = as_ids

    def name(self, token: int) -> str:
        """The token's text; "bytes:\\xe2\\x80" if it is not whole characters, as OpenAI writes it."""
        if self._as_ids:
            return f"token_id:{token}"
        data = self.tokenizer.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_content(names: TokenNames, infos: Iterable[TokenInfo]) -> list[dict[str, Any]]:
    """choices[].logprobs.content of a chat completion."""
    return [
        {
            "token": names.name(info.token_id),
            "logprob": info.logprob,
            "bytes": info.bytes,
            "top_logprobs": [
                {"token": names.name(top.token_id), "logprob": top.logprob, "bytes": top.bytes}
                for top in info.top
            ],
        }
        for info in infos
    ]


def completion_logprobs(names: TokenNames, infos: Iterable[TokenInfo | None], first: int) -> dict[str, Any]:
    """choices[].logprobs of a completion: four lists with one entry per token.

    infos: None only for the first token of a prompt, which has no logprob; `first` is its id.
    With k alternatives asked for, the chosen token is listed beside them even if it is none of them, so
    there are up to k + 1; with k = 0 there are none.
    """
    result: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for info in infos:
        if info is None:
            result["tokens"].append(names.name(first))
            result["text_offset"].append(0)
            result["token_logprobs"].append(None)
            result["top_logprobs"].append(None)
        else:
            result["tokens"].append(names.name(info.token_id))
            result["text_offset"].append(info.text_offset)
            result["token_logprobs"].append(info.logprob)
            result["top_logprobs"].append(_alternatives(names, info))
    return result


def _alternatives(names: TokenNames, info: TokenInfo) -> dict[str, float]:
    top = {names.name(one.token_id): one.logprob for one in info.top}
    if top:
        top.setdefault(names.name(info.token_id), info.logprob)
    return top


def prompt_infos(
    tokenizer: Tokenizer, ids: Sequence[int], logprobs: Sequence[TokenLogprob | None], hidden: Collection[int]
) -> list[TokenInfo | None]:
    """The prompt's tokens with their places in its text.

    hidden: tokens that are not in the text (a BOS that was put before it). A token that begins in the middle
    of a character is said to begin at the next one.
    """
    infos: list[TokenInfo | None] = []
    offset = 0
    for token, logprob in zip(ids, logprobs, strict=True):
        infos.append(None if logprob is None else token_info(tokenizer, logprob, offset))
        if token not in hidden:
            # Every byte but a continuation byte begins a character.
            offset += sum(byte & 0xC0 != 0x80 for byte in tokenizer.token_bytes(token))
    return infos


def prompt_logprobs(names: TokenNames, infos: Iterable[TokenInfo | None]) -> list[dict[str, Any] | None]:
    """vLLM's shape: null for the first token, then {token id: {logprob, rank, decoded_token}} per token."""
    entries: list[dict[str, Any] | None] = []
    for info in infos:
        if info is None:
            entries.append(None)
            continue
        ranked = [(top.token_id, top.logprob, rank) for rank, top in enumerate(info.top, 1)]
        ranked.append((info.token_id, info.logprob, info.rank))
        entries.append(
            {
                str(token): {"logprob": logprob, "rank": rank, "decoded_token": names.name(token)}
                for token, logprob, rank in ranked
            }
        )
    return entries
