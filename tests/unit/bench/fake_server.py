"""An OpenAI-like server that says what a test wants, cut where it wants, when it wants."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from fourfold.bench.load.http import Server

Reply = Callable[[str, dict[str, Any]], "tuple[int, Sequence[bytes | float]]"]


@dataclass
class Seen:
    """Requests as they came: path, headers, body.  most: how many were in flight at once."""

    requests: list[tuple[str, dict[str, str], dict[str, Any]]] = field(default_factory=list)
    active: int = 0
    most: int = 0


@asynccontextmanager
async def serving(reply: Reply) -> AsyncIterator[tuple[Server, Seen]]:
    """reply: (path, body) → status and pieces of the body; a number among them is a pause in seconds, and an
    empty piece ends the connection before the body is complete."""
    seen = Seen()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in head[1:] if line)}
        raw = await reader.readexactly(int(headers.get("content-length", "0")))
        path, body = head[0].split()[1], json.loads(raw) if raw else {}
        seen.requests.append((path, headers, body))
        seen.active += 1
        seen.most = max(seen.most, seen.active)
        status, pieces = reply(path, body)
        writer.write(f"HTTP/1.1 {status} X\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        for piece in pieces:
            if isinstance(piece, float):
                await asyncio.sleep(piece)
            elif piece:
                writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            else:
                break
            await writer.drain()
        else:
            writer.write(b"0\r\n\r\n")
        seen.active -= 1
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield Server("127.0.0.1", server.sockets[0].getsockname()[1], False, ""), seen


def event(value: dict[str, Any] | str) -> bytes:
    return b"data: " + (value if isinstance(value, str) else json.dumps(value)).encode() + b"\n\n"


def completion(tokens: Sequence[str], usage: dict[str, Any] | None = None) -> list[bytes]:
    """The events of a streamed text completion."""
    events = [event({"choices": [{"text": text, "finish_reason": None}]}) for text in tokens]
    events.append(event({"choices": [{"text": "", "finish_reason": "length"}]}))
    if usage is not None:
        events.append(event({"choices": [], "usage": usage}))
    return [*events, event("[DONE]")]
