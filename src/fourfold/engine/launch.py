"""Starting the engine's process, before anything is known that it needs.

`fourfold serve` does this first of all, so that the engine imports its modules while this process still reads
its arguments; therefore nothing is imported here but `subprocess`.
"""

from __future__ import annotations

import subprocess
import sys

DEFAULT_FACTORY = "fourfold.build.load:load_engine_backend"
"""`module:function` that makes (Backend, ModelInfo) of (EngineConfig, progress(stage, fraction))."""


def launch(factory: str = DEFAULT_FACTORY) -> subprocess.Popen[bytes]:
    """A process that imports `factory` and waits for a wire.Start on its standard input. It ends when that
    pipe is closed, whether or not it got one."""
    # -P: modules are not looked for in the directory the user happens to be in.
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "fourfold.engine.process", factory],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )


def discard(process: subprocess.Popen[bytes]) -> None:
    """Ends a launched process that nobody has a use for; does nothing if it has ended."""
    if process.stdin is not None:
        process.stdin.close()
    process.kill()
    process.wait()
