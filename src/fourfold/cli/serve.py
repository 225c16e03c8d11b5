"""`fourfold serve MODEL`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import click
import msgspec

from fourfold.cli import options
from fourfold.cli.base import Command
from fourfold.cli.pull import fetch
from fourfold.cli.template import read_template
from fourfold.config import Environment
from fourfold.server.settings import ServerSettings

if TYPE_CHECKING:
    import subprocess

DEFAULTS = ServerSettings()


def _weights(
    ctx: click.Context, param: click.Parameter, values: tuple[str, ...]
) -> tuple[tuple[str, float], ...]:
    found = []
    for value in values:
        key, separator, number = value.rpartition("=")
        try:
            found.append((key, float(number)))
        except ValueError:
            separator = ""
        if not separator:
            raise click.BadParameter("must be KEY=WEIGHT, where WEIGHT is a number")
    return tuple(found)


@click.command(cls=Command)
@options.model_argument
@click.option("--host", default=DEFAULTS.host, show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=DEFAULTS.port,
    show_default=True,
    help="Port to listen on; 0 takes a free one.",
)
@click.option(
    "--served-model-name",
    "--alias",
    "served_model_names",
    metavar="NAME",
    multiple=True,
    help="Name the model answers to; may be given several times. [default: MODEL]",
)
@click.option(
    "--api-key",
    "api_keys",
    metavar="KEY",
    multiple=True,
    help="Key that requests must bring, for all but /health; may be given several times. "
    "[default: FOURFOLD_API_KEY, if set]",
)
@click.option(
    "--api-key-weight",
    "key_weights",
    metavar="KEY=WEIGHT",
    callback=_weights,
    multiple=True,
    help="Share of the engine that a key gets when there is not enough for all, relative to the others' 1.",
)
@click.option(
    "--request-timeout",
    type=click.FloatRange(0, 86400, min_open=True),
    help="Seconds in which an answer must be complete if the request does not say (`timeout`). What cannot "
    "be is refused at once with status 503. [default: no limit]",
)
@click.option(
    "--ttft-timeout",
    type=click.FloatRange(0, 86400, min_open=True),
    help="The same for its first token (`ttft_timeout`). [default: no limit]",
)
@click.option("--chat-template", metavar="FILE|JINJA", help="Chat template instead of the model's own.")
@click.option(
    "--tool-call-parser",
    metavar="NAME",
    help="Format of tool calls, such as hermes, llama3_json or mistral; none for no calls. "
    "[default: told by the chat template]",
)
@click.option(
    "--reasoning-parser",
    metavar="NAME",
    help="Format of reasoning, such as deepseek_r1, qwen3 or mistral; none to leave it in the content. "
    "[default: told by the chat template]",
)
@click.option(
    "--trust-request-chat-template",
    "allow_request_chat_template",
    is_flag=True,
    help="Let requests bring chat templates (they run in a sandbox).",
)
@click.option(
    "--allowed-origins",
    "--cors-origins",
    "cors_origins",
    metavar="ORIGIN",
    multiple=True,
    help="Web page origin that may call the server; may be given several times.",
)
@click.option(
    "--max-waiting",
    "--max-queue",
    "max_waiting",
    type=options.COUNT,
    help=f"Requests that may wait; more get status 429. [default: {options.DEFAULTS.max_waiting}]",
)
@click.option(
    "--drain-timeout",
    type=click.FloatRange(0, 86400),
    default=DEFAULTS.drain_timeout,
    show_default=True,
    help="Seconds that running answers get after SIGTERM.",
)
@click.option("--access-log", is_flag=True, help="Log every request.")
@options.engine_options
@click.pass_obj
def serve(
    launched: subprocess.Popen[bytes] | None,
    /,
    model: str | None,
    model_flag: str | None,
    chat_template: str | None,
    api_keys: tuple[str, ...],
    **flags: Any,
) -> int:
    """Serve MODEL over HTTP: OpenAI's chat and text completions, tokenizing, health and metrics."""
    name = options.chosen_model(model, model_flag)
    environment = Environment.read()
    config = options.engine_config(name, flags)
    settings = ServerSettings(
        host=flags["host"],
        port=flags["port"],
        served_model_names=flags["served_model_names"],
        api_keys=api_keys or ((environment.api_key,) if environment.api_key else ()),
        key_weights=flags["key_weights"],
        request_timeout=flags["request_timeout"],
        ttft_timeout=flags["ttft_timeout"],
        chat_template=read_template(chat_template),
        tool_call_parser=flags["tool_call_parser"],
        reasoning_parser=flags["reasoning_parser"],
        allow_request_chat_template=flags["allow_request_chat_template"],
        cors_origins=flags["cors_origins"],
        drain_timeout=flags["drain_timeout"],
        access_log=flags["access_log"],
    )
    # Fetched here, where a person looks on; the engine's process then only sees a path.
    found = fetch(name)
    config = dataclasses.replace(config, model=str(found.path))
    if config.speculation is not None and config.speculation.model is not None:
        draft = dataclasses.replace(config.speculation, model=str(fetch(config.speculation.model).path))
        config = dataclasses.replace(config, speculation=draft)
    if not settings.served_model_names:
        settings = msgspec.structs.replace(settings, served_model_names=(found.name,))

    from fourfold.server.run import serve as serve_until_stopped

    return serve_until_stopped(config, settings, log_level=environment.log_level, launched=launched)
