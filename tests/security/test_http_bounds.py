"""What one client can make the server hold, wait for, or write into its answers."""

import asyncio
import contextlib
import gzip
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hitsend.core.request import Principal
from hitsend.serve.stream.connection import MAX_HEAD_BYTES, Connection
from hitsend.settings import AccessSettings
from tests.edge import Edge, chat_body
from tests.security.sockets import answers, say, serving

pytestmark = pytest.mark.slow  # waits for sockets or processes, or tries very many examples

GET = b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\n"
MIB = 1024 * 1024


class Hasty(Connection):
    head_timeout_s = 0.3


@pytest.mark.parametrize(
    "head",
    [
        GET + b"x: " + b"a" * MAX_HEAD_BYTES + b"\r\n\r\n",
        GET + b"x: a\r\n" * 6000 + b"\r\n",
        GET + b"a" * MAX_HEAD_BYTES + b": x\r\n\r\n",
        b"GET /" + b"a" * MAX_HEAD_BYTES + b" HTTP/1.1\r\nhost: a\r\n\r\n",
        b"A" * (MAX_HEAD_BYTES + 1),
    ],
)
async def test_a_head_that_is_too_large_is_a_431(head: bytes):
    async with serving(Edge().app) as port, asyncio.timeout(20):
        (answer,) = answers(await say(port, head))
        assert answer.status in (431, 400) if head.startswith(b"AAA") else answer.status == 431
        assert json.loads(answer.body)["error"]["code"] == "invalid_request"
        assert (answer.header(b"x-request-id") or b"").startswith(b"req_")


async def trickle(port: int, first: bytes, drop: bytes) -> bytes:
    """Send a little again and again until the server has enough of it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    found = bytearray()

    async def read() -> None:
        with contextlib.suppress(ConnectionResetError):  # it closed while more was on its way
            while piece := await reader.read(65536):
                found.extend(piece)

    reading = asyncio.create_task(read())
    writer.write(first)
    for _ in range(400):
        if reading.done():
            break
        await asyncio.sleep(0.02)
        writer.write(drop)
    writer.close()
    await reading
    return bytes(found)


async def test_a_head_that_trickles_in_is_a_408():
    async with serving(Edge().app, Hasty) as port, asyncio.timeout(20):
        (answer,) = answers(await trickle(port, GET, b"x"))
        assert (answer.status, json.loads(answer.body)["error"]["code"]) == (408, "request_timeout")
        served, late = answers(await trickle(port, GET + b"\r\n" + GET, b"x"))
        assert (served.status, late.status) == (200, 408)


async def test_a_body_that_trickles_in_is_a_408():
    async with serving(Edge(access=AccessSettings(body_timeout_s=0.2)).app) as port, asyncio.timeout(20):
        head = b"POST /tokenize HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 100000\r\n\r\n"
        (answer,) = answers(await trickle(port, head, b" "))
        assert (answer.status, json.loads(answer.body)["error"]["code"]) == (408, "request_timeout")


@pytest.mark.parametrize(
    ("first", "drop"),
    [
        (b"POST /tokenize HTTP/1.1\r\nhost: a\r\ncontent-length: 100000\r\n\r\n", b" "),
        (b"POST /tokenize HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n", b"1\r\na\r\n"),
        (b"GET /healthz HTTP/1.1\r\nhost: a\r\n\r\n", b"\r\n"),
    ],
)
async def test_nobody_keeps_a_connection_by_trickling_behind_an_answer(first: bytes, drop: bytes):
    edge = Edge(keys={"k": Principal(key_id="k", name="n")})
    async with serving(edge.app, Hasty) as port, asyncio.timeout(20):
        (answer,) = answers(await trickle(port, first, drop))
        assert answer.status in (200, 401)


class Impatient(Connection):
    unread_timeout_s = 0.5


async def ask_and_never_read(port: int, ask: bytes) -> None:
    """Raises what the end of the connection raises."""
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        await loop.sock_connect(client, ("127.0.0.1", port))
        while True:
            await loop.sock_sendall(client, ask)
            await asyncio.sleep(0.001)


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the kernel has no such limit")
async def test_nobody_keeps_a_connection_by_never_reading():
    ask = b"GET /openapi.json HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
    async with serving(Edge().app, Impatient) as port, asyncio.timeout(30):
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            await ask_and_never_read(port, ask)


SERVER = """
import asyncio
from hitsend.settings import AccessSettings
from tests.edge import Edge
from tests.security.sockets import serving
async def main():
    async with serving(Edge(access=AccessSettings(max_body_bytes=1024 * 1024)).app) as port:
        print(port, flush=True)
        await asyncio.to_thread(input)
