"""Running other engines' programs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence

from fourfold.config import child_environment
from fourfold.errors import FourfoldError

SAID_CHARACTERS = 600


def output_of(command: Sequence[str], timeout: float, environment: Mapping[str, str] | None = None) -> str:
    """Standard output of a command.

    timeout: seconds, after which it is ended with all it started.
    Raises FourfoldError with the end of what it said if it fails, or if it takes longer.
    """
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=child_environment(**(environment or {})),
            process_group=0,
        )
    except OSError as error:
        raise FourfoldError(f"{command[0]} cannot be run: {error.strerror or error}") from error
    with process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired as error:
            raise FourfoldError(f"{command[0]} took longer than {timeout:g} s") from error
        finally:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    if process.returncode != 0:
        said = (errors.strip() or output.strip())[-SAID_CHARACTERS:]
        raise FourfoldError(f"{command[0]} ended with {process.returncode}: {said}")
    return output
