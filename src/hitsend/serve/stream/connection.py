"""One client's connection: uvicorn's HTTP protocol, with bounds where it has none.

Enters: bytes from the socket. Leaves: ASGI calls, by way of uvicorn. Always true: a connection that ends is told to
every request on it, whichever runs (uvicorn tells the one that was read last, and doesn't look at a connection at all
while a pipelined request waits on it); a request's head is bounded in bytes and in time; what a client sends ahead of
its answers is bounded, and dropped beyond that: the connection then closes after the answer that is on its way.
Next: `../usage/`.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 32 * 1024
"""Request line and headers together."""

HEAD_TIMEOUT_S = 20.0
"""From the first byte of a head (or the connection's start) to its end."""

MAX_AHEAD_BYTES = 64 * 1024
"""Unread bytes kept while earlier requests of the connection are answered."""

_HEAD_TOO_LARGE = (
    b'{"error":{"message":"the request line and headers have more than %d bytes","type":"invalid_request_error",'
    b'"param":null,"code":"invalid_request"}}' % MAX_HEAD_BYTES
)


class _HeadTooLarge(Exception):
    """Ends the parser."""


class Connection(HttpToolsProtocol):
    """Give it to `uvicorn.Config(http=...)`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._running: Any = None
        self._ahead = bytearray()
        self._ignores_more = False
        self._head_bytes = 0
        self._is_in_head = True
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client is there; from now on it has to hurry with its head."""
        super().connection_made(transport)  # type: ignore[arg-type]  # uvicorn narrows it for itself
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._close)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell everybody who still works for this client."""
        self._stop_timer()
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
        super().data_received(data)
        if self.pipeline:
            # uvicorn stops reading here, and nobody would see the connection end
            self.flow.resume_reading()
        if self._is_in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response("")

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        self._is_in_head, self._head_bytes = True, 0
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._close)

    def on_headers_complete(self) -> None:
        """A head is complete. Raises _HeadTooLarge, which ends the connection."""
        self._stop_timer()
        self._head_bytes = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if self._head_bytes > MAX_HEAD_BYTES:
            raise _HeadTooLarge
        self._is_in_head = False
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """What uvicorn answers to bytes that are no HTTP; 431 where there are just too many of them."""
        if self._head_bytes <= MAX_HEAD_BYTES:
            super().send_400_response(msg)
            return
        head = (
            b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\nconnection: close\r\n\r\n" % len(_HEAD_TOO_LARGE)
        )
        self.transport.write(head + _HEAD_TOO_LARGE)
        self._close()

    def on_response_complete(self) -> None:
        """Begin the next request that waits, or read what was sent ahead."""
        super().on_response_complete()
        if self._ahead and not self.pipeline:
            self.loop.call_soon(self._catch_up)

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

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
        if self._running is not None:
            self._running.keep_alive = False

    def _close(self) -> None:
        self.transport.close()

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
