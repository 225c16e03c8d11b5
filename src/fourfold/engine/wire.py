"""Messages between the HTTP front and the engine process: MessagePack, one message per send."""

from __future__ import annotations

from typing import IO, Literal

import msgspec

from fourfold.config import EngineConfig
from fourfold.engine.operations import CacheOperation, CacheOutcome
from fourfold.errors import DeadlineError, FourfoldError, InvalidRequestError, LoadError, OverloadedError
from fourfold.timeline import EngineView, Timeline
from fourfold.types import EngineEvent, EngineRequest, EngineStats, ModelInfo

DEFAULT_TOKENIZER = "fourfold.text.tokenizer:load_model_tokenizer"
"""`module:function` that makes a TokenSource of a ModelInfo, for constraints."""

MAX_START_BYTES = 1 << 20


class Start(msgspec.Struct, kw_only=True):
    """First message, over the standard input. The engine lives as long as that pipe is open.

    directory: private to the two processes; holds the sockets.
    inbox: ZeroMQ endpoint the engine binds for commands.  outbox: the one it connects to for reports.
    """

    config: EngineConfig
    factory: str
    directory: str
    inbox: str
    outbox: str
    log_level: str
    tokenizer: str = DEFAULT_TOKENIZER


class Add(msgspec.Struct, tag="add"):
    request: EngineRequest


class Abort(msgspec.Struct, tag="abort"):
    request_id: str


class Stop(msgspec.Struct, tag="stop"):
    """End now; what is unfinished is dropped."""


class AskTimelines(msgspec.Struct, tag="ask_timelines"):
    """Answered by Timelines of the same number."""

    number: int
    request_ids: list[str]


class AskView(msgspec.Struct, tag="ask_view"):
    """Answered by View of the same number. salts: see Engine.view."""

    number: int
    salts: list[str] | None


class Operate(msgspec.Struct, tag="operate"):
    """Answered by Operated of the same number. See Engine.operate."""

    number: int
    operation: CacheOperation


Command = Add | Abort | Stop | AskTimelines | AskView | Operate


class Progress(msgspec.Struct, tag="progress"):
    """How far loading is; fraction in [0, 1]."""

    stage: str
    fraction: float


class Ready(msgspec.Struct, tag="ready"):
    model: ModelInfo


class LoadFailed(msgspec.Struct, tag="load_failed"):
    """expected: a FourfoldError, whose message is all a user needs; otherwise the log has a traceback."""

    message: str
    expected: bool


class Refused(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A request that was not taken, and which error that is."""

    request_id: str
    kind: Literal["invalid", "overloaded", "deadline"]
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: float = 1.0

    @classmethod
    def of(cls, request_id: str, error: InvalidRequestError | OverloadedError | DeadlineError) -> Refused:
        if isinstance(error, DeadlineError):
            return cls(
                request_id=request_id, kind="deadline", message=str(error), retry_after=error.retry_after
            )
        if isinstance(error, OverloadedError):
            return cls(
                request_id=request_id, kind="overloaded", message=str(error), retry_after=error.retry_after
            )
        return cls(
            request_id=request_id, kind="invalid", message=str(error), param=error.param, code=error.code
        )

    def error(self) -> FourfoldError:
        if self.kind == "overloaded":
            return OverloadedError(self.message, self.retry_after)
        if self.kind == "deadline":
            return DeadlineError(self.message, self.retry_after)
        return InvalidRequestError(self.message, self.param, self.code)


class Output(msgspec.Struct, tag="output", omit_defaults=True):
    """Everything one step brought."""

    events: list[EngineEvent] = []
    refused: list[Refused] = []


class Heartbeat(msgspec.Struct, tag="heartbeat"):
    """Sent by a thread of its own, so it comes during long steps too, and when the work is done.

    Progress shows in stats.step.
    """

    stats: EngineStats


class Timelines(msgspec.Struct, tag="timelines"):
    number: int
    timelines: list[Timeline | None]


class View(msgspec.Struct, tag="view"):
    number: int
    view: EngineView


class Operated(msgspec.Struct, tag="operated"):
    number: int
    outcome: CacheOutcome


Answer = Timelines | View | Operated
Report = Progress | Ready | LoadFailed | Output | Heartbeat | Answer


def write_start(pipe: IO[bytes], start: Start) -> None:
    payload = msgspec.msgpack.encode(start)
    pipe.write(len(payload).to_bytes(4, "little") + payload)
    pipe.flush()


def read_start(pipe: IO[bytes]) -> Start | None:
    """None if the pipe was closed before anything was written: the parent needs no engine after all.

    Raises LoadError if the pipe does not hold a Start message.
    """
    head = pipe.read(4)
    if not head:
        return None
    size = int.from_bytes(head, "little")
    payload = pipe.read(size) if size <= MAX_START_BYTES else b""
    if not payload or len(payload) != size:
        raise LoadError(
            f"the engine process expects a start message of 1 to {MAX_START_BYTES} bytes on its standard "
            f"input, got {len(payload)} of {size}; it is started by `fourfold serve`, not by hand"
        )
    try:
        return msgspec.msgpack.decode(payload, type=Start)
    except msgspec.DecodeError as error:
        raise LoadError(f"the engine's start message is not readable: {error}") from error
