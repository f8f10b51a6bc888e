"""An upstream on a real socket that does what the test scripts, byte by byte."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any


class Call:
    """One request that reached it: what it said, and the pen to answer with."""

    def __init__(self, head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
        self.head = head.decode("latin-1")
        self.body: dict[str, Any] = json.loads(body) if body else {}
        self._writer = writer
        self.has_left = asyncio.Event()

    def headers(self) -> dict[str, str]:
        """By lower-case name."""
        lines = [line.partition(":") for line in self.head.split("\r\n")[1:] if line]
        return {name.lower(): value.strip() for name, _, value in lines}

    async def raw(self, data: bytes) -> None:
        """Bytes as they are."""
        self._writer.write(data)
        with contextlib.suppress(OSError):
            await self._writer.drain()

    async def start(self, status: str = "200 OK", kind: str = "text/event-stream", **headers: str) -> None:
        """A head; what follows is ended by closing."""
        more = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
        await self.raw(f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\nconnection: close\r\n{more}\r\n".encode())

    async def answer(self, status: str, body: Any = None, **headers: str) -> None:
        """A whole answer that is no stream."""
        raw = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
        await self.start(status, "application/json", content_length=str(len(raw)), **headers)
        await self.raw(raw)

    async def event(self, document: Any) -> None:
        """One event."""
        await self.raw(f"data: {document if isinstance(document, str) else json.dumps(document)}\n\n".encode())

    async def say(self, *words: str, index: int = 0, **fields: Any) -> None:
        """A chunk per word."""
        for word in words:
            await self.event({"choices": [{"index": index, "delta": {"content": word}, **fields}]})

    async def finish(self, reason: str = "stop", usage: dict[str, Any] | None = None, index: int = 0) -> None:
        """The end of a choice, the usage if there is one, [DONE]."""
        await self.event({"choices": [{"index": index, "delta": {}, "finish_reason": reason}]})
        if usage is not None:
            await self.event({"choices": [], "usage": usage})
        await self.event("[DONE]")


Script = Callable[[Call], Awaitable[None]]
USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}


async def good(call: Call) -> None:
    """A short answer with usage."""
    await call.start()
    await call.event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    await call.say("Hel", "lo", "!")
    await call.finish(usage=USAGE)


class MockUpstream:
    """`script` answers each call; `calls` are all that came, `num_open` the connections there are."""

    def __init__(self) -> None:
        self.script: Script = good
        self.calls: list[Call] = []
        self.num_open = 0
        self.num_connections = 0
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, one request: each is answered with `connection: close`."""
        self.num_open += 1
        self.num_connections += 1
        call: Call | None = None
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = next((line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), b":0")
            body = await reader.readexactly(int(length.partition(b":")[2]))
            call = Call(head, body, writer)
            self.calls.append(call)
            answering = asyncio.ensure_future(self.script(call))
            leaving = asyncio.ensure_future(reader.read())
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            answering.cancel()
            leaving.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.num_open -= 1
            if call is not None:
                call.has_left.set()
            writer.close()


@asynccontextmanager
async def mock_upstream() -> AsyncIterator[MockUpstream]:
    """A mock that listens on loopback for the length of the block."""
    mock = MockUpstream()
    server = await asyncio.start_server(mock.serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    mock.url = f"http://{host}:{port}/v1"
    try:
        yield mock
    finally:
        server.close()
