"""Fields that this server knows but cannot honour: harmless values pass, any other is refused by name.

A field that changes the answer is never dropped in silence: who asks for a schema and gets prose has a bug
that nobody reported. Fields that nobody here knows are another matter (see `BodyReader.warn_unknown`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fourfold.errors import InvalidRequestError
from fourfold.server.errors import UnsupportedError

_OFF: tuple[Any, ...] = (None, False, [], {}, "")

_COMMON: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": _OFF,
    "bad_words": _OFF,
    "banned_tokens": _OFF,
    "dry_multiplier": (None, 0),
    "dynatemp_range": (None, 0),
    "length_penalty": (None, 1),
    "logits_processors": _OFF,
    "lora": _OFF,
    "mirostat": (None, 0),
    "prompt_embeds": _OFF,
    "return_token_ids": _OFF,
    "top_n_sigma": (None, -1, 0),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": _OFF,
    "vllm_xargs": _OFF,
    "xtc_probability": (None, 0),
}

_COMPLETIONS: dict[str, tuple[Any, ...]] = {
    "max_completion_tokens": (None,),
    "messages": (None,),
    "suffix": _OFF,
    "tools": _OFF,
    "top_logprobs": (None,),
}

_CHAT: dict[str, tuple[Any, ...]] = {
    "audio": _OFF,
    "best_of": (None, 1),
    "documents": _OFF,
    "echo": _OFF,
    "mm_processor_kwargs": _OFF,
    "prompt": (None,),
    "modalities": (None, [], ["text"]),
    "service_tier": (None, "auto", "default"),
    "store": _OFF,
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
}

_WITHOUT_EFFECT = frozenset(
    {
        "cache_prompt",
        "guided_decoding_backend",
        "guided_whitespace_pattern",
        "metadata",
        "prompt_cache_key",
        "request_id",
    }
    | {"safety_identifier", "timings_per_token"}
)
"""Known, and the answer is right without them."""


def refuse_unsupported(extra: Mapping[str, Any], *, chat: bool) -> dict[str, Any]:
    """Checks the fields that a body's struct lacks; returns those that are unknown altogether.

    Raises UnsupportedError (501) for a known field with a value that would change the answer.
    """
    table = _COMMON | (_CHAT if chat else _COMPLETIONS)
    unknown = {}
    for name, value in extra.items():
        harmless = table.get(name)
        if harmless is None:
            if name not in _WITHOUT_EFFECT:
                unknown[name] = value
        elif value not in harmless:
            if name == "suffix":
                raise InvalidRequestError(
                    "suffix is not supported: this model does not fill in the middle", "suffix"
                )
            raise UnsupportedError(name, f"{name} is not supported here yet; leave it out")
    return unknown
