"""The upstream behind every gateway: answers at once, so that what is measured is the gateway.

Usage: python -m bench.edge.mock PORT
A body with `"stream": true` gets one event per token, `max_tokens` of them, each written by itself and the streams
taking turns; any other one a whole answer. Both end with usage. It speaks as much HTTP as its clients need.
"""

import asyncio
import json
import re
import sys
from typing import cast

import uvloop

PROMPT_TOKENS = 60
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_STREAM = re.compile(rb'"stream": *true')
_TOKENS = re.compile(rb'"max_(?:completion_)?tokens": *(\d+)')
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def _event(document: object) -> bytes:
    text = document if isinstance(document, str) else json.dumps(document)
    data = f"data: {text}\n\n".encode()
    return b"%x\r\n%s\r\n" % (len(data), data)


_BASE = {"id": "chatcmpl-mock", "object": "chat.completion.chunk", "created": 1, "model": "mock"}
_FIRST = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
_ROLE = _event(_BASE | {"choices": [_FIRST]})
_WORD = _event(_BASE | {"choices": [{"index": 0, "delta": {"content": " word"}, "finish_reason": None}]})
_STOP = _event(_BASE | {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})


def _usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": tokens, "total_tokens": PROMPT_TOKENS + tokens}


def _whole(tokens: int) -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", "content": " word" * tokens}, "finish_reason": "stop"}
    document = _BASE | {"object": "chat.completion", "choices": [choice], "usage": _usage(tokens)}
    body = json.dumps(document).encode()
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


class Mock(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self) -> None:
        self._buffer = b""
        self._transport: asyncio.WriteTransport | None = None
        self._loop = asyncio.get_running_loop()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Somebody connects."""
        self._transport = cast("asyncio.WriteTransport", transport)  # uvloop's is none by its class

    def data_received(self, data: bytes) -> None:
        """Answer as soon as a request is whole."""
        self._buffer += data
        head, mark, rest = self._buffer.partition(b"\r\n\r\n")
        if not mark:
            return
        found = _LENGTH.search(head)
        length = int(found[1]) if found else 0
        if len(rest) < length:
            return
        body, self._buffer = rest[:length], rest[length:]
        asked = _TOKENS.search(body)
        tokens = int(asked[1]) if asked else 20
        assert self._transport is not None
        if _STREAM.search(body):
            self._transport.write(_HEAD + _ROLE)
            self._say(tokens, tokens)
        else:
            self._transport.write(_whole(tokens))

    def _say(self, left: int, tokens: int) -> None:
        assert self._transport is not None
        if self._transport.is_closing():
            return
        if left:
            self._transport.write(_WORD)
            self._loop.call_soon(self._say, left - 1, tokens)
            return
        usage = _event(_BASE | {"choices": [], "usage": _usage(tokens)})
        self._transport.write(_STOP + usage + _event("[DONE]") + b"0\r\n\r\n")


async def serve(port: int) -> None:
    """Until killed."""
    server = await asyncio.get_running_loop().create_server(Mock, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
