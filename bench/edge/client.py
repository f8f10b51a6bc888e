"""The load: so many connections, each with one request in flight, written by hand so that it costs next to nothing.

Usage: python -m bench.edge.client PORT KEY MODEL CONNECTIONS REQUESTS TOKENS stream|whole
Prints one JSON document: wall seconds, latencies in ms (p50, p99 of whole answers and of first bytes with text), events
that came, and answers that were no 200.
"""

import asyncio
import json
import sys
import time
from typing import cast

import uvloop

WORDS = " ".join(["river stone cloud market garden letter"] * 8)


def request(key: str, model: str, tokens: int, *, stream: bool) -> bytes:
    """Head and body: about 60 tokens in."""
    messages = [{"role": "system", "content": "Answer briefly."}, {"role": "user", "content": WORDS}]
    body = json.dumps({"model": model, "messages": messages, "max_tokens": tokens, "stream": stream}).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        f"authorization: Bearer {key}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class Results:
    """What all connections add to."""

    def __init__(self, to_send: int) -> None:
        self.to_send = to_send
        self.whole_ms: list[float] = []
        self.first_ms: list[float] = []
        self.num_events = 0
        self.num_bad = 0
        self.first_bad = ""
        self.done = asyncio.Event()
        self.num_connections = 0


class Connection(asyncio.Protocol):
    """Sends the next request when the last answer is whole. Knows content-length and chunked bodies."""

    def __init__(self, results: Results, message: bytes) -> None:
        self._results = results
        self._message = message
        self._transport: asyncio.WriteTransport | None = None
        self._buffer = b""
        self._left: int | None = None
        self._is_chunked = False
        self._sent_at = 0.0
        self._has_text = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = cast("asyncio.WriteTransport", transport)  # uvloop's is none by its class
        self._results.num_connections += 1
        self._next()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  # the protocol's signature
        """The gateway closed, or we did."""
        self._results.num_connections -= 1
        if self._results.num_connections == 0:
            self._results.done.set()

    def _next(self) -> None:
        assert self._transport is not None
        if self._results.to_send <= 0:
            self._transport.close()
            return
        self._results.to_send -= 1
        self._buffer, self._left, self._is_chunked, self._has_text = b"", None, False, False
        self._sent_at = time.perf_counter()
        self._transport.write(self._message)

    def data_received(self, data: bytes) -> None:
        """Count what came; go on when it was the end."""
        if self._left is None and not self._is_chunked:
            self._buffer += data
            head, mark, data = self._buffer.partition(b"\r\n\r\n")
            if not mark:
                return
            self._head(head.lower())
        if not self._has_text and b'"content":"' in data.replace(b'": "', b'":"').replace(b'"content":""', b""):
            self._has_text = True
            self._results.first_ms.append((time.perf_counter() - self._sent_at) * 1000)
        self._results.num_events += data.count(b'"delta"')
        if self._is_chunked:
            self._buffer = (self._buffer if self._left else b"")[-8:] + data
            self._left = 1
            if self._buffer.endswith(b"0\r\n\r\n"):
                self._end()
        else:
            self._left = (self._left or 0) - len(data)
            if self._left <= 0:
                self._end()

    def _head(self, head: bytes) -> None:
        self._is_chunked = b"transfer-encoding: chunked" in head
        if not self._is_chunked:
            self._left = int(head.partition(b"content-length:")[2].split(b"\r\n")[0])
        if b" 200 " not in head[:20]:
            self._results.num_bad += 1
            self._results.first_bad = self._results.first_bad or self._buffer[:600].decode("latin-1")

    def _end(self) -> None:
        self._results.whole_ms.append((time.perf_counter() - self._sent_at) * 1000)
        self._next()


def share(values: list[float], part: float) -> float:
    """Nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else 0.0


async def load(words: list[str]) -> dict[str, object]:
    """Run it."""
    port, key, model, connections, requests, tokens, kind = words
    results = Results(int(requests))
    message = request(key, model, int(tokens), stream=kind == "stream")
    loop = asyncio.get_running_loop()
    started = time.perf_counter()
    for _ in range(int(connections)):
        await loop.create_connection(lambda: Connection(results, message), "127.0.0.1", int(port))
    await results.done.wait()
    wall = time.perf_counter() - started
    return {
        "wall_s": wall,
        "requests": len(results.whole_ms),
        "p50_ms": share(results.whole_ms, 0.5),
        "p99_ms": share(results.whole_ms, 0.99),
        "first_p50_ms": share(results.first_ms, 0.5),
        "events": results.num_events,
        "bad": results.num_bad,
        "first_bad": results.first_bad,
    }


if __name__ == "__main__":
    print(json.dumps(uvloop.run(load(sys.argv[1:8]))))
