"""Bytes on which readers of HTTP disagree: refused and closed, or one request with one meaning; never two answers."""

import asyncio
import json

import pytest

from hitsend.core.request import Principal
from tests.edge import COMPLETED, STARTED, Edge, Wait, chat_body, end, text
from tests.security.sockets import answers, say, serving

pytestmark = pytest.mark.slow  # waits for sockets or processes, or tries very many examples

SMUGGLED = b"GET /smuggled HTTP/1.1\r\nhost: a\r\n\r\n"
HEAD = b"POST /v1/models HTTP/1.1\r\nhost: a\r\n"
GET = b"GET /v1/models HTTP/1.1\r\nhost: a\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"

REFUSED = {
    "length and chunked": HEAD + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunked and length": HEAD + b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n",
    "length 0 and chunked": HEAD + b"content-length: 0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "two lengths": HEAD + b"content-length: 0\r\ncontent-length: 37\r\n\r\n",
    "two equal lengths": HEAD + b"content-length: 1\r\ncontent-length: 1\r\n\r\na",
    "a list of lengths": HEAD + b"content-length: 1, 1\r\n\r\na",
    "another list of lengths": HEAD + b"content-length: 0,37\r\n\r\n",
    "negative length": HEAD + b"content-length: -1\r\n\r\n",
    "plus length": HEAD + b"content-length: +1\r\n\r\na",
    "hex length": HEAD + b"content-length: 0x1\r\n\r\na",
    "huge length": HEAD + b"content-length: 18446744073709551617\r\n\r\na",
    "empty length": HEAD + b"content-length:\r\n\r\n",
    "length with a letter": HEAD + b"content-length: 1a\r\n\r\na",
    "length with a blank inside": HEAD + b"content-length: 1 1\r\n\r\na",
    "length with a point": HEAD + b"content-length: 1.0\r\n\r\na",
    "coding identity": HEAD + b"transfer-encoding: identity\r\n\r\n",
    "coding xchunked": HEAD + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
    "coding chunked, identity": HEAD + b"transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "coding identity, chunked": HEAD + b"transfer-encoding: identity, chunked\r\n\r\n0\r\n\r\n",
    "coding gzip, chunked": HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "coding chunked twice": HEAD + b"transfer-encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
    "two codings": HEAD + b"transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n\r\n0\r\n\r\n",
    "two equal codings": HEAD + b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "coding in quotes": HEAD + b'transfer-encoding: "chunked"\r\n\r\n0\r\n\r\n',
    "coding with a parameter": HEAD + b"transfer-encoding: chunked;a=b\r\n\r\n0\r\n\r\n",
    "coding and a vertical tab": HEAD + b"transfer-encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
    "coding in HTTP/1.0": HEAD.replace(b"1.1", b"1.0") + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "folded coding": HEAD + b"transfer-encoding:\r\n chunked\r\n\r\n0\r\n\r\n",
    "coding before a colon": HEAD + b"transfer-encoding : chunked\r\n\r\n0\r\n\r\n",
    "length before a colon": HEAD + b"content-length : 1\r\n\r\na",
    "a fold": GET + b"x: a\r\n b\r\n\r\n",
    "a header that begins with a blank": b"GET / HTTP/1.1\r\n host: a\r\n\r\n",
    "bare LF": b"GET / HTTP/1.1\nhost: a\n\n",
    "bare LF at the end": GET + b"x: y\r\n\n",
    "bare CR": b"GET / HTTP/1.1\rhost: a\r\r",
    "bare CR in a value": GET + b"x: a\rtransfer-encoding: chunked\r\n\r\n",
    "NUL in a value": GET + b"x: a\0b\r\n\r\n",
    "NUL in a name": GET + b"x\0: b\r\n\r\n",
    "NUL in the target": b"GET /a\0b HTTP/1.1\r\nhost: a\r\n\r\n",
    "a line without a colon": GET + b"transfer-encoding chunked\r\n\r\n",
    "a header without a name": GET + b": chunked\r\n\r\n",
    "a name with a blank": GET + b"content length: 1\r\n\r\na",
    "a name with a comma": GET + b"a,b: 1\r\n\r\n",
    "chunk size in hex prefix": CHUNKED + b"0x1\r\na\r\n0\r\n\r\n",
    "chunk size with plus": CHUNKED + b"+1\r\na\r\n0\r\n\r\n",
    "chunk size negative": CHUNKED + b"-1\r\na\r\n0\r\n\r\n",
    "chunk size of 17 digits": CHUNKED + b"10000000000000001\r\na\r\n0\r\n\r\n",
    "chunk size with a blank": CHUNKED + b"1 \r\na\r\n0\r\n\r\n",
    "chunk size with an underscore": CHUNKED + b"1_0\r\n0123456789abcdef\r\n0\r\n\r\n",
    "chunk size missing": CHUNKED + b"\r\na\r\n0\r\n\r\n",
    "chunk ended by LF": CHUNKED + b"1\na\n0\n\n",
    "chunk longer than it says": CHUNKED + b"1\r\nab\r\n0\r\n\r\n",
    "LF in a chunk's extension": CHUNKED + b"1;a\nb\r\na\r\n0\r\n\r\n",
    "CR in a chunk's extension": CHUNKED + b"1;a\rb\r\na\r\n0\r\n\r\n",
    "a length among the trailers": CHUNKED + b"0\r\ncontent-length: 37\r\n\r\n",
    "HTTP/0.9": b"GET /\r\n\r\n",
    "HTTP/1.2": b"GET / HTTP/1.2\r\nhost: a\r\n\r\n",
    "HTTP/2.0 in HTTP/1": b"GET / HTTP/2.0\r\nhost: a\r\n\r\n",
    "the preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/1.1 with a letter": b"GET / HTTP/1.1a\r\nhost: a\r\n\r\n",
    "a proxy's CONNECT": b"CONNECT 127.0.0.1:22 HTTP/1.1\r\nhost: a\r\n\r\n",
    "a target without a path": b"GET http://a HTTP/1.1\r\nhost: a\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "an upgrade with a length": HEAD + b"connection: upgrade\r\nupgrade: h2c\r\ncontent-length: 37\r\n\r\n",
    "an upgrade with chunks": CHUNKED[:-2] + b"connection: upgrade\r\nupgrade: h2c\r\n\r\n0\r\n\r\n",
}  # fmt: skip
"""Each followed by SMUGGLED: one 400 and the end, whatever part of it was read as what."""

