"""Running other engines' programs."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence

from fourfold.config import child_environment
from fourfold.errors import FourfoldError

SAID_CHARACTERS = 600


def output_of(command: Sequence[str], timeout: float, environment: Mapping[str, str] | None = None) -> str:
    """Standard output of a command. Raises FourfoldError with the end of what it said if it fails."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            env=child_environment(**(environment or {})),
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise FourfoldError(f"{command[0]} failed: {error}") from error
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip())[-SAID_CHARACTERS:]
        raise FourfoldError(f"{command[0]} ended with {done.returncode}: {said}")
    return done.stdout
