"""The line to an upstream: HTTP as a client. The only file of the server that knows aiohttp.

Enters: a body to post. Leaves: an `UpstreamAnswer` whose bytes are read as they come. Always true: the address comes
from the settings alone and is never left (no redirects, no proxies from the environment, no cookies); the key is sent
there and to nobody else, and is in no message of an error; nothing of the caller's headers goes along; closing an
answer closes its connection unless it was read to its end. Next: `openai.py`.
"""

from urllib.parse import urlsplit

import aiohttp

from hitsend.core.errors import ConfigError

MAX_CONNECTIONS = 4096
KEPT_ALIVE_S = 4.0
"""Shorter than what servers grant (uvicorn: 5 s), so that a connection is rarely closed just when it is used again."""
MAX_REFUSAL_BYTES = 64 * 1024
_READ_BYTES = 256 * 1024


class LineFailed(Exception):
    """No answer, or no end of it. `is_unanswered`: not one byte had come; `is_timeout`: it was silent for too long."""

    def __init__(self, what: str, *, is_unanswered: bool = False, is_timeout: bool = False) -> None:
        super().__init__(what)
        self.is_unanswered = is_unanswered
        self.is_timeout = is_timeout


class UpstreamAnswer:
    """A response whose head is there."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status
        self.headers = response.headers

    @property
    def content_type(self) -> str:
        """Without parameters, in lower case."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    async def read(self) -> bytes:
        """Whatever has come since the last time, b"" at the end. Raises LineFailed."""
        try:
            return await self._response.content.readany()
        except TimeoutError as error:
            raise LineFailed("the upstream fell silent", is_timeout=True) from error
        except aiohttp.ClientError as error:
            raise LineFailed("the upstream's connection broke") from error

    async def read_refusal(self) -> bytes:
        """A body of bounded size, as far as it comes; never fails."""
        body = b""
        try:
            while len(body) < MAX_REFUSAL_BYTES and (data := await self.read()):
                body += data
        except LineFailed:
            pass
        return body[:MAX_REFUSAL_BYTES]

    def close(self) -> None:
        """Let go. What was read to its end gives its connection back, else the connection is closed at once."""
        if self._response.content.is_eof():
            self._response.release()
        else:
            self._response.close()


class UpstreamLine:
    """Connections to one address. `key` becomes a bearer token."""

    def __init__(self, base_url: str, key: str | None, *, connect_timeout_s: float, stall_timeout_s: float) -> None:
        self._url = _checked(base_url)
        headers = {"content-type": "application/json", "accept": "text/event-stream", "accept-encoding": "identity"}
        if key is not None:
            headers["authorization"] = f"Bearer {key}"
        self._headers = headers
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s, sock_read=stall_timeout_s)
        self._session: aiohttp.ClientSession | None = None

    def start(self) -> None:
        """Needs a running event loop. Connects to nothing yet."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=MAX_CONNECTIONS, keepalive_timeout=KEPT_ALIVE_S),
            headers=self._headers,
            timeout=self._timeout,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,
            read_bufsize=_READ_BYTES,
        )

    async def stop(self) -> None:
        """Close all connections. Safe to call twice."""
        if self._session is not None:
            await self._session.close()

    async def post(self, path: str, body: bytes) -> UpstreamAnswer:
        """Send, and wait for the answer's head. Raises LineFailed. Cancelling it closes the connection."""
        assert self._session is not None
        try:
            response = await self._session.post(f"{self._url}/{path}", data=body, allow_redirects=False)
        except TimeoutError as error:
            is_connecting = isinstance(error, aiohttp.ConnectionTimeoutError)
            raise LineFailed(
                "the upstream could not be reached in time" if is_connecting else "the upstream did not answer in time",
                is_unanswered=is_connecting,
                is_timeout=True,
            ) from error
        except aiohttp.ClientConnectorError as error:
            raise LineFailed("the upstream can't be reached", is_unanswered=True) from error
        except (aiohttp.ClientError, OSError) as error:
            raise LineFailed("the upstream closed the connection without an answer", is_unanswered=True) from error
        return UpstreamAnswer(response)


def _checked(base_url: str) -> str:
    """Raises ConfigError for anything but plain http(s)://host[:port]/path."""
    try:
        url = urlsplit(base_url)
        is_plain = url.scheme in ("http", "https") and bool(url.hostname) and "@" not in url.netloc
        is_plain = is_plain and url.port != 0 and not (url.query or url.fragment)
    except ValueError:
        is_plain = False
    if not is_plain or "\\" in base_url or not base_url.isascii() or not base_url.isprintable() or " " in base_url:
        raise ConfigError("engines.base_url: expected http(s)://host[:port]/v1, without user, password, query or #")
    return base_url.rstrip("/")
