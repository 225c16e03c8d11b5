"""GET /ui: a page, complete in itself, that shows what /debug/status says. Without data, it needs no key."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

UI_PATH = "/ui"

_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


@cache
def _page() -> tuple[bytes, str]:
    """The page, and the policy that lets it do what it does and nothing else: run its own script and style by
    their digests, and talk to the server it came from."""
    text = files(__name__).joinpath("status.html").read_text("utf-8")
    digests = {
        kind: base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode()
        for kind, inner in _INLINE.findall(text)
    }
    policy = (
        f"default-src 'none'; script-src 'sha256-{digests['script']}'; "
        f"style-src 'sha256-{digests['style']}'; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    )
    return text.encode(), policy


async def ui_endpoint(_: Request) -> Response:
    page, policy = _page()
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-cache",
    }
    return Response(page, media_type="text/html; charset=utf-8", headers=headers)
