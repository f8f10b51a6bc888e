"""The least that a gateway can be: uvicorn in front, aiohttp behind, bytes through. No keys, no limits, no ledger.

Usage: python -m bench.edge.forwarder PORT UPSTREAM_URL
"""

import sys
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import uvicorn

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class Forwarder:
    """One ASGI application."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._session: aiohttp.ClientSession | None = None

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """Pass one request on, and its answer back."""
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), auto_decompress=False)
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        headers = {"content-type": "application/json"}
        async with self._session.post(self._url + scope["path"], data=body, headers=headers) as answer:
            kept = [(b"content-type", answer.headers["content-type"].encode())]
            if "content-length" in answer.headers:
                kept.append((b"content-length", answer.headers["content-length"].encode()))
            await send({"type": "http.response.start", "status": answer.status, "headers": kept})
            async for data in answer.content.iter_any():
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


if __name__ == "__main__":
    uvicorn.run(
        Forwarder(sys.argv[2]), host="127.0.0.1", port=int(sys.argv[1]), log_level="error", lifespan="off", ws="none"
    )
