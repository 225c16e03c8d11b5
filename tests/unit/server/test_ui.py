"""The page that shows a server: complete in itself, allowed nothing but to ask its own server."""

from __future__ import annotations

import base64
import hashlib
import re

import httpx
import pytest

from fourfold.server.app import create_app
from fourfold.server.settings import ServerSettings

from .fakes import FakeClient

pytestmark = pytest.mark.anyio


async def test_it_is_open_and_holds_no_data(engine: FakeClient) -> None:
    app = create_app(engine, engine.tokenizer, ServerSettings(api_keys=("secret",)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        page = await http.get("/ui")
        assert page.status_code == 200
        assert page.headers["content-type"].startswith("text/html")
        assert "tiny" not in page.text
        assert "secret" not in page.text
        assert (await http.get("/debug/status")).status_code == 401


async def test_nothing_from_elsewhere(http: httpx.AsyncClient) -> None:
    page = await http.get("/ui")
    assert not re.search(r"https?://|//\w|src=|@import|innerHTML|insertAdjacent|eval\(", page.text)
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'none';")
    for kind in ("script", "style"):
        (inner,) = re.findall(f"<{kind}>(.*?)</{kind}>", page.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy


async def test_it_reads_only_what_the_status_has(http: httpx.AsyncClient) -> None:
    text = (await http.get("/ui")).text
    status = (await http.get("/debug/status")).json()
    for holder, fields in (("engine", status["engine"]), ("kv", status["kv"]), ("status", status)):
        used = set(re.findall(rf"\b{holder}\.(\w+)", text))
        assert used
        assert used <= set(fields), holder
