"""From what a caller asks for to sequences that an engine can run: lengths, seeds and ids of siblings.

Both doors go through here, the HTTP front and the offline API, so that they refuse the same things in the
same words and draw the same tokens for the same seed.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fourfold.errors import InvalidRequestError
from fourfold.types import Constraint, EngineRequest, ModelInfo, SamplingParams


class RequestMaker(msgspec.Struct, frozen=True):
    """Makes requests for one model.

    token_limit: ids at or above it have no token; logits may have more rows.  eos_ids: what ends an answer.
    """

    model: ModelInfo
    token_limit: int
    eos_ids: tuple[int, ...]

    def max_tokens(
        self,
        prompt_tokens: int,
        sampling: SamplingParams,
        *,
        default: int | None = None,
        prompt_field: str = "prompt",
    ) -> int:
        """Tokens that the answer to a prompt may have, checked with the rest of `sampling`.

        default: taken when sampling.max_tokens is None, as far as the context allows; None: fill the context.
        Raises InvalidRequestError naming `prompt_field` or the sampling field, the value and the limit.
        """
        most = self.model.max_model_len
        if prompt_tokens == 0:
            raise InvalidRequestError("the prompt is empty; it must have at least one token", prompt_field)
        room = most - prompt_tokens
        wanted = sampling.max_tokens
        if wanted is None:
            wanted = max(1, min(room, room if default is None else max(default, sampling.min_tokens)))
        if wanted > room:
            raise InvalidRequestError(
                f"this model's maximum context length is {most} tokens, but {prompt_tokens + wanted} were "
                f"requested ({prompt_tokens} in the prompt, {wanted} for the answer); "
                "shorten the prompt or lower max_tokens",
                prompt_field if room <= 0 else "max_tokens",
                "context_length_exceeded",
            )
        msgspec.structs.replace(sampling, max_tokens=wanted).validate(self.token_limit)
        return wanted

    def siblings(
        self,
        request_ids: Sequence[str],
        prompt_ids: list[int],
        sampling: SamplingParams,
        max_tokens: int,
        *,
        cache_salt: str = "",
        tenant: str = "",
        user: str = "",
        weight: float = 1.0,
        priority: int = 0,
        arrival: float = 0.0,
        timeout: float | None = None,
        ttft_timeout: float | None = None,
        constraint: Constraint | None = None,
        prediction_ids: Sequence[int] = (),
    ) -> list[EngineRequest]:
        """One request per id, for the same prompt; their seeds, if there is one, differ by one."""
        return [
            EngineRequest(
                request_id=request_id,
                prompt_ids=prompt_ids,
                sampling=msgspec.structs.replace(
                    sampling, n=1, max_tokens=max_tokens, seed=_sibling_seed(sampling.seed, index)
                ),
                eos_ids=self.eos_ids,
                allowed_vocab=self.token_limit if self.token_limit < self.model.vocab_size else None,
                cache_salt=cache_salt,
                tenant=tenant,
                user=user,
                weight=weight,
                priority=priority,
                arrival=arrival,
                timeout=timeout,
                ttft_timeout=ttft_timeout,
                constraint=constraint,
                prediction_ids=list(prediction_ids),
            )
            for index, request_id in enumerate(request_ids)
        ]


def _sibling_seed(seed: int | None, index: int) -> int | None:
    """Seeds wrap where 64 bits end."""
    if seed is None or index == 0:
        return seed
    return (seed + index) % 2**64
