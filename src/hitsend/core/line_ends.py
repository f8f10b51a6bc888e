"""The line ends of an event stream.

Enters: bytes, cut anywhere. Leaves: the same with LF at each line's end. Always true: LF, CRLF and CR alone
end a line each (WHATWG's HTML, "Parsing an event stream"), also where a CRLF is cut in two. Next: `../load/sse.py`.
"""


class LineEnds:
    """Of one stream."""

    def __init__(self) -> None:
        self._is_after_cr = False

    def feed(self, data: bytes) -> bytes:
        """What came, with its lines ended alike."""
        if self._is_after_cr and data:
            data, self._is_after_cr = data.removeprefix(b"\n"), False
        if b"\r" in data:
            self._is_after_cr = data.endswith(b"\r")
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        return data
