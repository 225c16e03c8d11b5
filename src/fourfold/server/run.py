"""`fourfold serve`: the engine in its process, HTTP in this one.

Only what is needed to start the engine is imported here at the top, not even asyncio: the model loads over
there while this process imports the rest.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from fourfold.config import EngineConfig
from fourfold.engine.child import EngineProcess
from fourfold.engine.launch import DEFAULT_FACTORY
from fourfold.errors import ConfigError
from fourfold.server.settings import ServerSettings

if TYPE_CHECKING:
    from fourfold.engine.remote import RemoteEngine
    from fourfold.text.tokenizer import Tokenizer
    from fourfold.types import ModelInfo

log = logging.getLogger("fourfold.server")


def serve(
    engine_config: EngineConfig,
    settings: ServerSettings,
    *,
    log_level: str = "info",
    factory: str = DEFAULT_FACTORY,
    announce: Callable[[str], None] | None = None,
    launched: subprocess.Popen[bytes] | None = None,
) -> int:
    """Serves until SIGTERM or SIGINT, lets running answers finish, and returns 0.

    engine_config.model: path of the model.
    factory, launched: see EngineProcess.
    announce: gets the lines that say the server is ready; default: prints them.

    Raises ConfigError if it cannot listen there, LoadError and EngineDeadError if the model cannot be loaded.
    """
    started = time.monotonic()
    logging.basicConfig(
        level=log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    listener = listen(settings.host, settings.port)
    child = EngineProcess(engine_config, factory=factory, log_level=log_level, launched=launched)

    import asyncio

    import uvloop

    from fourfold.engine.remote import RemoteEngine

    engine = RemoteEngine(
        engine_config, factory=factory, log_level=log_level, on_progress=_log_progress(), child=child
    )

    async def main() -> None:
        try:
            await _serve(engine, engine_config, settings, listener, started, announce or _print)
        finally:
            listener.close()
            await engine.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
    return 0


async def _serve(
    engine: RemoteEngine,
    config: EngineConfig,
    settings: ServerSettings,
    listener: socket.socket,
    started: float,
    announce: Callable[[str], None],
) -> None:
    import asyncio

    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    signals = (signal.SIGINT, signal.SIGTERM)
    for number in signals:
        loop.add_signal_handler(number, stopped.set)
    ready = asyncio.create_task(engine.ready())
    stopping = asyncio.create_task(stopped.wait())
    try:
        # The engine's reports are read in this loop, so it must turn between the slow steps.
        await asyncio.sleep(0)
        from fourfold.server.app import create_app
        from fourfold.server.host import Host

        tokenizer = _load_tokenizer(config.model)
        await asyncio.wait((ready, stopping), return_when=asyncio.FIRST_COMPLETED)
        if stopped.is_set():
            return
        model = ready.result()
        log.info("configuration: %s", configuration(model, settings))
    finally:
        ready.cancel()
        stopping.cancel()
        await asyncio.gather(ready, stopping, return_exceptions=True)

    def on_started() -> None:
        # What is alive now stays so; looking through it in every collection would only cost pauses.
        gc.freeze()
        gc.enable()
        name = (settings.served_model_names or (model.name,))[0]
        url = address(settings.host, listener.getsockname()[1])
        announce(
            f"Fourfold serves {name} on {url} after {time.monotonic() - started:.2f} s (context of "
            f"{model.max_model_len} tokens, {model.max_num_seqs} sequences at a time). Try:\n"
            f"  {example(url, name, chat=_chats(tokenizer, settings), keyed=bool(settings.api_keys))}"
        )

    host = Host(create_app(engine, tokenizer, settings), settings, on_started)
    for number in signals:
        loop.add_signal_handler(number, host.stop)
    try:
        await host.serve(sockets=[listener])
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


def configuration(model: ModelInfo, settings: ServerSettings) -> str:
    """What was given, measured and derived, as it holds from now on; keys are counted, not shown."""
    facts = {
        "model": model.path,
        **model.description,
        "context": f"{model.max_model_len} tokens",
        "KV cache": f"{model.num_blocks} blocks of {model.block_size} tokens",
        "sequences per step": str(model.max_num_seqs),
        "tokens per step": str(model.max_num_batched_tokens),
        "drain timeout": f"{settings.drain_timeout:g} s",
        "largest body": f"{settings.max_body_bytes} bytes",
        "API keys": str(len(settings.api_keys)),
    }
    return "; ".join(f"{name}: {value}" for name, value in facts.items())


def _load_tokenizer(path: str) -> Tokenizer:
    from fourfold.text.tokenizer import load_tokenizer

    return load_tokenizer(Path(path))


def _chats(tokenizer: Tokenizer, settings: ServerSettings) -> bool:
    return settings.chat_template is not None or tokenizer.chat_template is not None


def listen(host: str, port: int) -> socket.socket:
    """A bound socket, not listening yet, so that a taken port is noticed before the model is loaded.

    Raises ConfigError.
    """
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"cannot listen on host {host!r}: {error.strerror}; give another --host") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
    except OSError as error:
        listener.close()
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise ConfigError(
            f"cannot listen on {host}:{port}: {reason}; give another --port or --host"
        ) from error
    return listener


def address(host: str, port: int) -> str:
    """The URL under which this machine reaches a server that listens on `host`."""
    host = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def example(url: str, name: str, *, chat: bool, keyed: bool) -> str:
    """A shell command that gets an answer. A key is not written out, for it would end up in logs."""
    if chat:
        path = "/v1/chat/completions"
        body: dict[str, object] = {"model": name, "messages": [{"role": "user", "content": "Say hello."}]}
    else:
        path = "/v1/completions"
        body = {"model": name, "prompt": "Once upon a time"}
    key = ' -H "Authorization: Bearer $FOURFOLD_API_KEY"' if keyed else ""
    return f"curl {url}{path} -H 'Content-Type: application/json'{key} -d {shlex.quote(json.dumps(body))}"


def _print(text: str) -> None:
    print(text, flush=True)


def _log_progress() -> Callable[[str, float], None]:
    """Logs each stage of loading once."""
    seen = ""

    def report(stage: str, fraction: float) -> None:
        nonlocal seen
        if stage != seen:
            seen = stage
            log.info("loading: %s", stage)

    return report
