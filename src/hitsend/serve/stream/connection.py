"""One client's connection: uvicorn's HTTP protocol, with bounds where it has none.

Enters: bytes from the socket. Leaves: ASGI calls, by way of uvicorn. Always true: a connection that ends is told to
every request on it, whichever runs (uvicorn tells the one that was read last, and doesn't look at a connection at all
while a pipelined request waits on it); a request's head is bounded in bytes and in time, and what comes of a body
after its answer in time; what a client sends ahead of its answers is bounded, and dropped beyond that: the connection
then closes after the answer that is on its way. No request gets two answers, and no answer another request's place:
bytes that are no HTTP are answered only where nothing else is due, and close the connection in any case.
Next: `../usage/`.
"""

import asyncio
import secrets
import socket
from typing import Any, Literal
from urllib.parse import unquote

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from hitsend.serve.stream.cycle import Cycle
from hitsend.serve.stream.doors import LINGER_S, MOST_LINGERING, Doors

MAX_HEAD_BYTES = 32 * 1024
"""Request line and headers together."""

HEAD_TIMEOUT_S = 20.0
"""From the first byte of a head (or the connection's start) to its end. A body whose request was answered before it
came has the same time to end, and the next head with it."""

UNREAD_TIMEOUT_S = 300.0
"""How long the kernel keeps what a client doesn't take. `stream.stall_s` ends streams long before; this is for answers
that nobody watches, whose client would keep its connection by never reading."""

MAX_AHEAD_BYTES = 64 * 1024
"""Unread bytes kept while earlier requests of the connection are answered."""

_STATUSES = {
    400: (b"Bad Request", b"invalid_request", b"the bytes are no HTTP/1.1 request"),
    408: (b"Request Timeout", b"request_timeout", b"the head did not arrive within %d s" % HEAD_TIMEOUT_S),
    431: (
        b"Request Header Fields Too Large",
        b"invalid_request",
        b"the request line and headers have more than %d bytes" % MAX_HEAD_BYTES,
    ),
    503: (
        b"Service Unavailable",
        b"server_overloaded",
        b"too many connections are open (server.max_connections, server.max_connections_per_address)",
    ),
}
_OF_BODIES = (b"content-length", b"transfer-encoding")
_NO_UPGRADES = b"upgrade: only HTTP/1.1 is spoken here; a request with a body has to be sent without that header"


class _Refused(Exception):
    """Ends the parser at a head after which it isn't sure where the request ends, or that is too large."""


