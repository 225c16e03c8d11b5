"""How much time a request allows: from its body, its headers, or the server's settings."""

from __future__ import annotations

from typing import NamedTuple

from starlette.requests import Request

from fourfold.errors import InvalidRequestError
from fourfold.server.settings import ServerSettings
from fourfold.server.wire import GenerationBody
from fourfold.types import MAX_TIMEOUT


class Allowed(NamedTuple):
    """Seconds after arrival; None for no limit. timeout: for the whole answer.  first_token: its start."""

    timeout: float | None
    first_token: float | None


def allowed(request: Request, body: GenerationBody, settings: ServerSettings) -> Allowed:
    """The body's `timeout` and `ttft_timeout`, or else the headers X-Request-Timeout and X-TTFT-Timeout, or
    else what the server was started with. Raises InvalidRequestError."""
    return Allowed(
        _seconds(request, body.timeout, "timeout", "x-request-timeout", settings.request_timeout),
        _seconds(request, body.ttft_timeout, "ttft_timeout", "x-ttft-timeout", settings.ttft_timeout),
    )


def _seconds(
    request: Request, given: float | None, field: str, header: str, default: float | None
) -> float | None:
    name: str = field
    text = request.headers.get(header)
    if given is None and text is not None:
        name = header
        try:
            given = float(text)
        except ValueError:
            given = -1.0
    if given is None:
        return default
    if not 0 < given <= MAX_TIMEOUT:
        shown = repr(text[:40]) if name == header and text is not None else repr(given)
        raise InvalidRequestError(
            f"{name} must be seconds above 0 and at most {MAX_TIMEOUT}, got {shown}", field
        )
    return given
