"""A process that makes Constraints of large sources: its Python holds up nobody else's.

It reads Jobs from standard input and writes Mades to standard output, each MessagePack after its length in
four bytes, and ends when its input does.
"""

from __future__ import annotations

import os
import resource
import struct
import sys

import msgspec

from fourfold.errors import InvalidRequestError
from fourfold.grammar.sources import Kind, make_constraint
from fourfold.types import Constraint

MAX_MEMORY = 2 << 30
"""Bytes of address space; whoever needs more ends the process."""
NICENESS = 5
LENGTH = struct.Struct("<I")


class Job(msgspec.Struct, frozen=True):
    """See sources.make_constraint."""

    kind: Kind
    text: str
    param: str


class Made(msgspec.Struct, frozen=True):
    """error, code: of the InvalidRequestError that came of it instead of a constraint."""

    constraint: Constraint | None = None
    error: str = ""
    code: str | None = None


def do(job: Job) -> Made:
    try:
        return Made(make_constraint(job.kind, job.text, job.param))
    except InvalidRequestError as error:
        return Made(error=str(error), code=error.code)


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    os.nice(NICENESS)
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    while len(head := source.read(LENGTH.size)) == LENGTH.size:
        job = msgspec.msgpack.decode(source.read(LENGTH.unpack(head)[0]), type=Job)
        answer = msgspec.msgpack.encode(do(job))
        sink.write(LENGTH.pack(len(answer)) + answer)
        sink.flush()


if __name__ == "__main__":
    main()
