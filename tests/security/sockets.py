"""Raw bytes to the server's real HTTP stack, over loopback sockets, with a scripted pipeline behind the routes."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from hitsend.serve.listener import server_of
from hitsend.serve.stream.connection import Connection
from hitsend.settings import Settings

BATCH = 64
BATCH_BYTES = 30_000


class Plain:
    """Any ASGI application in the place of the routes; none of it lasts until the server stops."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._app(scope, receive, send)

    def stop(self) -> None:
        """Nothing to end."""


@asynccontextmanager
async def serving(app: Any, protocol: type[Connection] = Connection) -> AsyncIterator[int]:
    """The routes behind the server as `listener.py` sets it up; the port."""
    listening = socket.create_server(("127.0.0.1", 0))
    server = server_of(app if hasattr(app, "stop") else Plain(app), Settings(), lambda: None, takes_signals=False)
    server.config.http = protocol
    running = asyncio.create_task(server.serve(sockets=[listening]))
    async with asyncio.timeout(10):
        while not server.started:
            await asyncio.sleep(0.005)
    try:
        yield listening.getsockname()[1]
    finally:
        server.should_exit = True
        await running
        listening.close()


class Answer:
    """One answer as it came: status, headers (lower case, in order) and body."""

    def __init__(self, raw: bytes) -> None:
        head, _, self.body = raw.partition(b"\r\n\r\n")
        first, *lines = head.split(b"\r\n")
        self.version, status, *_ = first.split(b" ")
        self.status = int(status)
        self.headers = [tuple(part.strip() for part in line.split(b":", 1)) for line in lines]
        self.head = head

    def header(self, name: bytes) -> bytes | None:
        """The header, which may be there once."""
        found = [value for key, value in self.headers if key.lower() == name]
        assert len(found) <= 1, found
        return found[0] if found else None


def answers(raw: bytes) -> list[Answer]:
    """All that came over one connection, cut where a strict client cuts it. Fails on anything left over."""
    found = []
    while raw:
        answer = Answer(raw)
        length = answer.header(b"content-length")
        assert length is not None, raw[:200]
        answer.body, raw = answer.body[: int(length)], answer.body[int(length) :]
        assert len(answer.body) == int(length), "cut short"
        found.append(answer)
    return found


async def say(port: int, *pieces: bytes, pause_s: float = 0.0) -> bytes:
    """Send the pieces; all that comes back until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(pause_s)
        return await reader.read()
    finally:
        writer.close()


async def say_all(port: int, requests: list[bytes]) -> list[Answer]:
    """One answer for each request: in a row on one connection, and where the server closed it, on the next one.

    So each request has to end where a strict reader sees its end, also where it is refused.
    """
    found: list[Answer] = []
    while len(found) < len(requests):
        left = requests[len(found) :][:BATCH]
        came = await _ask(port, left if len(b"".join(left)) < BATCH_BYTES else left[:1])
        assert came, requests[len(found)]
        found += came
    return found


async def _ask(port: int, requests: list[bytes]) -> list[Answer]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    found: list[Answer] = []
    try:
        writer.write(b"".join(requests))
        async with asyncio.timeout(10):
            while len(found) < len(requests):
                answer = Answer(await reader.readuntil(b"\r\n\r\n"))
                answer.body = await reader.readexactly(int(answer.header(b"content-length") or b"-1"))
                found.append(answer)
    except (asyncio.IncompleteReadError, ConnectionResetError):
        pass  # it was closed after the last of these
    finally:
        writer.close()
    return found