asyncio.run(main())
"""


def started() -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def resident(pid: int) -> int:
    """Bytes of a process that are in memory, at most so far."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


async def flood(port: int, head: bytes, piece: bytes, num_pieces: int) -> int:
    """Send a body without looking up; the status of the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head)
        for _ in range(num_pieces):
            writer.write(piece)
            await writer.drain()
        return int((await reader.readline()).split()[1])
    finally:
        writer.close()


@pytest.mark.slow
async def test_twenty_bodies_of_a_gibibyte_at_once_cost_no_more_than_twenty_limits():
    process = started()
    try:
        port = int(process.stdout.readline())
        post = b"POST /tokenize HTTP/1.1\r\nhost: 127.0.0.1\r\n"
        before = resident(process.pid)
        announced = post + b"content-length: %d\r\n\r\n" % (1024 * MIB)
        chunked = post + b"transfer-encoding: chunked\r\n\r\n"
        async with asyncio.timeout(60):
            assert set(await asyncio.gather(*(flood(port, announced, b"a" * MIB, 8) for _ in range(20)))) == {413}
            piece = b"%x\r\n" % MIB + b"a" * MIB + b"\r\n"
            assert set(await asyncio.gather(*(flood(port, chunked, piece, 8) for _ in range(20)))) == {413}
        assert resident(process.pid) - before <= 20 * MIB + 64 * MIB
    finally:
        process.communicate(b"\n", timeout=20)


@pytest.mark.parametrize(
    "coding", ["gzip", "deflate", "br", "zstd", "x-gzip", "GZIP", "gzip, identity", "identity, gzip"]
)
async def test_compressed_bodies_are_refused_unread(coding: str):
    edge = Edge()
    bomb = gzip.compress(b" " * 10_000_000)
    answer = await edge.ask("/v1/chat/completions", bomb, (b"content-encoding", coding.encode()))
    assert (answer.status, answer.error["code"]) == (415, "unsupported_media_type")
    raw = json.dumps(chat_body()).encode()
    answer = await edge.ask(
        "/v1/chat/completions", raw, (b"content-encoding", b"gzip"), (b"content-encoding", b"identity")
    )
    assert answer.status == 415, "the last one hides no other"
    assert edge.pipeline.requests == []


EVIL = "a\r\nset-cookie: evil=1\r\n\r\nHTTP/1.1 200 OK\r\n\r\n\u2028\u0085\x00"
KNOWN = {b"date", b"content-type", b"content-length", b"x-request-id", b"request-id", b"connection", b"allow"}


@pytest.mark.parametrize(
    "field", ["model", "user", "safety_identifier", "service_tier", "stop", "prompt_cache_key", EVIL]
)
async def test_line_breaks_in_a_body_split_no_answer(field: str):
    edge = Edge()
    async with serving(edge.app) as port, asyncio.timeout(20):
        for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/embeddings", "/v1/estimate"):
            body = json.dumps(chat_body() | {field: EVIL}).encode()
            head = (
                f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            (answer,) = answers(await say(port, head.encode() + body))
            assert {name.lower() for name, _ in answer.headers} <= KNOWN, answer.head
            json.loads(answer.body)


async def test_line_breaks_in_a_request_id_or_a_path_split_no_answer():
    edge = Edge()
    async with serving(edge.app) as port, asyncio.timeout(20):
        for value in (
            b"a\rset-cookie: x",
            b"a\x00b",
            b"a\x0bb",
            b"a\x85b",
            "a\u2028b".encode(),
            b"a%0d%0ab",
            b"../../x",
        ):
            (answer,) = answers(await say(port, GET + b"x-request-id: " + value + b"\r\nconnection: close\r\n\r\n"))
            assert (answer.header(b"x-request-id") or b"").startswith(b"req_")
        path = b"/v1/models/a%0d%0aset-cookie:%20x%00%e2%80%a8%1b[31m"
        (answer,) = answers(await say(port, GET.replace(b"/healthz", path) + b"connection: close\r\n\r\n"))
        assert answer.status == 404
        assert {name.lower() for name, _ in answer.headers} <= KNOWN
