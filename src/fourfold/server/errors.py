"""Every failure in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import logging
import math

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from fourfold.errors import (
    DeadlineError,
    EngineDeadError,
    EngineFaultError,
    FourfoldError,
    InvalidRequestError,
    OverloadedError,
)

log = logging.getLogger("fourfold.server")

JSON = "application/json"


class HTTPError(FourfoldError):
    """A refusal whose status is not given by one of the project's errors."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = headers


class UnsupportedError(HTTPError):
    """A field that this server knows, but cannot honour (501). It is never dropped in silence."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(501, message, "invalid_request_error", param, "unsupported_parameter")


def as_http(error: BaseException) -> HTTPError:
    """The status and wording of any exception; what is unforeseen is logged with its traceback and becomes a
    500."""
    match error:
        case HTTPError():
            return error
        case InvalidRequestError():
            return HTTPError(400, str(error), "invalid_request_error", error.param, error.code)
        case OverloadedError():
            after = {"Retry-After": str(max(1, math.ceil(error.retry_after)))}
            return HTTPError(429, str(error), "rate_limit_error", code="queue_full", headers=after)
        case DeadlineError():
            after = {"Retry-After": str(max(1, math.ceil(error.retry_after)))}
            if error.passed:
                return HTTPError(504, str(error), "timeout_error", code="timeout", headers=after)
            return HTTPError(
                503, str(error), "service_unavailable_error", code="deadline_unreachable", headers=after
            )
        case EngineDeadError():
            return HTTPError(
                503, str(error), "service_unavailable_error", code="engine_dead", headers={"Retry-After": "1"}
            )
        case EngineFaultError():
            return HTTPError(500, str(error), "server_error", code="engine_fault")
        case _:
            log.error("unforeseen error while answering a request", exc_info=error)
            return HTTPError(500, "internal error; the server's log has the details", "server_error")


def error_object(error: HTTPError) -> bytes:
    return msgspec.json.encode(
        {
            "error": {
                "message": str(error),
                "type": error.kind,
                "param": error.param,
                "code": error.code,
            }
        }
    )


def error_response(error: BaseException) -> Response:
    http = as_http(error)
    return Response(error_object(http), http.status, http.headers, JSON)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """The router's own refusals (404, 405) in the same shape."""
    status = getattr(error, "status_code", 500)
    path = request.url.path
    if status == 404:
        http = HTTPError(
            404, f"there is no {path} here; GET /openapi.json lists what there is", "not_found_error"
        )
    elif status == 405:
        allowed = (getattr(error, "headers", None) or {}).get("Allow", "")
        http = HTTPError(
            405,
            f"{path} does not take {request.method}; it takes {allowed or 'other methods'}",
            "invalid_request_error",
            headers={"Allow": allowed} if allowed else None,
        )
    else:
        http = HTTPError(status, str(getattr(error, "detail", error)), "invalid_request_error")
    return error_response(http)
