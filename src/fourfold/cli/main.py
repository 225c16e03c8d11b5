"""The `fourfold` command: commands are imported when used, and every failure is one line and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from fourfold._version import __version__
from fourfold.cli.base import LazyGroup
from fourfold.config import without_blas_threads
from fourfold.errors import FourfoldError

if TYPE_CHECKING:
    import subprocess

EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141

COMMANDS = {
    "serve": ("fourfold.cli.serve:serve", "Serve a model over HTTP, as OpenAI's API does."),
    "run": ("fourfold.cli.run:run", "Answer one prompt."),
    "chat": ("fourfold.cli.chat:chat", "Talk to a model in the terminal."),
    "pull": ("fourfold.cli.pull:pull", "Fetch a model."),
    "models": ("fourfold.cli.models:models", "List known, fetched and built models."),
    "top": ("fourfold.cli.top:top", "Watch a server: requests, KV cache, speed."),
    "bench": ("fourfold.cli.bench:bench", "Measure this machine with a model."),
    "version": ("fourfold.cli.version:version", "Print the version."),
}


def _normalize(token: str) -> str:
    return token.replace("_", "-")


@click.group(
    cls=LazyGroup,
    lazy=COMMANDS,
    context_settings={
        "token_normalize_func": _normalize,
        "help_option_names": ["-h", "--help"],
        "max_content_width": 110,
    },
)
@click.version_option(__version__, "-V", "--version", message="fourfold %(version)s")
def cli() -> None:
    """Fourfold, an LLM inference engine.

    A MODEL is a path (GGUF file or Hugging Face folder), an alias (`fourfold models` lists them) or a Hub id
    (org/name, org/name:file.gguf). In flags, dashes and underscores are the same.
    """


def main(arguments: Sequence[str] | None = None, launched: subprocess.Popen[bytes] | None = None) -> int:
    """Runs one command. Returns 0, 1 (error), 2 (wrong usage), 130 (Ctrl-C) or 141 (the pipe was closed).

    launched: an engine process (engine.launch) for the command that wants one.
    """
    without_blas_threads()
    try:
        # Not cli.main(): it decides about closed pipes and exit codes by itself.
        arguments = list(sys.argv[1:] if arguments is None else arguments)
        with cli.make_context("fourfold", arguments, obj=launched) as context:
            result = cli.invoke(context)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx is not None else "fourfold"
        _complain(f"{where}: {error.format_message()} (see {where} --help)")
        return EXIT_USAGE
    except click.ClickException as error:
        _complain(error.format_message())
        return error.exit_code
    except FourfoldError as error:
        _complain(f"error: {error}")
        return EXIT_ERROR
    except (KeyboardInterrupt, click.Abort):
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # What is still buffered has nowhere to go, and the interpreter would complain about it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE


def _complain(message: str) -> None:
    print(" ".join(message.split()), file=sys.stderr)
