"""The client's side of the HTTP API, as far as the commands need it.

Enters: a server's address and perhaps a key. Leaves: JSON values and pieces of answers. Always true: what goes wrong is
a `CallFailed` with one line for a person, leaving the `async with` closes the connection (which cancels what runs on
the server), and the key is sent to that one address only. Next: `send.py`.
"""

import json
import os
from collections.abc import AsyncGenerator, AsyncIterator
from types import TracebackType
from typing import Any, Self

import aiohttp

from hitsend.cli import CallFailed


class Client:
    """One server, spoken to over one session."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")  # OpenAI's clients are given one that ends so
        self.request_id: str | None = None
        """Of the last chat, from the answer's header."""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5)
        # force_close: a dropped connection is then seen by the server at once
        self._session = aiohttp.ClientSession(
            headers=headers, timeout=timeout, connector=aiohttp.TCPConnector(force_close=True)
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._session.close()

    async def answers(self) -> bool:
        """Whether a server is there at all, healthy or not."""
        try:
            async with self._session.get(f"{self.url}/healthz", allow_redirects=False) as response:
                await response.read()
        except (aiohttp.ClientError, TimeoutError):
            return False
        return True

    async def get(self, path: str) -> Any:
        """A JSON document. Raises CallFailed."""
        try:
            async with self._session.get(self.url + path, allow_redirects=False) as response:
                return await self._json(response)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._unreachable(error) from error

    async def chat(self, body: dict[str, Any]) -> Any:
        """A whole completion. Raises CallFailed."""
        return await self.post("/v1/chat/completions", body)

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON document that answers a JSON document. Raises CallFailed."""
        try:
            async with self._session.post(self.url + path, json=body, allow_redirects=False) as response:
                self.request_id = response.headers.get("x-request-id")
                return await self._json(response)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._unreachable(error) from error

    async def chat_chunks(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        """A streamed completion's chunks, up to `[DONE]`. Raises CallFailed, also for an error frame in mid-stream."""
        try:
            async with self._session.post(f"{self.url}/v1/chat/completions", json=body | {"stream": True}) as response:
                self.request_id = response.headers.get("x-request-id")
                if response.status != 200:
                    await self._json(response)
                async for data in _events(response.content.iter_any()):
                    if data == "[DONE]":
                        return
                    chunk = json.loads(data)
                    if "error" in chunk:
                        raise _refused(chunk, "the answer broke off")
                    yield chunk
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._unreachable(error) from error
        raise CallFailed("the answer broke off before its end")

    async def _json(self, response: aiohttp.ClientResponse) -> Any:
        text = await response.text("utf-8")
        try:
            document = json.loads(text)
        except ValueError as error:
            raise CallFailed(f"{self.url} answered {response.status} without JSON: is it hitsend?") from error
        if response.status != 200:
            raise _refused(document, f"{self.url} answered {response.status}")
        return document

    def _unreachable(self, error: BaseException) -> CallFailed:
        if isinstance(error, aiohttp.InvalidURL | aiohttp.NonHttpUrlClientError):
            return CallFailed(f"{self.url} is no address of a server, which is like http://127.0.0.1:8000")
        if isinstance(error, aiohttp.ClientConnectorError):
            return CallFailed(f"no server at {self.url} ({os.strerror(error.errno or 0)}); `hitsend serve` starts one")
        reason = "no answer in time" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
        return CallFailed(f"{self.url} broke off: {reason}")


def _refused(document: Any, otherwise: str) -> CallFailed:
    error = document.get("error") if isinstance(document, dict) else None
    if not isinstance(error, dict):
        return CallFailed(otherwise)
    where = f" ({error['param']})" if error.get("param") else ""
    return CallFailed(f"{error.get('code')}: {error.get('message')}{where}")


async def _events(pieces: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """The `data:` fields of server-sent events, however the bytes were cut; comments (pings) are dropped."""
    buffer = b""
    async for piece in pieces:
        *lines, buffer = (buffer + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip().decode("utf-8")
