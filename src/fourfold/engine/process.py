"""The engine in a process of its own: `python -m fourfold.engine.process FACTORY`, started by launch.py.

What FACTORY needs is imported before the start message is read: whoever writes it may not know yet what it
will say. The process has no HTTP, no asyncio and no tokenizer in it, and it does not outlive the one that
started it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from fourfold.config import EngineConfig
from fourfold.engine.batch import Backend
from fourfold.engine.loop import Engine
from fourfold.engine.speculate.build import load_draft
from fourfold.engine.wire import (
    Abort,
    Add,
    AskTimelines,
    AskView,
    Command,
    Heartbeat,
    LoadFailed,
    Operate,
    Operated,
    Output,
    Progress,
    Ready,
    Refused,
    Report,
    Start,
    Timelines,
    View,
    read_start,
)
from fourfold.errors import DeadlineError, FourfoldError, InvalidRequestError, LoadError, OverloadedError
from fourfold.grammar.compile import TokenSource
from fourfold.types import ModelInfo

logger = logging.getLogger("fourfold.engine")

Factory = Callable[[EngineConfig, Callable[[str, float], None]], tuple[Backend, ModelInfo]]

IDLE_MILLISECONDS = 300
"""Without a request, after which the engine prepares for constraints."""

HEARTBEAT_SECONDS = 0.25


class Outbox:
    """Sends reports to the front. Each thread needs one of its own: sockets are not shared."""

    def __init__(self, context: zmq.Context[Any], endpoint: str) -> None:
        self._socket = context.socket(zmq.PUSH)
        self._socket.linger = 1000
        self._socket.connect(endpoint)
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, report: Report) -> None:
        """Blocks when the front does not read for about a thousand steps: the engine waits for it."""
        self._socket.send(self._encoder.encode(report))

    def close(self) -> None:
        self._socket.close()


def resolve_factory(path: str) -> Factory:
    """`module:function`, imported now. Raises LoadError if there is no such function."""
    factory: Factory = _resolve(path, "backend factory")
    return factory


def _resolve(path: str, what: str) -> Any:
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise LoadError(f"no {what} {path!r}: {error}") from error


def resolve_tokenizer(path: str) -> Callable[[ModelInfo], TokenSource]:
    """`module:function`, imported now. Raises LoadError if there is no such function."""
    found: Callable[[ModelInfo], TokenSource] = _resolve(path, "tokenizer")
    return found


def serve(engine: Engine, inbox: zmq.Socket[bytes], outbox: Outbox) -> None:
    """Until Stop. Sleeps while there is nothing to do; while there is, looks for commands between steps."""
    decoder = msgspec.msgpack.Decoder(Command)
    warm = False
    while True:
        if not engine.has_work:
            if not warm and not inbox.poll(IDLE_MILLISECONDS):
                engine.warm()
                warm = True
            inbox.poll()
        refused: list[Refused] = []
        while inbox.poll(0):
            command = decoder.decode(inbox.recv())
            if isinstance(command, Add):
                try:
                    engine.add(command.request)
                except (InvalidRequestError, OverloadedError, DeadlineError) as error:
                    refused.append(Refused.of(command.request.request_id, error))
            elif isinstance(command, Abort):
                engine.abort(command.request_id)
            elif isinstance(command, AskTimelines):
                found = [engine.recorder.timeline(request_id) for request_id in command.request_ids]
                outbox.send(Timelines(command.number, found))
            elif isinstance(command, AskView):
                outbox.send(View(command.number, engine.view(command.salts)))
            elif isinstance(command, Operate):
                outbox.send(Operated(command.number, engine.operate(command.operation)))
            else:
                return
        events = engine.step() if engine.has_work else []
        if events or refused:
            outbox.send(Output(events, refused))
            if not engine.has_work:
                # The next one by the clock would show requests as running that have ended.
                outbox.send(Heartbeat(engine.stats()))


def main() -> int:
    # The front's terminal may send Ctrl-C to both; the front decides what it means and closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if len(sys.argv) != 2:
        raise LoadError(
            "the engine process expects a factory and a start message on its standard input; "
            "it is started by `fourfold serve`, not by hand"
        )
    gc.disable()  # until all is there: what a start makes is no garbage
    pipe = sys.stdin.buffer
    with contextlib.suppress(LoadError):  # _load says it
        resolve_factory(sys.argv[1])
    start = read_start(pipe)
    if start is None:
        return 0
    _end_with_parent(pipe.fileno(), start)
    logging.basicConfig(
        level=start.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    context: zmq.Context[Any] = zmq.Context()
    inbox = context.socket(zmq.PULL)
    inbox.rcvhwm = 0  # bounded by the front, which counts its requests
    inbox.bind(start.inbox)
    outbox = Outbox(context, start.outbox)
    try:
        engine = _load(start, outbox)
        if engine is None:
            return 1
        gc.freeze()
        gc.enable()
        outbox.send(Ready(engine.model))
        stopped = threading.Event()
        beat = threading.Thread(
            target=_heartbeat,
            args=(engine, Outbox(context, start.outbox), stopped),
            name="heartbeat",
            daemon=True,
        )
        beat.start()
        try:
            serve(engine, inbox, outbox)
        finally:
            stopped.set()
            beat.join()
            engine.close()
        return 0
    finally:
        inbox.close(0)
        outbox.close()
        context.term()


def _load(start: Start, outbox: Outbox) -> Engine | None:
    """None if that failed; the front was told why."""
    try:
        factory = resolve_factory(start.factory)

        def progress(stage: str, fraction: float) -> None:
            outbox.send(Progress(stage, fraction))

        backend, model = factory(start.config, progress)
        return Engine(
            backend,
            model,
            start.config,
            load_tokens=lambda: resolve_tokenizer(start.tokenizer)(model),
            draft=load_draft(start.config, model, factory, progress),
        )
    except FourfoldError as error:
        outbox.send(LoadFailed(str(error), expected=True))
    except Exception as error:
        logger.exception("the model could not be loaded")
        outbox.send(LoadFailed(f"{type(error).__name__}: {error}", expected=False))
    return None


def _heartbeat(engine: Engine, outbox: Outbox, stopped: threading.Event) -> None:
    while True:
        outbox.send(Heartbeat(engine.stats()))
        if stopped.wait(HEARTBEAT_SECONDS):
            outbox.close()
            return


def _end_with_parent(pipe: int, start: Start) -> None:
    """The parent never writes again, so the end of its pipe means that it is gone, however it went."""

    def watch() -> None:
        os.read(pipe, 1)
        shutil.rmtree(start.directory, ignore_errors=True)
        os._exit(0)

    threading.Thread(target=watch, name="parent", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
