"""What `fourfold top` reads: one status of a server per call, and rates from two of them."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.parse
import urllib.request
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import msgspec

from fourfold.errors import FourfoldError

MAX_STATUS_BYTES = 16 << 20
HISTORY = 120
"""Rates kept for the curves."""


class NoStatusError(FourfoldError):
    """A server gave no status. final: asking again will not help."""

    def __init__(self, message: str, *, final: bool = False) -> None:
        super().__init__(message)
        self.final = final


class EngineNumbers(msgspec.Struct, kw_only=True):
    """See types.EngineStats."""

    running: int
    waiting: int
    preemptions: int
    prompt_tokens: int
    cached_prompt_tokens: int
    generation_tokens: int
    prefill_tokens: int
    finished: int
    aborted: int
    step: int
    step_seconds: float
    rss_bytes: int


class Prefix(msgspec.Struct, kw_only=True):
    tokens: int
    hits: int
    text: str
    last_text: str
    pinned: bool
    in_use: bool


class Tree(msgspec.Struct, kw_only=True):
    nodes: int
    tokens: int
    domains: int
    pinned_tokens: int
    hottest: list[Prefix]


class KV(msgspec.Struct, kw_only=True):
    """Blocks by state."""

    free: int
    cached: int
    live: int
    in_transfer: int
    total: int
    balanced: bool
    block_size: int
    tree: Tree | None


class Running(msgspec.Struct, kw_only=True):
    """See timeline.LiveRequest."""

    id: str
    state: str
    age: float
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    preemptions: int
    tokens_per_second: float


class Status(msgspec.Struct, kw_only=True):
    """What GET /debug/status says. clock: monotonic seconds of the server. others: requests of other keys.
    stale: why it is only what the engine's last heartbeat said."""

    model: str
    version: str
    clock: float
    max_num_seqs: int
    engine: EngineNumbers
    kv: KV
    requests: list[Running]
    others: int
    stale: str | None


@dataclass(frozen=True, slots=True)
class Source:
    """A server. url: without a path. api_key: None if it has none."""

    url: str
    api_key: str | None = None
    timeout: float = 10.0

    def status(self) -> tuple[Status, dict[str, Any]]:
        """The status, typed and as it came. Raises NoStatusError."""
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        request = urllib.request.Request(f"{self.url}/debug/status", headers=headers)
        # A proxy of the environment is for the way out, not for a server one watches.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=self.timeout) as response:
                body = response.read(MAX_STATUS_BYTES)
                if response.length:
                    raise http.client.IncompleteRead(body, response.length)
        except urllib.error.HTTPError as error:
            raise self._refused(error) from error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise NoStatusError(
                f"no server answers at {self.url} ({str(reason) or type(error).__name__}); "
                "start one with `fourfold serve`, or name its URL"
            ) from error
        try:
            raw = msgspec.json.decode(body)
            return msgspec.convert(raw, Status), raw
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise NoStatusError(
                f"{self.url} answered, but not as a Fourfold server of this version would: {error}",
                final=True,
            ) from error

    def _refused(self, error: urllib.error.HTTPError) -> NoStatusError:
        if error.code in (401, 403):
            key = "a valid API key" if self.api_key else "an API key"
            return NoStatusError(
                f"{self.url} wants {key}: give --api-key, or set FOURFOLD_API_KEY", final=True
            )
        if error.code == 404:
            return NoStatusError(f"{self.url} has no /debug/status: it is no Fourfold server", final=True)
        try:
            said = msgspec.json.decode(error.read(1 << 16))["error"]["message"]
        except (msgspec.MsgspecError, KeyError, TypeError, OSError, http.client.HTTPException):
            said = error.reason
        return NoStatusError(f"{self.url} gave no status ({error.code}: {said})")


def server_url(given: str) -> str:
    """`given` as scheme://host:port: a scheme, a host and /v1 may be there or not. Raises ValueError."""
    text = given.strip()
    if text.startswith(":"):
        text = f"127.0.0.1{text}"
    if "://" not in text:
        text = f"http://{text}"
    parts = urllib.parse.urlsplit(text)
    path = parts.path.rstrip("/")
    if parts.scheme not in ("http", "https") or not parts.hostname or path not in ("", "/v1") or parts.query:
        raise ValueError(f"{given!r} is not the URL of a server, like http://127.0.0.1:8000")
    _ = parts.port  # raises ValueError if it is none
    return f"{parts.scheme}://{parts.netloc}"


@dataclass(frozen=True, slots=True)
class Rates:
    """Per second, between two statuses. hit_share: prompt tokens from the cache; None without any."""

    prefill: float
    decode: float
    requests: float
    hit_share: float | None


@dataclass(slots=True)
class History:
    """The last status, and the rates up to it."""

    last: Status | None = None
    rates: deque[Rates] = field(default_factory=lambda: deque(maxlen=HISTORY))

    def add(self, status: Status) -> None:
        """A server that was started again begins a new history."""
        before, self.last = self.last, status
        if before is None:
            return
        a, b = before.engine, status.engine
        seconds = status.clock - before.clock
        if seconds <= 0 or b.step < a.step or b.generation_tokens < a.generation_tokens:
            self.rates.clear()
            return
        prompts = b.prompt_tokens - a.prompt_tokens
        self.rates.append(
            Rates(
                max(0, b.prefill_tokens - a.prefill_tokens) / seconds,
                (b.generation_tokens - a.generation_tokens) / seconds,
                max(0, b.finished - a.finished) / seconds,
                (b.cached_prompt_tokens - a.cached_prompt_tokens) / prompts if prompts > 0 else None,
            )
        )
