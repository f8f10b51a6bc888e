"""One connection to an upstream: HTTP/1.1 as a client, over httptools' parser.

Enters: a request's bytes. Leaves: the answer's status, headers and body as they come. Always true: one request at a
time; while more than `MOST_UNREAD` bytes wait to be taken nothing more is read from the socket; a body with a length
that ends before it is a failure, one without ends with its connection; a connection is used again only after an answer
that came whole, wanted to be followed, and left nothing behind it; silence counts only while somebody waits for bytes.
Next: `upstream.py`.
"""

import asyncio
import select
from typing import Any

import httptools

MOST_UNREAD = 256 * 1024
MAX_HEAD_BYTES = 64 * 1024
"""Of an answer, before its body: status lines and headers together."""


_DONE = b"[DONE]"
_SAID = {"no HTTP": "sent what is no HTTP", "long head": "sent more headers than are read"}


class LineFailed(Exception):
    """No answer, or no end of it. `is_unanswered`: its head never came whole; `is_timeout`: it was silent too long."""

    def __init__(self, what: str, *, is_unanswered: bool = False, is_timeout: bool = False) -> None:
        super().__init__(what)
        self.is_unanswered = is_unanswered
        self.is_timeout = is_timeout


class _Unasked(Exception):
    """Ends the parser before an answer that nobody waits for."""


class Wire(asyncio.Protocol):
    """`post`, then `read` until b""; then both again, if `may_be_used_again`. `status` and `headers` (lower-case names)
    are the answer's."""

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._loop = asyncio.get_running_loop()
        self._transport: Any = None
        self._parser: Any = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._silent_since = 0.0
        self._is_silent = False
        self._unread: list[bytes] = []
        self.on_body = self._unread.append
        """httptools: a piece of the body. The list's own function, because a stream has one for each of its events."""
        self._num_unread = 0
        self._is_patient = False
        self._num_head = self._num_headers = 0
        self._has_head = False
        self._is_whole = True
        self._ends_with_connection = False
        self._may_follow = True
        self._is_paused = False
        self._fault: str | None = None
        self.status = 0
        self.headers: dict[str, str] = {}
        self.idle_since = 0.0

    @property
    def may_be_used_again(self) -> bool:
        """Whether another request can be sent on it."""
        return self._is_whole and self._may_follow and self._fault is None and not self._unread

    @property
    def is_framed(self) -> bool:
        """Whether the answer itself says where it ends, and not only its connection."""
        return not self._ends_with_connection

    @property
    def is_quiet(self) -> bool:
        """Whether nothing waits in its socket: bytes that nobody asked for, or an end that the loop hasn't read yet."""
        waiting = select.poll()
        waiting.register(self._transport.get_extra_info("socket").fileno(), select.POLLIN)
        return not waiting.poll(0)

    async def post(self, message: bytes) -> None:
        """Send it, and wait for the answer's head. Raises LineFailed."""
        self._parser = httptools.HttpResponseParser(self)
        self._is_whole = self._has_head = self._ends_with_connection = False
        self._num_head = self._num_headers = self._num_unread = self.status = 0
        self.headers = {}
        self._is_patient = False
        if self._fault is None:
            self._transport.write(message)
        while not self._has_head:
            if self._fault is not None:
                text = f"the upstream {_SAID.get(self._fault, 'closed the connection without an answer')}"
                raise LineFailed(text, is_unanswered=True)
            await self._wait("the upstream did not answer in time")

    async def read(self, *, is_patient: bool = False) -> bytes:
        """What has come since the last time, b"" at the answer's end. Raises LineFailed.

        Who `is_patient` is woken when the answer is whole or says [DONE] (some leave the connection open behind that),
        or as much has come as is kept, and not by every piece.
        """
        self._is_patient = is_patient
        while not self._unread or not self._is_enough:
            if self._is_whole:
                return b""
            if self._fault is not None:
                raise LineFailed("the upstream's connection broke")
            await self._wait("the upstream fell silent")
        data = self.unread()
        if self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()
        return data

    def unread(self) -> bytes:
        """What has come since the last `read`; it isn't there a second time."""
        data = self._unread[0] if len(self._unread) == 1 else b"".join(self._unread)
        self._unread.clear()
        self._num_unread = 0
        return data

    @property
    def _is_enough(self) -> bool:
        """Whether who waits wants what there is."""
        if not self._is_patient or self._is_whole or self._fault is not None or self._num_unread > MOST_UNREAD:
            return True
        return _DONE in b"".join(self._unread[-2:])

    def close(self) -> None:
        """At once; whoever reads is told that it broke."""
        self._break("closed")

    async def _wait(self, silence: str) -> None:
        """Until something has happened. Raises LineFailed after `stall_s` without."""
        self._silent_since = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_at(self._silent_since + self._stall_s, self._on_timer)
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
        if self._is_silent:
            raise LineFailed(silence, is_timeout=True)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _on_timer(self) -> None:
        """One timer for many waits: it looks when the last one began, and comes back when that is due."""
        self._timer = None
        if self._waiter is None:
            return
        due = self._silent_since + self._stall_s
        if self._loop.time() < due:
            self._timer = self._loop.call_at(due, self._on_timer)
            return
        self._is_silent = True
        self._break("silent")

    def _break(self, fault: str) -> None:
        if self._fault is None:
            self._fault = fault
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._transport is not None:
            self._transport.abort()
        self._wake()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: connected."""
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio: it is over, which may be how the answer ends."""
        if self._has_head and self._ends_with_connection and exc is None and self._fault is None:
            self._is_whole = True
        self._break("lost")

    def data_received(self, data: bytes) -> None:
        """asyncio: bytes."""
        if self._is_whole:  # nobody asked
            self._break("unasked bytes")
            return
        if not self._has_head:
            self._num_head += len(data)
        self._num_unread += len(data)
        self._silent_since = self._loop.time()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._break("no HTTP")
            return
        if not self._has_head and self._num_head > MAX_HEAD_BYTES:
            self._break("long head")
        elif self._num_unread > MOST_UNREAD and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()
        if self._has_head and self._is_enough:
            self._wake()

    def on_message_begin(self) -> None:
        """httptools: an answer begins; behind a whole one, none was asked for. Raises then, so that none is read."""
        if self._is_whole:
            raise _Unasked

    def on_header(self, name: bytes, value: bytes) -> None:
        """httptools: of several of one name, the first counts."""
        self._num_headers += len(name) + len(value)
        if not self._is_whole:
            self.headers.setdefault(name.decode("latin-1").lower(), value.decode("latin-1"))

    def on_headers_complete(self) -> None:
        """httptools: a head is there; 1xx only announces another one."""
        if self._is_whole:
            return
        if self._num_headers > MAX_HEAD_BYTES:  # it came in one piece
            self._break("long head")
            return
        status = self._parser.get_status_code()
        if 100 <= status < 200:
            self.headers = {}
            return
        self.status = status
        self._may_follow = self._parser.should_keep_alive()
        is_chunked = "chunked" in self.headers.get("transfer-encoding", "").lower()  # `identity` isn't
        self._ends_with_connection = not (is_chunked or "content-length" in self.headers)
        self._has_head = True

    def on_message_complete(self) -> None:
        """httptools: the answer is whole."""
        self._is_whole = self._is_whole or self._has_head
