"""Mutations that know what such files are made of, and a plain loop over them where there is no atheris.

python fuzz/mutate.py gguf|safetensors [seconds] [seed]
"""

from __future__ import annotations

import random
import re
import struct
import sys
import time

from seeds import SEEDS
from targets import TARGETS

_NUMBERS = (
    0, 1, 2, 3, 7, 8, 9, 12, 13, 31, 32, 33, 64, 127, 128, 255, 256, 65535, 65536, 2**31 - 1, 2**31,
    2**32 - 1, 2**32, 2**53, 2**60, 2**62, 2**63 - 1, 2**63, 2**64 - 32, 2**64 - 1,
)  # fmt: skip
_TEXTS = (
    b"{",
    b"}",
    b"[",
    b"]",
    b'"',
    b",",
    b":",
    b"null",
    b"true",
    b"-1",
    b"1.5",
    b"1e999",
    b"NaN",
    b"\\ud800",
    b"\xff",
)


def mutate(data: bytes, rng: random.Random) -> bytes:
    """One to four edits: a number overwritten, bytes flipped, cut, repeated or removed, a decimal changed."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 4))):
        place = rng.randrange(len(out) + 1)
        kind = rng.randrange(8)
        if kind <= 1:
            size, code = rng.choice(((4, "<I"), (8, "<Q")))
            out[place : place + size] = struct.pack(code, rng.choice(_NUMBERS) & ((1 << 8 * size) - 1))
        elif kind == 2 and out:
            out[place % len(out)] ^= 1 << rng.randrange(8)
        elif kind == 3:
            del out[place:]
        elif kind == 4:
            del out[place : place + rng.randrange(1, 64)]
        elif kind == 5:
            out[place:place] = out[place : place + rng.randrange(1, 128)]
        elif kind == 6:
            out[place:place] = rng.choice(_TEXTS)
        else:
            decimals = list(re.finditer(rb"\d+", out))
            if decimals:
                found = rng.choice(decimals)
                out[found.start() : found.end()] = str(rng.choice(_NUMBERS)).encode()
    return bytes(out)


def run(name: str, rng: random.Random, seconds: float = float("inf"), count: int | None = None) -> int:
    """Runs until the time or the count is over; returns how many inputs that were. A finding is raised."""
    seeds = SEEDS[name]()
    target = TARGETS[name]
    for seed in seeds:
        target(seed)
    end = time.monotonic() + seconds
    done = 0
    while (count is None or done < count) and time.monotonic() < end:
        data = mutate(rng.choice(seeds), rng)
        try:
            target(data)
        except BaseException:
            print(f"finding after {done} inputs, in hex: {data.hex()}", file=sys.stderr)
            raise
        done += 1
    return done


def main() -> None:
    name = sys.argv[1]
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 600.0
    seed = int(sys.argv[3]) if len(sys.argv) > 3 else 0
    done = run(name, random.Random(seed), seconds)
    print(f"{name}: {done} inputs in {seconds:g} s, no finding")


if __name__ == "__main__":
    main()
