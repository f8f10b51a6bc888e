"""The line to an upstream against servers that write bytes as the test says, on real sockets."""

import asyncio
import contextlib
import ipaddress
import socket
import ssl
import threading
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from hitsend.serve.engine.http1 import MAX_HEAD_BYTES, MOST_UNREAD, LineFailed
from hitsend.serve.engine.upstream import UpstreamLine

pytestmark = pytest.mark.slow  # waits for sockets or processes, or tries very many examples

OK = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"


class Server:
    """Answers each request with the next of its answers, a list of pieces of bytes (or events to wait for)."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.requests = []
        self.num_connections = 0
        self.num_open = 0
        self.num_written = 0

    async def __call__(self, reader, writer):
        self.num_connections += 1
        self.num_open += 1
        try:
            while self.answers:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                self.requests.append((head, await reader.readexactly(length)))
                if not await self._answer(reader, writer, self.answers.pop(0)):
                    return
            await reader.read()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.num_open -= 1
            writer.close()

    async def _answer(self, reader, writer, pieces):
        for piece in pieces:
            if piece is None:
                return False
            if isinstance(piece, asyncio.Event):
                while not piece.is_set():
                    if reader.at_eof() or writer.transport.is_closing():
                        return False
                    await asyncio.sleep(0.005)
                continue
            writer.write(piece)
            await writer.drain()
            self.num_written += len(piece)
            await asyncio.sleep(0)
        return True


@asynccontextmanager
async def line_to(server, *, stall_s=5.0, key=None):
    listening = await asyncio.start_server(server, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    line = UpstreamLine(f"http://127.0.0.1:{port}/v1", key, connect_timeout_s=5, stall_timeout_s=stall_s)
    line.start()
    try:
        yield line
    finally:
        await line.stop()
        listening.close()


async def whole(line, body=b"{}"):
    answer = await line.post("x", body)
    data = b""
    with contextlib.closing(answer):
        while piece := await answer.read():
            data += piece
    return answer.status, data


async def to_its_end(answer):
    while await answer.read():
        pass


async def until(condition):
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("never happened")


async def test_a_request_says_what_it_must_and_no_more():
    server = Server([CHUNKED + b"0\r\n\r\n"])
    async with line_to(server, key="s3cret") as line:
        assert await whole(line, b'{"a":1}') == (200, b"")
    head, body = server.requests[0]
    lines = head.decode().split("\r\n")
    assert (lines[0], body) == ("POST /v1/x HTTP/1.1", b'{"a":1}')
    assert {one.partition(":")[0] for one in lines[1:] if one} == {
        "host", "user-agent", "authorization", "content-type", "accept", "accept-encoding", "content-length"
    }  # fmt: skip
    assert "authorization: Bearer s3cret" in lines


@pytest.mark.parametrize(
    "pieces",
    [
        [CHUNKED + b"5\r\nhello\r\n", b"1\r\n!\r\n0\r\n\r\n"],
        [OK + b"content-length: 6\r\n\r\nhel", b"lo!"],
        [bytes([byte]) for byte in CHUNKED + b"5\r\nhello\r\n1\r\n!\r\n0\r\nsome: trailer\r\n\r\n"],
        [b"HTTP/1.1 100 Continue\r\nx: y\r\n\r\n", CHUNKED + b"6\r\nhello!\r\n0\r\n\r\n"],
    ],
    ids=["chunked", "length", "a byte at a time", "continue"],
)
async def test_a_whole_answer_leaves_a_connection_that_is_used_again(pieces):
    server = Server(pieces, pieces, pieces)
    async with line_to(server) as line:
        for _ in range(3):
            assert await whole(line) == (200, b"hello!")
        assert server.num_connections == 1


@pytest.mark.parametrize(
    "pieces",
    [
        [OK + b"\r\nhello!", None],
        [OK + b"connection: close\r\ncontent-length: 6\r\n\r\nhello!"],
        [b"HTTP/1.0 200 OK\r\ncontent-length: 6\r\n\r\nhello!"],
        [OK + b"content-length: 6\r\n\r\nhello!HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nx"],
    ],
    ids=["ends with its connection", "close", "1.0", "an answer that nobody asked for"],
)
async def test_a_connection_that_may_not_be_used_again_is_not(pieces):
    server = Server(pieces, pieces)
    async with line_to(server) as line:
        for _ in range(2):
            assert await whole(line) == (200, b"hello!")
        assert server.num_connections == 2
        await until(lambda: server.num_open == 0)


async def test_a_connection_whose_end_lies_unread_in_its_socket_is_not_used_again():
    """The server closes while the loop is busy: nothing but the socket knows of it when the next request begins."""
    listening = socket.create_server(("127.0.0.1", 0))
    closed = threading.Semaphore(0)

    def serve():
        for _ in range(2):
            taken, _ = listening.accept()
            with taken:
                taken.recv(65536)
                taken.sendall(OK + b"content-length: 2\r\n\r\nok")
            closed.release()

    serving = threading.Thread(target=serve, daemon=True)
    serving.start()
    port = listening.getsockname()[1]
    line = UpstreamLine(f"http://127.0.0.1:{port}/v1", None, connect_timeout_s=5, stall_timeout_s=5)
    line.start()
    try:
        for _ in range(2):
            assert await whole(line) == (200, b"ok")
            assert closed.acquire(timeout=5)  # and meanwhile the loop reads nothing
    finally:
        await line.stop()
        listening.close()
        serving.join(5)


async def test_what_comes_while_nobody_asks_ends_the_connection():
    late = asyncio.Event()
    server = Server([CHUNKED + b"0\r\n\r\n", late, CHUNKED + b"4\r\nevil\r\n0\r\n\r\n"], [CHUNKED + b"0\r\n\r\n"])
    async with line_to(server) as line:
        await whole(line)
        late.set()
        await until(lambda: server.num_open == 0)
        assert await whole(line) == (200, b"")


@pytest.mark.parametrize(
    "pieces",
    [
        [CHUNKED + b"5\r\nhello\r\n", None],
        [OK + b"content-length: 7\r\n\r\nhello!", None],
        [CHUNKED + b"5\r\nhello\r\nno size\r\n"],
    ],
    ids=["chunks cut", "length not reached", "bad chunk"],
)
async def test_a_body_that_is_not_whole_is_a_failure(pieces):
    async with line_to(Server(pieces)) as line:
        answer = await line.post("x", b"{}")
        with pytest.raises(LineFailed, match="broke") as failed:
            await to_its_end(answer)
        assert not (failed.value.is_unanswered)
        assert not (failed.value.is_timeout)
        answer.close()


@pytest.mark.parametrize(
    "pieces",
    [
        [None],
        [b"HTTP/1.1 20", None],
        [b"SSH-2.0-OpenSSH\r\n"],
        [OK + b"content-length: 1\r\ncontent-length: 2\r\n\r\nxx"],
        [OK + b"content-length: 1\r\ntransfer-encoding: chunked\r\n\r\nxx"],
        [OK + b"x: y\r\n" * (MAX_HEAD_BYTES // 4)],
        [OK + b"x: %s\r\n" % (b"y" * 1000) * (MAX_HEAD_BYTES // 1000 + 1) + b"content-length: 1\r\n\r\nx"],
        [b"HTTP/1.1 100 Continue\r\nx: y\r\n\r\n" * (MAX_HEAD_BYTES // 20)],
        [b"HTTP/1.1 101 Switching\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n"],
    ],
)
async def test_what_is_no_answer_is_a_failure(pieces):
    server = Server(pieces)
    async with line_to(server) as line:
        with pytest.raises(LineFailed) as failed:
            await line.post("x", b"{}")
        assert failed.value.is_unanswered
        await until(lambda: server.num_open == 0)


async def test_silence_counts_only_while_somebody_waits():
    more = asyncio.Event()
    server = Server([CHUNKED + b"5\r\nhello\r\n", more, b"1\r\n!\r\n0\r\n\r\n"], [CHUNKED, asyncio.Event()])
    async with line_to(server, stall_s=0.3) as line:
        answer = await line.post("x", b"{}")
        assert await answer.read() == b"hello"
        await asyncio.sleep(0.5)
        more.set()
        assert await answer.read() == b"!"
        assert await answer.read() == b""
        answer.close()
        answer = await line.post("x", b"{}")
        with pytest.raises(LineFailed) as failed:
            await answer.read()
        assert failed.value.is_timeout
        await until(lambda: server.num_open == 0)


async def test_a_reader_that_waits_holds_the_upstream_back():
    piece = b"10000\r\n" + b"x" * 65536 + b"\r\n"
    server = Server([CHUNKED, *[piece] * 800, b"0\r\n\r\n"])
    async with line_to(server) as line:
        answer = await line.post("x", b"{}")
        before = -1
        while before != server.num_written:  # until nothing moves any more
            before = server.num_written
            await asyncio.sleep(0.2)
        assert server.num_written < 400 * 65536
        most, size = 0, 0
        while data := await answer.read():
            most, size = max(most, len(data)), size + len(data)
        assert size == 800 * 65536
        assert most < MOST_UNREAD * 4
        answer.close()


async def test_one_that_is_closed_or_cancelled_is_gone_at_once():
    server = Server([CHUNKED + b"5\r\nhello\r\n", asyncio.Event()], [asyncio.Event()])
    async with line_to(server) as line:
        answer = await line.post("x", b"{}")
        await answer.read()
        answer.close()
        await until(lambda: server.num_open == 0)
        asking = asyncio.create_task(line.post("x", b"{}"))
        await until(lambda: len(server.requests) == 2)
        asking.cancel()
        await until(lambda: server.num_open == 0)
        with pytest.raises(asyncio.CancelledError):
            await asking


async def test_what_is_idle_is_closed_at_the_end():
    server = Server(*[[CHUNKED + b"0\r\n\r\n"]] * 8)
    async with line_to(server) as line:
        await asyncio.gather(*(whole(line) for _ in range(4)))
    await until(lambda: server.num_open == 0)


async def test_nobody_there_is_told_as_such():
    line = UpstreamLine("http://127.0.0.1:1", None, connect_timeout_s=5, stall_timeout_s=5)
    with pytest.raises(LineFailed, match="can't be reached: nobody listens") as failed:
        await line.post("x", b"{}")
    assert failed.value.is_unanswered


def certificate(folder):
    """Self-signed, for 127.0.0.1: (certificate, key) as PEM files."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "upstream")])
    now = datetime.now(UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    made = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    made = made.not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1))
    made = made.add_extension(x509.SubjectAlternativeName([address]), critical=False).sign(key, hashes.SHA256())
    files = folder / "cert.pem", folder / "key.pem"
    files[0].write_bytes(made.public_bytes(serialization.Encoding.PEM))
    private = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    files[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, *private))
    return files


@pytest.mark.parametrize("is_trusted", [True, False])
async def test_https_is_served_to_whom_it_trusts_and_nothing_is_sent_to_others(tmp_path, monkeypatch, is_trusted):
    cert, key = certificate(tmp_path)
    if is_trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(cert))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    server = Server([CHUNKED + b"2\r\nhi\r\n0\r\n\r\n"], [CHUNKED + b"0\r\n\r\n"])
    listening = await asyncio.start_server(server, "127.0.0.1", 0, ssl=context)
    port = listening.sockets[0].getsockname()[1]
    line = UpstreamLine(f"https://127.0.0.1:{port}/v1", "s3cret", connect_timeout_s=5, stall_timeout_s=5)
    line.start()
    if is_trusted:
        assert [await whole(line), await whole(line)] == [(200, b"hi"), (200, b"")]
        assert server.num_connections == 1
    else:
        with pytest.raises(LineFailed, match="certificate isn't trusted"):
            await whole(line)
        assert server.requests == []
    await line.stop()
    listening.close()
