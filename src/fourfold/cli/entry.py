"""Where the `fourfold` command begins: the engine of `serve` is started before anything else is imported."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence

from fourfold.config import without_blas_threads


def main(arguments: Sequence[str] | None = None) -> int:
    """See cli.main.main."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    without_blas_threads()
    if arguments[:1] != ["serve"] or not {"-h", "--help"}.isdisjoint(arguments):
        from fourfold.cli.main import main as run

        return run(arguments)

    from fourfold.engine.launch import discard, launch

    launched = launch()
    gc.disable()  # what a start makes is no garbage; server.run enables it once all is there
    try:
        from fourfold.cli.main import main as run

        return run(arguments, launched)
    finally:
        gc.enable()
        discard(launched)  # ended already, unless the arguments were wrong or the model is not there


if __name__ == "__main__":
    sys.exit(main())
