"""Server-sent events, from bytes cut anywhere (HTML Standard, section 9.2.6)."""

from __future__ import annotations


class EventParser:
    """Feed it bytes; it returns the data of every event that became complete.

    Lines end with LF, CRLF or CR. Lines of data are joined by LF; comments and other fields are skipped.
    """

    __slots__ = ("_buffer", "_data", "_skip_lf")

    def __init__(self) -> None:
        self._buffer = b""
        self._data: list[bytes] = []
        self._skip_lf = False

    def feed(self, chunk: bytes) -> list[bytes]:
        """Data of the events that end in this chunk, in order."""
        if self._skip_lf and chunk:  # the second half of a CRLF that was cut in two
            self._skip_lf = False
            chunk = chunk.removeprefix(b"\n")
        self._buffer += chunk
        if self._buffer.endswith(b"\r"):
            self._skip_lf = True
        *lines, self._buffer = self._buffer.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        events = []
        for line in lines:
            if line:
                field, _, value = line.partition(b":")
                if field == b"data":
                    self._data.append(value.removeprefix(b" "))
            elif self._data:
                events.append(b"\n".join(self._data))
                self._data.clear()
        return events
