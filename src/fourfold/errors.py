"""Errors a user can cause. Every message names the bad value, the limit, and the fix."""

from __future__ import annotations


class FourfoldError(Exception):
    """Base of all errors raised on purpose. `str(error)` is fit to be shown to a user."""


class ModelNotFoundError(FourfoldError):
    """No model of that name could be found; the message lists what was tried."""


class DownloadError(FourfoldError):
    """A model could not be fetched; the message says from where, why, and how to do without."""


class LoadError(FourfoldError):
    """A model file is damaged, foreign or unsupported; the message names the file and the key."""


class ConfigError(FourfoldError):
    """A setting (flag, environment variable, config field) has a bad name or value."""


class InvalidRequestError(FourfoldError):
    """A request cannot be served as asked (HTTP 400). `param` names the offending field, if one does."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class OverloadedError(FourfoldError):
    """The waiting queue is full (HTTP 429); try again after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class DeadlineError(FourfoldError):
    """A request cannot be answered in the time it allows (HTTP 503), or was not (`passed`; HTTP 504)."""

    def __init__(self, message: str, retry_after: float = 1.0, *, passed: bool = False) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.passed = passed


class EngineDeadError(FourfoldError):
    """The engine process died or was restarted while a request was in flight (HTTP 503)."""


class EngineFaultError(FourfoldError):
    """One request failed inside the engine, e.g. non-finite logits (HTTP 500). Others are unaffected."""