ONE = {
    "a length with blanks around": HEAD + b"content-length:  35  \r\n\r\n",
    "a length with zeros in front": HEAD + b"content-length: 0035\r\n\r\n",
    "a GET with a body": GET + b"content-length: 35\r\n\r\n",
    "an underscore instead of a dash": HEAD + b"content_length: 0\r\ncontent-length: 35\r\n\r\n",
    "an extension of a chunk": CHUNKED + b"23;a=b\r\n" + SMUGGLED + b"\r\n0\r\n\r\n",
    "an upgrade without a body": GET + b"connection: upgrade\r\nupgrade: websocket\r\n\r\n",
    "an end that was asked for": GET + b"connection: close\r\n\r\n",
    "HTTP/1.0": GET.replace(b"1.1", b"1.0") + b"\r\n",
    "another protocol, read as HTTP/1.0": GET.replace(b"HTTP/1.1", b"RTSP/1.0") + b"\r\n",
}
"""Each followed by SMUGGLED, which is its body or isn't read: one answer."""


def keyed() -> Edge:
    return Edge(keys={"k": Principal(key_id="k", name="n")})


def test_there_are_sixty():
    assert len(REFUSED) >= 60
    assert len(SMUGGLED) == 35


@pytest.mark.parametrize("is_split", [False, True])
async def test_what_can_be_read_in_two_ways_is_refused_and_closed(is_split: bool):
    edge = keyed()
    async with serving(edge.app) as port, asyncio.timeout(60):
        for name, raw in REFUSED.items():
            middle = raw.find(b"\r\n\r\n") + 4
            pieces = (raw[:middle], raw[middle:] + SMUGGLED) if is_split else (raw + SMUGGLED,)
            came = answers(await say(port, *pieces, pause_s=0.005 if is_split else 0))
            # a body that is wrong may be behind an answer that needed none of it
            wanted = (400, 401) if raw.startswith(CHUNKED) and is_split else (400,)
            assert [answer.status in wanted for answer in came] == [True], name
            if came[0].status == 400:
                assert json.loads(came[0].body)["error"]["code"] == "invalid_request", name
                assert (came[0].header(b"x-request-id") or b"").startswith(b"req_"), name
                assert came[0].header(b"connection") == b"close", name
    assert "unmatched" not in [route for route, _ in edge.answers]


async def test_what_has_one_meaning_is_one_request():
    edge = keyed()
    async with serving(edge.app) as port, asyncio.timeout(30):
        for name, raw in ONE.items():
            last = b"" if b"close" in raw or b"upgrade" in raw or b"1.0" in raw else GET + b"connection: close\r\n\r\n"
            body = b"" if raw.startswith(CHUNKED) else SMUGGLED
            came = answers(await say(port, raw + body + last))
            assert len(came) == (2 if last else 1), name
            assert {answer.status for answer in came} == {401}, name
    assert "unmatched" not in [route for route, _ in edge.answers]


def chat_bytes() -> bytes:
    body = json.dumps(chat_body()).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: %d\r\n\r\n" % len(body)
    return head + body


@pytest.mark.parametrize(
    "nonsense", [b"\0\0\0\r\n\r\n", REFUSED["two lengths"], b"GET / HTTP/1.1\r\nx: " + b"a" * 40_000]
)
async def test_nonsense_behind_a_request_takes_no_place_of_its_answer(nonsense: bytes):
    wait = Wait()
    edge = Edge(STARTED, wait, text("whole"), end(), COMPLETED)
    async with serving(edge.app) as port, asyncio.timeout(20):
        saying = asyncio.create_task(say(port, chat_bytes(), nonsense, SMUGGLED, pause_s=0.02))
        await wait.reached.wait()
        await asyncio.sleep(0.15)
        assert not saying.done()
        wait.event.set()
        (answer,) = answers(await saying)
    assert (answer.status, b"whole" in answer.body) == (200, True)
    assert edge.pipeline.endings == ["finished"]


async def test_a_large_body_before_a_pipelined_head_is_no_large_head():
    wait = Wait()
    edge = Edge(STARTED, wait, text("whole"), end(), COMPLETED)
    body = json.dumps(chat_body(metadata={"k": "v"}) | {"user": "u"}).encode() + b" " * 40_000
    first = b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    begun = b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n"
    async with serving(edge.app) as port, asyncio.timeout(20):
        saying = asyncio.create_task(say(port, first + begun, b"\r\n", pause_s=0.1))
        await wait.reached.wait()
        wait.event.set()
        assert [answer.status for answer in answers(await saying)] == [200, 200]


async def test_a_body_that_breaks_after_its_answer_brings_no_second_one():
    edge = keyed()
    async with serving(edge.app) as port, asyncio.timeout(20):
        for rest in (b"zz\r\n", b"1\r\nab\r\n0\r\n\r\n", b"5\r\nhello" + SMUGGLED):
            (answer,) = answers(await say(port, CHUNKED, rest + SMUGGLED, pause_s=0.1))
            assert answer.status == 401
    assert "unmatched" not in [route for route, _ in edge.answers]