class Connection(HttpToolsProtocol):
    """Give it to `uvicorn.Config(http=...)`."""

    head_timeout_s = HEAD_TIMEOUT_S
    unread_timeout_s = UNREAD_TIMEOUT_S

    def __init__(self, *args: Any, doors: Doors | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._doors = doors
        self._entered: str | None = None
        self._is_extra = self._is_unwelcome = False
        self._running: Any = None
        self._ahead = bytearray()
        self._ignores_more = False
        self._place: Literal["between", "head", "body"] = "between"
        self._num_begun = 0
        self._head_bytes = 0
        self._why = b""
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client is there; from now on it has to hurry with its head."""
        super().connection_made(transport)  # type: ignore[arg-type]  # uvicorn narrows it for itself
        if self._doors is not None and not self._enter(self._doors):
            return
        self._start_timer()
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # on Linux
            line = transport.get_extra_info("socket")
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * self.unread_timeout_s))

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell everybody who still works for this client."""
        self._stop_timer()
        if self._doors is not None and self._entered is not None:
            self._doors.leave(self._entered)
            self._entered = None
        super().connection_lost(exc)
        for cycle in (self._running, *(waiting for waiting, _ in self.pipeline)):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self.pipeline.clear()
        self._ahead.clear()

    def data_received(self, data: bytes) -> None:
        """Read on, or keep it for when its turn comes."""
        if self._ignores_more:
            return
        if self.pipeline or self._ahead:
            self._ahead += data
            if len(self._ahead) > MAX_AHEAD_BYTES:
                self._drop_what_is_ahead()
            return
        if not self._is_answering:
            self._start_timer()
        place, num_begun = self._place, self._num_begun
        super().data_received(data)
        if self.pipeline:
            # uvicorn stops reading here, and nobody would see the connection end
            self.flow.resume_reading()
        # a read that holds the end of another message says nothing about the length of the head that follows it
        is_all_head = self._num_begun == num_begun + (place == "between") and place != "body"
        if self._place == "head" and is_all_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.send_400_response("")

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        self._place, self._head_bytes = "head", 0
        self._num_begun += 1
        self._start_timer()

    def on_headers_complete(self) -> None:
        """A head is complete. Raises what ends the connection."""
        self._stop_timer()
        self._head_bytes = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        self._why = self._doubt()
        self._is_unwelcome = self._is_extra and self._doors is not None and not self._doors.may_pass(self.url)
        if self._why or self._head_bytes > MAX_HEAD_BYTES or self._is_unwelcome:
            raise _Refused
        self._place = "body"
        self._begin()

    def _begin(self) -> None:
        """As uvicorn does, with a cycle of our own: start it, or let it wait for those before it."""
        version, url = self.parser.get_http_version(), httptools.parse_url(self.url)
        path = url.path.decode("ascii")
        self.scope |= {
            "method": self.parser.get_method().decode("ascii"),
            "http_version": version,
            "path": unquote(path) if "%" in path else path,
            "raw_path": url.path,
            "query_string": url.query or b"",
        }
        before: Any = self.cycle
        self.cycle = self._cycle(keep_alive=version != "1.0" and self.parser.should_keep_alive())
        if before is None or before.response_complete:
            self._start_asgi_task(self.cycle, self.app)
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, self.app))

    def _cycle(self, *, keep_alive: bool) -> Cycle:
        return Cycle(
            scope=self.scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=self.expect_100_continue,
            keep_alive=keep_alive,
            on_response=self.on_response_complete,
        )

    def on_message_complete(self) -> None:
        """A request is complete."""
        super().on_message_complete()
        self._place = "between"

    def send_400_response(self, _msg: str) -> None:
        """What is answered to bytes that are no HTTP, or too many: nothing, where an answer is out or under way."""
        running, is_in_body = self._running, self._place == "body"
        if self._is_answering and not (is_in_body and running.more_body):
            self._drop_what_is_ahead()  # the request before it is whole, and its answer comes first
        elif is_in_body and running is not None and running.response_started:
            self._close()  # the rest of a body whose answer needed none of it
        else:
            self._refuse(431 if self._head_bytes > MAX_HEAD_BYTES else 503 if self._is_unwelcome else 400)

    def on_response_complete(self) -> None:
        """Begin the next request that waits, or read what was sent ahead."""
        super().on_response_complete()
        if self._ahead and not self.pipeline:
            self.loop.call_soon(self._catch_up)

    @property
    def _is_answering(self) -> bool:
        return self._running is not None and not self._running.response_complete

    def _doubt(self) -> bytes:
        """Why another reader of the same bytes might see another request in them; empty where none would."""
        version = self.parser.get_http_version()
        codings = [value.strip().lower() for name, value in self.headers if name == b"transfer-encoding"]
        if version not in ("1.1", "1.0"):
            return b"only HTTP/1.1 and HTTP/1.0 are spoken here"
        if codings and (codings != [b"chunked"] or version == "1.0"):
            return b"transfer-encoding: only chunked is read, and only in HTTP/1.1"
        has_body = any(name in _OF_BODIES and value != b"0" for name, value in self.headers)
        # the parser would take the body for another protocol, and what comes after it for another request
        return _NO_UPGRADES if has_body and self.parser.should_upgrade() else b""

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _unsupported_upgrade_warning(self) -> None:
        """The request is answered as if it hadn't asked; what follows it isn't HTTP, or not for certain."""
        self._drop_what_is_ahead()

    def _catch_up(self) -> None:
        if self.transport.is_closing() or self.pipeline:
            return
        data = bytes(self._ahead)
        self._ahead.clear()
        self.data_received(data)

    def _drop_what_is_ahead(self) -> None:
        self._ignores_more = True
        self.pipeline.clear()
        self._ahead.clear()
        self._stop_timer()
        self.flow.resume_reading()  # or nobody would see the connection end
        if self._running is not None:
            self._running.keep_alive = False
        if not self._is_answering:
            self._close()

    def _refuse(self, status: int, *, is_over: bool = True) -> None:
        """The only answers that aren't given by `routes.py`, with the same headers and in the same form."""
        phrase, code, message = _STATUSES[status]
        body = b'{"error":{"message":"%s","type":"%s","param":null,"code":"%s"}}' % (
            self._why or message,
            b"server_error" if status == 503 else b"invalid_request_error",
            code,
        )
        more = b"retry-after: 1\r\n" if status == 503 else b""
        request_id = f"req_{secrets.token_hex(12)}".encode()
        head = (
            b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nx-request-id: %s\r\n"
            b"%sconnection: close\r\n\r\n" % (status, phrase, len(body), request_id, more)
        )
        self.transport.write(head + body)
        if is_over:
            self._close()

    def _end_waiting(self) -> None:
        self._head_timer = None
        if self._is_answering:
            self._drop_what_is_ahead()
        elif self._place == "head":
            self._refuse(408)
        else:
            self._close()

    def _enter(self, doors: Doors) -> bool:
        """Whether there is room. If not, the client is told, may read that for a moment, and is let go."""
        address = self.client[0] if self.client else ""
        place = doors.enter(address)
        self._is_extra = place == "extra"
        if place != "refused":
            self._entered = address
            return True
        self._ignores_more = True
        if doors.num_lingering >= MOST_LINGERING:
            self._refuse(503)
            return False
        doors.num_lingering += 1
        self._refuse(503, is_over=False)
        self.transport.write_eof()  # closed at once, its request would lie unread, and the answer be lost with it
        self.loop.call_later(LINGER_S, self._end_linger, doors)
        return False

    def _end_linger(self, doors: Doors) -> None:
        doors.num_lingering -= 1
        self._close()

    def _close(self) -> None:
        self.transport.close()

    def _start_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_timeout_s, self._end_waiting)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
