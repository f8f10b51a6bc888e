"""The line to an upstream: connections that are kept, and the requests that go over them.

Enters: a body to post. Leaves: an `UpstreamAnswer` whose bytes are read as they come. Always true: the address comes
from the settings alone and is never left (no redirects, no proxies from the environment, no cookies); the key is sent
there and to nobody else, and is in no message of an error; nothing of the caller's headers goes along; closing an
answer closes its connection unless it was read to its end. Next: `openai.py`.
"""

import asyncio
import socket
import ssl
from collections import deque
from urllib.parse import urlsplit

from hitsend.core.errors import ConfigError
from hitsend.serve.engine.http1 import LineFailed, Wire

KEPT_ALIVE_S = 4.0
"""Shorter than what servers grant (uvicorn: 5 s), so that a connection is rarely closed just when it is used again."""
MAX_REFUSAL_BYTES = 64 * 1024
MAX_REFUSAL_S = 5.0
"""Its status is known: what it says besides isn't worth more of a client's time."""


class UpstreamAnswer:
    """A response whose head is there."""

    def __init__(self, wire: Wire, line: "UpstreamLine") -> None:
        self._wire = wire
        self._line = line
        self._is_closed = False
        self.status = wire.status
        self.headers = wire.headers

    @property
    def is_framed(self) -> bool:
        """Whether its end can't be taken for a cut, nor a cut for its end."""
        return self._wire.is_framed

    @property
    def content_type(self) -> str:
        """Without parameters, in lower case."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    async def read(self, *, is_patient: bool = False) -> bytes:
        """Whatever has come since the last time, b"" at the end; who `is_patient` waits for a lot or the end. Raises
        LineFailed."""
        if self._is_closed:
            return b""
        return await self._wire.read(is_patient=is_patient)

    def unread(self) -> bytes:
        """What has come and was read by nobody."""
        return b"" if self._is_closed else self._wire.unread()

    async def read_refusal(self) -> bytes:
        """A body of bounded size, as far as it comes in a bounded time; never fails. Cancelling it closes it."""
        body = b""
        try:
            async with asyncio.timeout(MAX_REFUSAL_S):
                while len(body) < MAX_REFUSAL_BYTES and (data := await self.read()):
                    body += data
        except (LineFailed, TimeoutError):
            pass
        except BaseException:
            self.close()
            raise
        return body[:MAX_REFUSAL_BYTES]

    async def read_whole(self, most_bytes: int) -> bytes | None:
        """All of a body, then closed; None where it is larger. Raises LineFailed."""
        parts: list[bytes] = []
        num_bytes = 0
        try:
            while data := await self.read():
                parts.append(data)
                num_bytes += len(data)
                if num_bytes > most_bytes:
                    return None
        finally:
            self.close()
        return b"".join(parts)

    def close(self) -> None:
        """Let go. What was read to its end gives its connection back, else the connection is closed at once."""
        if not self._is_closed:
            self._is_closed = True
            self._line.give_back(self._wire)


class UpstreamLine:
    """Connections to one address. `key` becomes a bearer token."""

    def __init__(self, base_url: str, key: str | None, *, connect_timeout_s: float, stall_timeout_s: float) -> None:
        url = urlsplit(_checked(base_url))
        self._host = url.hostname or ""
        self._port = url.port or (443 if url.scheme == "https" else 80)
        self._is_secret = url.scheme == "https"
        self._tls: ssl.SSLContext | None = None
        authorization = "" if key is None else f"authorization: Bearer {key}\r\n"
        self._path = url.path
        self._root = url.path.removesuffix("/v1")
        self._common = f"host: {url.netloc}\r\nuser-agent: hitsend\r\n{authorization}accept-encoding: identity\r\n"
        self._head = f"{self._common}content-type: application/json\r\naccept: text/event-stream\r\ncontent-length: "
        self._connect_timeout_s = connect_timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._idle: deque[Wire] = deque()
        self._sweeping: asyncio.TimerHandle | None = None
        self._is_stopped = False

    def start(self) -> None:
        """Get ready. Connects to nothing yet."""
        if self._is_secret:
            self._tls = ssl.create_default_context()
            self._tls.set_alpn_protocols(["http/1.1"])

    async def stop(self) -> None:
        """Close what nobody uses, and from now on what is given back. Safe to call twice."""
        self._is_stopped = True
        if self._sweeping is not None:
            self._sweeping.cancel()
        while self._idle:
            self._idle.pop().close()

    async def post(
        self, path: str, body: bytes, traceparent: str | None = None, *, headers: str = ""
    ) -> UpstreamAnswer:
        """Send, and wait for the answer's head. `headers`: further lines, each ended.

        A path that begins with a slash counts from the address without its `/v1`, another one from the address. Raises
        LineFailed. Cancelling it closes the connection.
        """
        trace = "" if traceparent is None else f"traceparent: {traceparent}\r\n"
        head = f"POST {self._at(path)} HTTP/1.1\r\n{self._head}{len(body)}\r\n{trace}{headers}\r\n"
        return await self._send(head.encode() + body)

    async def get(self, path: str) -> UpstreamAnswer:
        """The same without a body."""
        return await self._send(f"GET {self._at(path)} HTTP/1.1\r\n{self._common}accept: */*\r\n\r\n".encode())

    def _at(self, path: str) -> str:
        return f"{self._root}{path}" if path.startswith("/") else f"{self._path}/{path}"

    async def _send(self, message: bytes) -> UpstreamAnswer:
        wire = self._kept() or await self._connect()
        try:
            await wire.post(message)
        except BaseException:
            wire.close()
            raise
        return UpstreamAnswer(wire, self)

    def give_back(self, wire: Wire) -> None:
        """Keep it for the next request, if it can have one."""
        if self._is_stopped or not wire.may_be_used_again:
            wire.close()
            return
        loop = asyncio.get_running_loop()
        wire.idle_since = loop.time()
        self._idle.append(wire)
        if self._sweeping is None:
            self._sweeping = loop.call_later(KEPT_ALIVE_S, self._sweep)

    def _kept(self) -> Wire | None:
        """The one that was used last."""
        oldest = asyncio.get_running_loop().time() - KEPT_ALIVE_S
        while self._idle:
            wire = self._idle.pop()
            if wire.may_be_used_again and wire.idle_since > oldest and wire.is_quiet:
                return wire
            wire.close()
        return None

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        while self._idle and self._idle[0].idle_since <= loop.time() - KEPT_ALIVE_S:
            self._idle.popleft().close()
        self._sweeping = loop.call_later(KEPT_ALIVE_S, self._sweep) if self._idle else None

    async def _connect(self) -> Wire:
        loop, name = asyncio.get_running_loop(), self._host if self._tls is not None else None
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, wire = await loop.create_connection(
                    lambda: Wire(self._stall_timeout_s), self._host, self._port, ssl=self._tls, server_hostname=name
                )
        except TimeoutError as error:
            text = "the upstream could not be reached in time"
            raise LineFailed(text, is_unanswered=True, is_timeout=True) from error
        except OSError as error:
            raise LineFailed(f"the upstream can't be reached{_why(error)}", is_unanswered=True) from error
        return wire


def _why(error: OSError) -> str:
    """As far as it is known, and without the address, which is no client's business."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f": its certificate isn't trusted (verify code {error.verify_code})"
    if isinstance(error, ssl.SSLError):
        return ": it speaks no TLS there, or none that is known here"
    if isinstance(error, socket.gaierror):
        return ": its name has no address"
    return ": nobody listens there" if isinstance(error, ConnectionRefusedError) else ""


def _checked(base_url: str) -> str:
    """Raises ConfigError for anything but plain http(s)://host[:port]/path."""
    try:
        url = urlsplit(base_url)
        is_plain = url.scheme in ("http", "https") and bool(url.hostname) and "@" not in url.netloc
        is_plain = is_plain and url.port != 0 and not (url.query or url.fragment)
    except ValueError:
        is_plain = False
    if not is_plain or "\\" in base_url or not base_url.isascii() or not base_url.isprintable() or " " in base_url:
        raise ConfigError("base_url: expected http(s)://host[:port]/v1, without user, password, query or #")
    return base_url.rstrip("/")
