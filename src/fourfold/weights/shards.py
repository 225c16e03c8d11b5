"""The files of a split GGUF model, by their names alone."""

from __future__ import annotations

import re
from pathlib import Path

SHARD_NAME = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")


def shards(path: Path) -> tuple[Path, ...]:
    """The shards that are there beside `path`, in order; `path` alone if its name is not that of a shard."""
    match = SHARD_NAME.match(path.name)
    if match is None:
        return (path,)
    names = (f"{match['stem']}-{n:05d}-of-{match['count']}.gguf" for n in range(1, int(match["count"]) + 1))
    return tuple(found for found in map(path.with_name, names) if found.exists())
