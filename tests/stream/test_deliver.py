import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import pytest

from hitsend.core.clock import SystemClock
from hitsend.core.errors import ContextLengthExceeded, EngineFailed, ServerOverloaded
from hitsend.core.events import Cancelled, Delivered
from hitsend.core.lifecycle import State
from hitsend.serve.stream import sse
from hitsend.serve.stream.deliver import Delivery
from hitsend.settings import StreamSettings
from hitsend.testing import StreamSeen, check_stream
from tests.edge import COMPLETED, STARTED, Call, Edge, Wait, chat_body, end, text

QUICK = StreamSettings(ping_s=0.02, stall_s=0.15)


def call(edge: Edge, **fields: Any) -> Call:
    return Call(edge.app, "/v1/chat/completions", chat_body(**fields), (), None)


async def until(is_so: Any) -> None:
    async with asyncio.timeout(10):
        while not is_so():
            await asyncio.sleep(0.005)


def pings(request: Call) -> int:
    return request.answer.body.count(b": ping\n\n")


async def test_pings_come_while_the_first_token_is_waited_for_and_between_tokens():
    first, second = Wait(), Wait()
    edge = Edge(STARTED, first, text("a"), second, text("b"), end(), COMPLETED, stream=QUICK)
    request = call(edge, stream=True)
    running = asyncio.create_task(request.run())
    await until(lambda: pings(request) >= 3)
    assert request.answer.status == 200
    assert b'"role":"assistant"' in request.answer.body
    first.event.set()
    await until(lambda: b'"content":"a"' in request.answer.body)
    before = pings(request)
    await until(lambda: pings(request) >= before + 2)
    second.event.set()
    await running
    seen = check_stream(request.answer.body)
    assert (seen.texts, seen.num_pings >= 5) == ({0: "ab"}, True)


@pytest.mark.parametrize("last", [sse.DONE, sse.event("message_stop", b"{}"), sse.event("response.completed", b"{}")])
async def test_no_ping_follows_the_end_however_long_the_work_goes_on_after_it(last: bytes):
    sent: list[bytes] = []

    async def frames() -> AsyncGenerator[bytes]:
        yield sse.frame(b'"[DONE]"')
        await asyncio.sleep(3 * QUICK.ping_s)
        yield last
        await asyncio.sleep(5 * QUICK.ping_s)

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        return {}

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    await Delivery(receive, send, QUICK, SystemClock()).stream(frames(), (), lambda error: b"")
    said = b"".join(sent)
    assert sse.PING in said
    assert said.endswith(last)


async def test_nothing_is_sent_before_the_work_has_begun_so_a_refusal_has_its_status():
    edge = Edge(ServerOverloaded("full", retry_after_s=2.0))
    answer = await edge.chat(stream=True)
    assert (answer.status, answer.headers[b"retry-after"]) == (503, b"2")
    assert answer.error["code"] == "server_overloaded"
    edge = Edge(ContextLengthExceeded("too long"))
    assert (await edge.chat(stream=True)).status == 400


@pytest.mark.parametrize("error", [EngineFailed("the engine broke"), ValueError("SECRET")])
async def test_an_error_after_the_first_byte_is_one_error_frame_and_the_end(error: Exception):
    edge = Edge(STARTED, text("a"), end(), error)
    answer = await edge.chat(stream=True)
    assert answer.status == 200
    assert answer.is_complete
    seen = check_stream(answer.body)
    assert seen.error is not None
    assert seen.finish_reasons == {}
    assert b"SECRET" not in answer.body
    assert edge.flights.all[0].state is State.FAILED


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("place", [0, 1, 2, 3])
async def test_a_client_that_leaves_in_any_phase_cancels_the_work_and_its_clean_up_is_waited_for(
    is_stream: bool, place: int
):
    script: list[Any] = [STARTED, text("a"), end(), COMPLETED]
    wait = Wait()
    script.insert(place, wait)
    edge = Edge(*script, clean_up_s=0.02)
    request = call(edge, stream=is_stream)
    running = asyncio.create_task(request.run())
    await wait.reached.wait()
    request.leave()
    await running
    assert edge.pipeline.endings == ["cancelled"]
    assert not request.answer.is_complete
    assert edge.answers == [("/v1/chat/completions", request.answer.status or 499)]
    flight = edge.flights.all[0]
    assert flight.state is State.CANCELLED
    assert [event.reason for event in flight.events() if isinstance(event, Cancelled)] == ["client_gone"]
    assert edge.flights.num_open == 0
    assert len(asyncio.all_tasks()) == 1


async def test_a_client_that_reads_nothing_is_cut_off_and_meanwhile_nothing_more_is_computed():
    edge = Edge(STARTED, *(text("a") for _ in range(1000)), end(), COMPLETED, stream=QUICK)
    request = call(edge, stream=True)

    async def never(_: bytes) -> None:
        await asyncio.Event().wait()

    request.accept = never
    await request.run()
    assert edge.pipeline.endings == ["closed"]
    assert request.answer.body == b""
    flight = edge.flights.all[0]
    assert flight.state is State.CANCELLED
    assert flight.error is not None
    assert "0.15 s" in flight.error.message


