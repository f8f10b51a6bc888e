"""What only a real socket shows: how clients leave, and what the official client makes of the answers."""

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
import uvicorn

from hitsend.core.errors import EngineFailed
from hitsend.core.lifecycle import FinishReason, State
from hitsend.core.request import Delta, TextLogprob
from hitsend.serve.stream.connection import MAX_AHEAD_BYTES, MAX_HEAD_BYTES, Connection
from hitsend.settings import AccessSettings, StreamSettings
from tests.edge import COMPLETED, STARTED, Edge, Wait, chat_body, end, text

pytestmark = pytest.mark.slow  # waits for sockets or processes, or tries very many examples


@asynccontextmanager
async def serving(edge: Edge) -> AsyncIterator[int]:
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(edge.app, http=Connection, lifespan="off", log_level="critical", ws="none")
    server = uvicorn.Server(config)
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


def head(body: bytes, *headers: str) -> bytes:
    lines = ["POST /v1/chat/completions HTTP/1.1", "host: 127.0.0.1", f"content-length: {len(body)}", *headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


async def connect(port: int, **fields: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps(chat_body(**fields)).encode()
    writer.write(head(body, "content-type: application/json") + body)
    await writer.drain()
    return reader, writer


def fin(writer: asyncio.StreamWriter) -> None:
    writer.close()


def rst(writer: asyncio.StreamWriter) -> None:
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def half_close(writer: asyncio.StreamWriter) -> None:
    writer.write_eof()


@pytest.mark.parametrize("leave", [fin, rst, half_close])
@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("place", [0, 2])
async def test_a_client_that_leaves_is_noticed_at_once(leave: Any, is_stream: bool, place: int):
    wait = Wait()
    script: list[Any] = [STARTED, text("a"), end(), COMPLETED]
    script.insert(place, wait)
    edge = Edge(*script)
    async with serving(edge) as port, asyncio.timeout(10):
        _, writer = await connect(port, stream=is_stream)
        await wait.reached.wait()
        leave(writer)
        while not edge.pipeline.endings:
            await asyncio.sleep(0.005)
        writer.close()
    assert edge.pipeline.endings == ["cancelled"]
    assert edge.flights.all[0].state is State.CANCELLED


def chat_bytes(**fields: Any) -> bytes:
    body = json.dumps(chat_body(**fields)).encode()
    return head(body, "content-type: application/json") + body


@pytest.mark.parametrize("leave", [fin, rst])
@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("is_late", [True, False])
async def test_a_client_that_leaves_is_noticed_beside_a_pipelined_request(leave: Any, is_stream: bool, is_late: bool):
    wait = Wait()
    edge = Edge(STARTED, wait, text("a"), end(), COMPLETED)
    one = chat_bytes(stream=is_stream)
    async with serving(edge) as port, asyncio.timeout(10):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(one if is_late else one * 2)
        await wait.reached.wait()
        if is_late:
            for _ in range(2):
                writer.write(one)
                await asyncio.sleep(0.05)
        leave(writer)
        while not edge.pipeline.endings:
            await asyncio.sleep(0.005)
    assert edge.pipeline.endings == ["cancelled"]
    assert edge.flights.all[0].state is State.CANCELLED


async def test_pipelined_requests_are_answered_in_order_however_they_arrive():
    edge = Edge()
    requests = chat_bytes() + b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n" + chat_bytes(n=2)
    last = b"GET /nowhere HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n"
    async with serving(edge) as port, asyncio.timeout(10):
        for size in (1_000_000, 100, 7):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            data = requests + last
            for start in range(0, len(data), size):
                writer.write(data[start : start + size])
                await asyncio.sleep(0)
            answers = await reader.read()
            statuses = [
                line[9:12] for line in answers.replace(b"HTTP/1.1", b"\nHTTP/1.1").split(b"\n") if b"HTTP/" in line
            ]
            assert statuses == [b"200", b"200", b"200", b"404"]
            writer.close()


async def test_what_is_sent_far_ahead_is_dropped_and_the_running_answer_is_whole():
    wait = Wait()
    edge = Edge(STARTED, wait, text("a"), end(), COMPLETED)
    async with serving(edge) as port, asyncio.timeout(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(chat_bytes() * 2)
        await wait.reached.wait()
        for _ in range(4):
            writer.write(b"x" * (MAX_AHEAD_BYTES // 2))
            await asyncio.sleep(0.01)
        wait.event.set()
        answers = await reader.read()
        writer.close()
    assert answers.count(b"HTTP/1.1 200 OK") == 1
    assert len(edge.pipeline.requests) == 1


@pytest.mark.parametrize("is_endless", [True, False])
async def test_a_head_has_a_limit(is_endless: bool):
    edge = Edge()
    async with serving(edge) as port, asyncio.timeout(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\nx: " + b"a" * (MAX_HEAD_BYTES + 1))
        writer.write(b"" if is_endless else b"\r\n\r\n")
        answer = await reader.read()
        writer.close()
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_request"


async def test_a_client_that_never_reads_is_cut_off_and_one_that_leaves_then_is_noticed():
    big = "x" * 100_000
    edge = Edge(STARTED, *(text(big) for _ in range(400)), end(), COMPLETED, stream=StreamSettings(stall_s=0.3))
    async with serving(edge) as port, asyncio.timeout(15):
        _, writer = await connect(port, stream=True)
        writer.transport.pause_reading()
        while not edge.pipeline.endings:
            await asyncio.sleep(0.01)
        assert edge.flights.all[0].error is not None
        assert "stall_s" in edge.flights.all[0].error.message
        writer.transport.abort()
    edge = Edge(STARTED, *(text(big) for _ in range(400)), end(), COMPLETED)
    async with serving(edge) as port, asyncio.timeout(15):
        _, writer = await connect(port, stream=True)
        writer.transport.pause_reading()
        await asyncio.sleep(0.1)
        assert edge.pipeline.endings == []
        writer.transport.abort()
        while not edge.pipeline.endings:
            await asyncio.sleep(0.01)
    assert edge.pipeline.endings == ["closed"]


async def test_a_body_that_is_too_large_is_refused_before_it_is_sent():
    edge = Edge(access=AccessSettings(max_body_bytes=1000))
    async with serving(edge) as port, asyncio.timeout(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head(b"x" * 2000, "expect: 100-continue"))
        answer = await reader.readuntil(b"\r\n")
        assert b" 413 " in answer
        writer.close()


async def test_one_connection_serves_one_request_after_the_other():
    edge = Edge()
    async with serving(edge) as port, asyncio.timeout(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = json.dumps(chat_body(stream=True)).encode()
        for _ in range(3):
            writer.write(head(body) + body)
            assert b" 200 " in await reader.readuntil(b"\r\n")
            await reader.readuntil(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        writer.close()
    assert edge.pipeline.endings == ["finished"] * 3


@asynccontextmanager
async def asking(edge: Edge) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        serving(edge) as port,
        openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


async def test_the_official_client_reads_a_whole_answer():
    top = (TextLogprob("a", -0.1, (97,)),)
    delta = Delta(index=0, text="a", logprobs=(TextLogprob("a", -0.1, (97,), top),))
    async with asking(Edge(STARTED, delta, end(0, FinishReason.LENGTH), COMPLETED)) as client:
        answer = await client.chat.completions.create(**ASK, logprobs=True, top_logprobs=1)
        assert answer.choices[0].message.content == "a"
        assert answer.choices[0].finish_reason == "length"
        assert answer.choices[0].logprobs.content[0].top_logprobs[0].bytes == [97]
        assert answer.usage.total_tokens == 10
        models = [model.id async for model in await client.models.list()]
        assert models == ["m"]


async def test_the_official_client_reads_a_stream_through_pings():
    wait = Wait()
    edge = Edge(STARTED, wait, text("a\u2028b"), end(), COMPLETED, stream=StreamSettings(ping_s=0.01))
    async with asking(edge) as client:
        asyncio.get_running_loop().call_later(0.1, wait.event.set)
        chunks = [
            chunk
            async for chunk in await client.chat.completions.create(
                **ASK, stream=True, stream_options={"include_usage": True}
            )
        ]
    assert [len(chunk.choices) for chunk in chunks] == [1, 1, 1, 0]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:3]) == "a\u2028b"
    assert chunks[-1].usage.completion_tokens == 3
    assert chunks[-1].model_extra["hitsend"]["cost_microusd"] == 12


async def test_the_official_client_raises_what_it_should():
    async with asking(Edge()) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(**ASK, temperature=3)
        assert refused.value.param == "temperature"
        assert refused.value.request_id.startswith("req_")
    async with asking(Edge(STARTED, text("a"), EngineFailed("the engine broke"))) as client:
        stream = await client.chat.completions.create(**ASK, stream=True)
        with pytest.raises(openai.APIError, match="the engine broke"):
            async for _ in stream:
                pass


async def test_the_official_client_can_leave_a_stream():
    edge = Edge(STARTED, text("a"), Wait(), COMPLETED)
    async with asking(edge) as client, asyncio.timeout(10):
        stream = await client.chat.completions.create(**ASK, stream=True)
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        await stream.close()
        while not edge.pipeline.endings:
            await asyncio.sleep(0.005)
    assert edge.pipeline.endings == ["cancelled"]


async def test_a_body_that_trickles_in_is_refused_and_its_connection_closed():
    edge = Edge(access=AccessSettings(body_timeout_s=0.05))
    async with serving(edge) as port, asyncio.timeout(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head(b"x" * 100, "content-type: application/json") + b"{")
        answer = await reader.read()
        writer.close()
    assert answer.startswith(b"HTTP/1.1 408 ")
