"""Reading server-sent events in tests."""

from __future__ import annotations

import json
from typing import Any

import httpx


def events(text: str) -> list[dict[str, Any]]:
    """The JSON of all events; checks their framing and that [DONE] comes last and once."""
    assert text.endswith("\n\n")
    frames = text[:-2].split("\n\n")
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames)
    assert frames[-1] == "data: [DONE]"
    return [json.loads(frame[6:]) for frame in frames[:-1]]


async def stream(http: httpx.AsyncClient, path: str, **body: Any) -> list[dict[str, Any]]:
    response = await http.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return events(response.text)


def texts(chunks: list[dict[str, Any]]) -> dict[int, str]:
    """Joined text per choice, of completions or chat."""
    joined: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            piece = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            joined[choice["index"]] = joined.get(choice["index"], "") + piece
    return joined
