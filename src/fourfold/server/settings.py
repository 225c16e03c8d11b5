"""What the HTTP front can be told."""

from __future__ import annotations

import msgspec

from fourfold.answers.detect import format_of
from fourfold.errors import ConfigError


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One resolved configuration of the front.

    served_model_names: names the model answers to; the first one is shown. Empty: the engine's name for it.
    api_keys: any of them opens everything; /health is open to all. Empty: no authentication.
    key_weights: pairs of one of api_keys and its share of the engine; 1 for those not named.
    request_timeout, ttft_timeout: seconds in which an answer, and its first token, must come if the request
        does not say; None for no limit.
    chat_template: Jinja2 source that replaces the model's own.
    tool_call_parser, reasoning_parser: formats of answers (see answers/detect.py) instead of those that the
        chat template tells; "none" switches one off.
    allow_request_chat_template: whether a request may bring its own chat template.
    drain_timeout: seconds that running answers get after SIGTERM.
    first_event_grace: seconds a stream waits for its first token before its headers go out, so that what is
        refused (400, 429, 503) is refused with that status.
    max_body_bytes: larger request bodies get 413.
    max_sequences: prompts times n in one request.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    key_weights: tuple[tuple[str, float], ...] = ()
    request_timeout: float | None = None
    ttft_timeout: float | None = None
    chat_template: str | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    allow_request_chat_template: bool = False
    cors_origins: tuple[str, ...] = ()
    drain_timeout: float = 30.0
    first_event_grace: float = 5.0
    max_body_bytes: int = 32 * 1024 * 1024
    max_sequences: int = 2048
    access_log: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be between 0 (any free one) and 65535, got {self.port!r}")
        for name in ("drain_timeout", "first_event_grace"):
            if not 0 <= getattr(self, name) <= 86400:
                raise ConfigError(f"{name} must be between 0 and 86400 seconds, got {getattr(self, name)!r}")
        for name in ("request_timeout", "ttft_timeout"):
            seconds = getattr(self, name)
            if seconds is not None and not 0 < seconds <= 86400:
                raise ConfigError(f"{name} must be above 0 and at most 86400 seconds, got {seconds!r}")
        for key, weight in self.key_weights:
            if key not in self.api_keys:
                raise ConfigError("a weight is given for an API key that is not one of --api-key")
            if not 0.001 <= weight <= 1000:
                raise ConfigError(f"the weight of an API key must be between 0.001 and 1000, got {weight!r}")
        for name in ("max_body_bytes", "max_sequences"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)!r}")
        if any(not key or not key.isascii() or not key.isprintable() for key in self.api_keys):
            raise ConfigError("an API key must be one or more printable ASCII characters")
        format_of("", self.tool_call_parser, self.reasoning_parser)
        if any(not name for name in self.served_model_names):
            raise ConfigError("a served model name must not be empty")
