"""From the fields of a body to SamplingParams."""

from __future__ import annotations

from fourfold.errors import InvalidRequestError
from fourfold.server.chunks import UsageWanted
from fourfold.server.wire import GenerationBody
from fourfold.types import MAX_LOGPROBS, MAX_N, SamplingParams


def sampling_params(body: GenerationBody, *, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
    """The sampling part of a body; what is left out or null gets the default.

    Most ranges are left to SamplingParams.validate. Raises InvalidRequestError.
    """
    if body.repeat_penalty is not None and body.repetition_penalty not in (None, body.repeat_penalty):
        raise InvalidRequestError(
            "repeat_penalty and repetition_penalty are one thing; give one", "repeat_penalty"
        )
    stop = body.stop if body.stop is not None else []
    given = {
        name: getattr(body, name)
        for name in (
            "n", "seed", "temperature", "top_p", "top_k", "min_p", "typical_p",
            "presence_penalty", "frequency_penalty", "repetition_penalty",
            "ignore_eos", "min_tokens", "skip_special_tokens", "include_stop_str_in_output",
        )
        if getattr(body, name) is not None
    }  # fmt: skip
    if "top_k" in given:
        # Beyond any vocabulary it changes nothing, and the engine holds it in 32 bits.
        given["top_k"] = min(given["top_k"], 2**31 - 1)
    if body.repeat_penalty is not None:
        given["repetition_penalty"] = body.repeat_penalty
    for name, value in (("logprobs", logprobs), ("prompt_logprobs", body.prompt_logprobs)):
        if value is not None and not 0 <= value <= MAX_LOGPROBS:
            raise InvalidRequestError(f"{name} must be between 0 and {MAX_LOGPROBS}, got {value}", name)
    if not 1 <= given.get("n", 1) <= MAX_N:
        raise InvalidRequestError(f"n must be between 1 and {MAX_N}, got {body.n}", "n")
    return SamplingParams(
        **given,
        max_tokens=max_tokens,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        logit_bias=_logit_bias(body.logit_bias or {}),
        logprobs=logprobs,
        prompt_logprobs=body.prompt_logprobs,
    )


def _logit_bias(bias: dict[str, float]) -> dict[int, float]:
    result = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) < 20):
            raise InvalidRequestError(
                f"logit_bias has the key {key[:40]!r}; keys must be token ids", "logit_bias"
            )
        result[int(key)] = value
    return result


def usage_wanted(body: GenerationBody) -> UsageWanted:
    """What a stream is to say of its usage.

    Raises InvalidRequestError for options of streams without one, and the other way round.
    """
    options = body.stream_options
    if options is not None and not body.stream:
        raise InvalidRequestError("stream_options is only for stream=true", "stream_options")
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidRequestError(
            "prompt_logprobs cannot be streamed; set stream to false", "prompt_logprobs"
        )
    at_end = options is not None and bool(options.include_usage)
    return UsageWanted(at_end, at_end and options is not None and bool(options.continuous_usage_stats))
