"""One HTTP request and the answer to it on the wire: uvicorn's, with a shorter way for an answer's head and its pieces.

Enters: ASGI messages. Leaves: bytes for the socket. Always true: no header's value can begin a line of its own, nor
hold another control character; a head leaves together with what is sent next, in one write, so that its reader is woken
once; what isn't the usual case is left to uvicorn. Next: `connection.py`.
"""

from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

_CONTROLS = bytes(code for code in (*range(0x20), 0x7F) if code not in b"\t\r\n")
_UNUSUAL = frozenset((b"connection", b"transfer-encoding"))
"""Headers that say how the answer is sent: only some refusals have one."""


class Cycle(RequestResponseCycle):
    """uvicorn looks at each name and each value by itself, with two regular expressions; an answer here has up to
    twenty headers, and their names are ours, in lower case. All values are looked at together."""

    _head = b""

    async def send(self, message: Any) -> None:
        """ASGI's."""
        if self.response_started and message.get("more_body") and self._may_write_on():
            if body := message.get("body"):
                self.transport.write(b"%b%x\r\n%b\r\n" % (self._taken_head(), len(body), body))
            return
        if (head := self._taken_head()) and not self.disconnected:
            self.transport.write(head)
        is_busy = self.response_started or self.disconnected or self.flow.write_paused
        if is_busy or message["type"] != "http.response.start":
            await super().send(message)
            return
        headers = [*self.default_headers, *message.get("headers", ())]
        names = dict(headers)
        if not _UNUSUAL.isdisjoint(names):
            await super().send(message)
            return
        self.response_started = True
        self.waiting_for_100_continue = False
        status, length = message["status"], names.get(b"content-length")
        lines = [b"%s: %s\r\n" % header for header in headers]
        if length is not None:
            self.expected_content_length = int(length)
        self.chunked_encoding = length is None and self.scope["method"] != "HEAD" and status not in (204, 304)
        if self.chunked_encoding:
            lines.append(b"transfer-encoding: chunked\r\n")
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        head = b"".join(lines)
        if (
            head.count(b"\n") != len(lines)
            or head.count(b"\r") != len(lines)
            or head.translate(None, _CONTROLS) != head
        ):
            raise RuntimeError("a header with a line's end or another control character in its value")
        self._head = STATUS_LINE[status] + head + b"\r\n"

    def _taken_head(self) -> bytes:
        """What still has to be written before anything else; it isn't there a second time."""
        head, self._head = self._head, b""
        return head

    def _may_write_on(self) -> bool:
        """Whether the next piece of an answer of unknown length can go out as it is."""
        return bool(self.chunked_encoding) and not (
            self.flow.write_paused or self.disconnected or self.response_complete
        )
