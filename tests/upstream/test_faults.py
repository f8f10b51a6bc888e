"""A recorded stream, broken at every byte of it, on real sockets: an error or the whole answer, never half a stop."""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest

from hitsend.core.events import Answered
from hitsend.settings_upstreams import UpstreamSettings, VllmSettings, WorkersAISettings
from hitsend.testing import FakeClock
from tests.drills.faults import FAULTS, Case, Report, cases, judged, recording
from tests.drills.faults import broken as faulty
from tests.upstream.asking import ask, engine_of

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
USAGE = {"prompt_tokens": 7, "completion_tokens": 3}


def event(document):
    return b"data: " + json.dumps(document, ensure_ascii=False).encode() + b"\n\n"


def chunk(reason=None, **delta):
    return event({"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]})


EVENTS = [chunk(content="é\u2028"), chunk(content="b"), chunk("stop"), event({"choices": [], "usage": USAGE})]
DONE = b"data: [DONE]\n\n"
RECORDED = b"".join(EVENTS) + DONE
END_OF_TEXT = len(b"".join(EVENTS[:3]))
"""From here on the answer is whole, and only the bill and the goodbye are missing."""
LEGACY = event({"response": "é"}) + event({"response": 7}) + event({"response": "", "usage": USAGE}) + DONE


class Player:
    """Answers with these bytes and closes. `num_runs`: requests that came."""

    def __init__(self):
        self.data, self.num_runs, self.url = b"", 0, ""

    async def serve(self, reader, writer):
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            await reader.readexactly(length)
            self.num_runs += 1
            writer.write(self.data)
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def playing():
    player = Player()
    server = await asyncio.start_server(player.serve, "127.0.0.1", 0)
    player.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield player
    finally:
        server.close()


def settings_of(kind, url, **fields):
    """One whose breaker stays closed, unless `fields` say otherwise, and which may always repeat."""
    patient = {"breaker_failures": 10**6, "breaker_share": 1.0, "retry_share": 1.0}
    return kind(**({"name": "e", "base_url": url, "models": {"near": "@cf/far"}} | patient | fields))


def num_answered(answer):
    return sum(isinstance(one, Answered) and one.reason == "ok" for one in answer.events)


async def broken(engine, player, data):
    """The answer to these bytes. A whole one goes before, so that the breaker never sees failures only."""
    player.data = HEAD + RECORDED
    assert (await ask(engine)).error is None
    player.data, player.num_runs = data, 0
    return await ask(engine)


KINDS = [UpstreamSettings, VllmSettings, WorkersAISettings]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_stream_cut_at_any_byte_is_an_error_until_its_end_has_come(kind):
    async with playing() as player, engine_of(settings_of(kind, player.url, metrics_poll_s=0.0)) as engine:
        for cut in range(len(RECORDED) + 1):
            answer = await broken(engine, player, HEAD + RECORDED[:cut])
            # repeated while not a byte of an answer had come, and never after that
            has_begun = cut >= len(EVENTS[0])
            assert (player.num_runs, num_answered(answer)) == (1 if cut else 2, int(has_begun)), cut
            is_whole = cut >= END_OF_TEXT
            assert (answer.error is None, answer.reasons) == (is_whole, ["stop"] if is_whole else []), cut
            assert "é\u2028b".startswith(answer.text), "never half a letter"
            has_bill = is_whole and cut >= len(RECORDED) - len(DONE)
            assert answer.produced.is_estimate is (has_begun and not has_bill), cut
            # without a word of an answer there is nothing to bill
            assert answer.produced.usage.prompt_tokens == (7 if has_bill else 5 if has_begun else 0), cut
        assert engine.state().running == 0


async def test_frames_without_finish_reasons_end_by_done_alone():
    async with playing() as player, engine_of(settings_of(WorkersAISettings, player.url)) as engine:
        for cut in range(len(LEGACY) + 1):
            answer = await broken(engine, player, HEAD + LEGACY[:cut])
            is_whole = cut == len(LEGACY)
            assert (answer.error is None, answer.reasons) == (is_whole, ["stop"] if is_whole else []), cut
            assert "é7".startswith(answer.text)


@pytest.mark.parametrize("kind", KINDS)
async def test_events_that_come_twice_change_the_text_at_most(kind):
    async with playing() as player, engine_of(settings_of(kind, player.url, metrics_poll_s=0.0)) as engine:
        for twice in range(len(EVENTS) + 1):
            events = [*EVENTS, DONE]
            events.insert(twice, events[twice])
            player.data = HEAD + b"".join(events)
            answer = await ask(engine)
            assert (answer.error, answer.reasons) == (None, ["stop"]), twice
            assert answer.produced.usage.completion_tokens == 3, "its own bill, once"


async def test_a_head_cut_at_any_byte_is_asked_again_once_and_no_more():
    async with playing() as player, engine_of(settings_of(UpstreamSettings, player.url)) as engine:
        for cut in range(len(HEAD)):
            answer = await broken(engine, player, HEAD[:cut])
            assert answer.error.code == "engine_unavailable", cut
            assert player.num_runs <= 2, cut
            assert answer.produced.usage.total_tokens == 0, "nothing was answered, nothing is billed"


@pytest.mark.parametrize("status", ["429 No", "500 No", "502 No", "503 No", "529 No"])
async def test_a_status_is_repeated_once_where_it_did_no_work(status):
    async with playing() as player, engine_of(settings_of(UpstreamSettings, player.url)) as engine:
        player.data = f"HTTP/1.1 {status}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n".encode()
        answer = await ask(engine)
        assert player.num_runs == (1 if status.startswith("429") else 2)
        assert answer.error.code == ("rate_limit_exceeded" if status.startswith("429") else "engine_unavailable")


@pytest.mark.parametrize("kind", KINDS)
async def test_the_breaker_opens_tries_one_and_closes(kind):
    clock = FakeClock()
    async with playing() as player:
        fields = {"breaker_failures": 3, "breaker_open_s": 2.0}
        async with engine_of(settings_of(kind, player.url, **fields), clock=clock) as engine:
            player.data = HEAD + EVENTS[0]
            for _ in range(3):
                assert (await ask(engine)).error.code == "engine_failed"
            assert (await ask(engine)).error.code == "engine_unavailable"
            assert player.num_runs == 3, "at once, without asking"
            clock.advance(2.0)
            player.data = HEAD + RECORDED
            assert (await ask(engine)).reasons == ["stop"]
            assert (await ask(engine)).reasons == ["stop"]
            assert engine.replicas.all[0].breaker.state == "closed"


@pytest.mark.slow  # hundreds of requests through a server
async def test_a_sample_of_all_faults_through_the_whole_server(tmp_path):
    """`make drill` breaks every byte; here each fault has some, and those around the answer's end."""
    asked = cases(step=160)
    report = await faulty(tmp_path, asked)
    assert report.faults == []
    assert {case.fault for case in asked} == {*FAULTS, "status"}
    assert report.outcomes["answered"]
    assert report.outcomes["an error"]
    assert report.outcomes["left"] == len(report.left_ms)


def test_the_drill_would_see_a_cut_that_became_a_stop():
    case = Case("openai", True, "cut", recording("openai").ended - 1)
    chunk = '{"choices":[{"index":0,"delta":{"content":"é"},"finish_reason":"stop"}]}'
    assert judged(case, 200, f"data: {chunk}\n\ndata: [DONE]\n\n", 1, Report())
    assert judged(case, 200, 'data: {"error": {}}\n\n', 2, Report())
    assert judged(case, 200, 'data: {"error": {}}\n\n', 1, Report()) == []