async def test_a_client_that_leaves_while_a_write_is_blocked_is_noticed():
    edge = Edge(STARTED, text("a"), end(), COMPLETED)
    request = call(edge, stream=True)
    blocked = asyncio.Event()

    async def never(_: bytes) -> None:
        blocked.set()
        await asyncio.Event().wait()

    request.accept = never
    running = asyncio.create_task(request.run())
    await blocked.wait()
    request.leave()
    await running
    assert edge.pipeline.endings == ["closed"]


async def test_a_failing_write_or_ping_counts_as_a_client_that_left():
    edge = Edge(STARTED, Wait(), COMPLETED, stream=QUICK)
    request = call(edge, stream=True)

    async def broken(data: bytes) -> None:
        if data.startswith(b":"):
            raise BrokenPipeError

    request.accept = broken
    await request.run()
    assert edge.pipeline.endings == ["cancelled"]
    assert edge.flights.all[0].state is State.CANCELLED


async def test_the_deadline_ends_a_stream_with_an_error_frame_and_a_whole_answer_with_a_status():
    late = StreamSettings(request_timeout_s=0.05)
    edge = Edge(STARTED, Wait(), COMPLETED, stream=late)
    answer = await edge.chat(stream=True)
    seen = check_stream(answer.body)
    assert seen.error is not None
    assert seen.error["code"] == "deadline_exceeded"
    assert edge.pipeline.endings == ["cancelled"]
    edge = Edge(STARTED, Wait(), COMPLETED, stream=late)
    answer = await edge.chat()
    assert (answer.status, answer.error["code"]) == (504, "deadline_exceeded")
    assert edge.pipeline.endings == ["cancelled"]


async def test_time_blocked_on_the_client_and_bytes_are_recorded():
    edge = Edge(STARTED, text("a"), end(), COMPLETED)
    request = call(edge, stream=True)

    async def slow(_: bytes) -> None:
        await asyncio.sleep(0.01)

    request.accept = slow
    await request.run()
    flight = edge.flights.all[0]
    assert flight.segments()["client_wait"] >= 20
    delivered = [event for event in flight.events() if isinstance(event, Delivered)]
    assert [(event.num_bytes, event.num_chunks) for event in delivered] == [(len(request.answer.body), 3)]


DIALECTS = {
    "/v1/chat/completions": {},
    "/v1/completions": {"messages": None, "prompt": "hi"},
    "/v1/messages": {},
    "/v1/responses": {"messages": None, "max_tokens": None, "input": "hi"},
}


@pytest.mark.parametrize("path", DIALECTS)
async def test_what_an_answer_begins_with_leaves_with_the_first_words_where_those_are_there_at_once(path: str):
    edge = Edge(msgspec.structs.replace(STARTED, has_more=True), text("wo"), text("rds"), end(), COMPLETED)
    fields = chat_body(stream=True, max_tokens=9) | DIALECTS[path]
    pieces: list[bytes] = []

    async def accept(data: bytes) -> None:
        pieces.append(data)

    request = Call(edge.app, path, {name: value for name, value in fields.items() if value is not None}, (), None)
    request.accept = accept
    await request.run()
    assert request.answer.status == 200
    assert b'"wo"' in pieces[0]
    assert b'"rds"' in pieces[1]


@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_server_that_stops_cancels_the_work_waits_for_it_and_says_so(is_stream: bool):
    wait = Wait()
    edge = Edge(STARTED, wait, COMPLETED, clean_up_s=0.02)
    request = call(edge, stream=is_stream)
    running = asyncio.create_task(request.run())
    await wait.reached.wait()
    running.cancel()
    await running
    assert request.answer.status == (200 if is_stream else 503)
    assert b'"code":"shutting_down"' in request.answer.body
    assert b"[DONE]" not in request.answer.body
    assert edge.pipeline.endings == ["cancelled"]
    assert edge.flights.all[0].error is not None
    assert edge.flights.all[0].error.code == "shutting_down"


async def test_pings_never_split_a_frame_or_follow_the_end():
    hurried = StreamSettings(ping_s=0.0001, stall_s=5)
    edge = Edge(STARTED, *(text("a") for _ in range(50)), end(), COMPLETED, stream=hurried)
    request = call(edge, stream=True, stream_options={"include_usage": True})

    async def slow(_: bytes) -> None:
        await asyncio.sleep(0.001)

    request.accept = slow
    await request.run()
    seen: StreamSeen = check_stream(request.answer.body, include_usage=True)
    assert seen.texts == {0: "a" * 50}


async def test_a_bug_in_the_clean_up_of_a_request_whose_client_left_is_logged(caplog: pytest.LogCaptureFixture):
    edge = Edge(STARTED, Wait(), stream=QUICK)
    edge.pipeline.clean_up_error = LookupError("SECRET")
    request = call(edge, stream=True)
    running = asyncio.create_task(request.run())
    await until(lambda: request.answer.status == 200)
    request.leave()
    await running
    assert "LookupError" in caplog.text
    assert "SECRET" not in caplog.text
