"""What every worker does: load, say so, then answer batches until standard input ends.

Standard output carries one JSON object per line and nothing else: what engines print goes to standard error.
Nothing of fourfold is imported here: these scripts run in other engines' Pythons.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Prompts = list[list[int]]


def run(load: Callable[[dict[str, Any]], tuple[str, Callable[[Prompts, int], int]]]) -> None:
    """load: settings → (version, generate); generate: (prompts, tokens of each answer) → tokens answered."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(**fields: object) -> None:
        output.write(json.dumps(fields) + "\n")
        output.flush()

    version, generate = load(json.loads(sys.argv[1]))
    say(version=version)
    for line in sys.stdin:
        job = json.loads(line)
        started = time.perf_counter()
        tokens = generate(job["prompts"], job["tokens"])
        say(seconds=time.perf_counter() - started, tokens=tokens)
