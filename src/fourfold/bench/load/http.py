"""HTTP/1.1 requests whose answers are read as they come: little enough that many cost no core."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

import httptools

from fourfold.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Server:
    """Where to send requests. path: what comes before /v1/..."""

    host: str
    port: int
    tls: bool
    path: str
    api_key: str | None = None

    @staticmethod
    def parse(url: str, api_key: str | None = None) -> Server:
        """Raises ConfigError unless it is like http://127.0.0.1:8000, with or without /v1 at the end."""
        try:
            parts = urlsplit(url if "//" in url else f"http://{url}")
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"{url!r} is not the URL of a server: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{url!r} is not the URL of a server, like http://127.0.0.1:8000")
        tls = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        return Server(parts.hostname, port or (443 if tls else 80), tls, path, api_key)

    def require_loopback(self) -> None:
        """Raises ConfigError if requests would leave this machine: load on others needs their consent."""
        if not is_loopback(self.host):
            raise ConfigError(
                f"{self.host} is not this machine; add --allow-remote if its owner agrees to be loaded"
            )


def is_loopback(host: str) -> bool:
    """Whether every address of the host is of this machine. An unknown host is not."""
    try:
        found = socket.getaddrinfo(host, None)
    except OSError:
        return False
    return all(ipaddress.ip_address(str(each[4][0]).split("%")[0]).is_loopback for each in found)


async def request(
    server: Server,
    method: str,
    path: str,
    body: bytes | None,
    on_data: Callable[[bytes], None],
) -> int:
    """Sends one request on a connection of its own; the status, once the answer is complete.

    on_data: called with each piece of the body, as soon as it arrives.
    Raises OSError if the connection fails or ends early, ValueError if the answer is not HTTP, and what
    on_data raises.
    """
    loop = asyncio.get_running_loop()
    head = [
        f"{method} {server.path}{path} HTTP/1.1",
        f"Host: {server.host}:{server.port}",
        "Connection: close",
    ]
    if body is not None:
        head += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    if server.api_key is not None:
        head.append(f"Authorization: Bearer {server.api_key}")
    message = ("\r\n".join(head) + "\r\n\r\n").encode() + (body or b"")
    transport, exchange = await loop.create_connection(
        lambda: _Exchange(message, on_data, loop.create_future()),
        server.host,
        server.port,
        ssl=ssl.create_default_context() if server.tls else None,
    )
    try:
        return await exchange.done
    finally:
        transport.close()


class _Exchange(asyncio.Protocol):
    """One request and its answer."""

    def __init__(self, message: bytes, on_data: Callable[[bytes], None], done: asyncio.Future[int]) -> None:
        self.done = done
        self._message = message
        self._on_data = on_data
        self._parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self._message)

    def data_received(self, data: bytes) -> None:
        if self.done.done():
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            self.done.set_exception(error.__context__ or error)
        except httptools.HttpParserError as error:
            self.done.set_exception(ValueError(f"the answer is not HTTP: {error}"))

    def on_body(self, body: bytes) -> None:
        self._on_data(body)

    def on_message_complete(self) -> None:
        if not self.done.done():
            self.done.set_result(self._parser.get_status_code())

    def eof_received(self) -> None:
        if not self.done.done():
            self.done.set_exception(
                ConnectionError("the server closed the connection before the answer's end")
            )

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(error or ConnectionError("the connection was lost"))
