"""An error in place of an answer's first word is one, whatever status stood above it: status, repeat, route, breaker,
bill. Real sockets."""

import asyncio
from contextlib import asynccontextmanager

import aiohttp
import pytest

from hitsend import settings
from hitsend.core.events import Answered
from hitsend.serve.app import running
from hitsend.settings_upstreams import UpstreamSettings, VllmSettings, WorkersAISettings
from hitsend.testing import check_stream
from tests.mock_upstream import USAGE, good, mock_upstream
from tests.upstream.asking import ask, engine_of
from tests.upstream.conftest import PRICES, Gateway, gateway

pytestmark = pytest.mark.slow  # waits for sockets

ROLE = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}


def openrouter(code, **more):
    """Its chunk for a failure inside a stream; openrouter.ai/docs/api/reference/streaming, read 2026-11-30."""
    return {
        "id": "gen-1",
        "object": "chat.completion.chunk",
        "error": {"code": code, "message": "SECRET"},
        "choices": [{"index": 0, "delta": {"content": ""}, "finish_reason": "error"}],
    } | more


SAID = [
    # as OpenAI, vLLM (both forms), OpenRouter, Anthropic's proxies, llama-server and another hitsend write them
    ({"error": {"message": "SECRET", "type": "server_error", "code": None}}, 502, "engine_unavailable", True),
    ({"error": {"message": "SECRET", "type": "requests", "code": "rate_limit_exceeded"}}, 429, None, False),
    ({"error": {"message": "SECRET", "type": "invalid_request_error", "param": "messages"}}, 400, None, False),
    ({"error": {"message": "SECRET", "type": "InternalServerError", "param": None, "code": 500}}, 502, None, True),
    ({"error": {"message": "SECRET", "type": "BadRequestError", "param": None, "code": 400}}, 400, None, False),
    ({"object": "error", "message": "SECRET", "type": "BadRequestError", "code": 400}, 400, None, False),
    (openrouter(502), 502, "engine_unavailable", True),
    (openrouter(503), 502, "engine_unavailable", True),
    (openrouter(408), 502, "engine_unavailable", True),
    (openrouter(429), 429, "rate_limit_exceeded", False),
    (openrouter(402), 502, "engine_unavailable", False),
    (openrouter("429"), 429, "rate_limit_exceeded", False),
    ({"error": {"type": "overloaded_error", "message": "SECRET"}}, 502, "engine_unavailable", True),
    ({"error": {"type": "authentication_error", "message": "SECRET"}}, 502, "engine_unavailable", False),
    ({"error": {"type": "exceed_context_size_error", "code": 400}}, 400, "context_length_exceeded", False),
    ({"error": {"code": "engine_failed", "type": "server_error", "message": "SECRET"}}, 502, None, True),
    ({"error": "SECRET"}, 502, "engine_unavailable", True),
    # TGI, whose stream of a request that it refuses is a 200 all the same
    ({"error": "SECRET", "error_type": "validation"}, 400, "invalid_request", False),
    (
        {"error": "`inputs` tokens + `max_new_tokens` must be <= 2048", "error_type": "validation"},
        *(400, "context_length_exceeded", False),
    ),
    ({"error": "SECRET", "error_type": "overloaded"}, 429, "rate_limit_exceeded", False),
    ({"error": "SECRET", "error_type": "generation"}, 502, "engine_unavailable", True),
    ({"choices": [{"index": 0, "delta": {}, "finish_reason": "error"}]}, 502, "engine_unavailable", True),
]


def fails(said, *before):
    async def script(call):
        await call.start()
        await call.raw(b": PROCESSING\n\n")
        for event in (*before, said):
            await call.event(event)

    return script


@pytest.mark.parametrize("before", [(), (ROLE,)])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("said", "status", "code", "is_repeated"), SAID)
async def test_it_is_the_status_that_it_stands_for(gate, said, status, code, is_repeated, stream, before):
    gate.mock.script = fails(said, *before)
    got, body, answer = await gate.answer(stream=stream)
    assert got == status, body
    assert code in (None, body["error"]["code"])
    assert "SECRET" not in str(body)
    assert len(gate.mock.calls) == 1 + is_repeated
    record = await gate.record(answer.headers["x-request-id"])
    row = record["ledger"]
    assert (row["prompt_tokens"], row["completion_tokens"], row["is_estimate"]) == (0, 0, False), "it did no work"
    assert [one["reason"] for one in record["events"] if one["type"] == "answered"] == [body["error"]["code"]] * (
        1 + is_repeated
    )


@pytest.mark.parametrize("code", [3036, 3040, 3021, 3007, 5007, 5004, 5035, 10000, 7009])
@pytest.mark.parametrize("route", ["openai", "native"])
async def test_workers_ais_codes_mean_in_a_stream_what_they_mean_elsewhere(mock, code, route):
    seen = []
    fields = {"name": "cf", "base_url": mock.url.removesuffix("/v1"), "models": {"near": "@cf/m"}, "retry_share": 1.0}
    for inside in (False, True):
        said = {"success": False, "errors": [{"code": code, "message": "SECRET"}]}

        async def script(call, inside=inside, said=said):
            if inside:
                await call.start()
                await call.event(said)
            else:
                await call.answer("429 No", said)

        mock.script = script
        mock.calls.clear()
        async with engine_of(WorkersAISettings(route=route, **fields)) as engine:
            answer = await ask(engine)
            seen.append(
                (answer.error.code, len(mock.calls), engine.state().is_ready, answer.produced.usage.total_tokens)
            )
    assert seen[0] == seen[1]


async def test_what_is_repeated_is_answered(gate):
    async def script(call):
        await (fails(openrouter(502)) if len(gate.mock.calls) == 1 else good)(call)

    gate.mock.script = script
    _, text, answer = await gate.answer(stream=True)
    assert check_stream(text.encode(), n=1, include_usage=False).texts == {0: "Hello!"}
    record = await gate.record(answer.headers["x-request-id"])
    assert (record["ledger"]["completion_tokens"], record["ledger"]["cost_microusd"]) == (3, 13)
    assert [one["will_retry"] for one in record["events"] if one["type"] == "answered"] == [True, False]
    assert sum(one["ms"] for one in record["segments"]) == pytest.approx(record["wall_ms"], abs=0.1)


async def test_what_it_bills_all_the_same_is_billed_and_not_repeated(gate):
    gate.mock.script = fails(openrouter(502, usage={"prompt_tokens": 7, "completion_tokens": 1}))
    status, _, answer = await gate.answer(stream=True)
    row = (await gate.record(answer.headers["x-request-id"]))["ledger"]
    assert (status, row["prompt_tokens"], row["completion_tokens"], row["is_estimate"]) == (502, 7, 1, False)
    assert len(gate.mock.calls) == 1


async def nothing(call):
    await call.start()


async def role_alone(call):
    await call.start()
    await call.event(ROLE)


async def done_alone(call):
    await call.start()
    await call.event("[DONE]")


async def half_an_event(call):
    await call.start()
    await call.raw(b'data: {"choices":[{"del')


async def no_event(call):
    await call.start()
    await call.event("hello")


@pytest.mark.parametrize("script", [nothing, role_alone, done_alone, half_an_event, no_event])
@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_that_ends_before_it_began_is_a_status_and_costs_nothing(gate, script, stream):
    gate.mock.script = script
    status, body, answer = await gate.answer(stream=stream)
    assert (status, body["error"]["code"]) == (500, "engine_failed")
    assert len(gate.mock.calls) == (2 if script is nothing else 1), "never once a byte of an answer had come"
    assert (await gate.record(answer.headers["x-request-id"]))["ledger"]["prompt_tokens"] == 0


@pytest.mark.parametrize("kind", [UpstreamSettings, VllmSettings])
async def test_its_breaker_counts_it(mock, kind):
    mock.script = fails(openrouter(502))
    url = mock.url if kind is UpstreamSettings else mock.url.removesuffix("/v1")
    fields = {"name": "e", "base_url": url, "models": {"near": "far"}, "breaker_failures": 3, "retry_share": 0.0}
    fields["metrics_poll_s"] = 0.0
    async with engine_of(kind(**fields)) as engine:
        for _ in range(3):
            assert (await ask(engine)).error.code == "engine_unavailable"
        assert engine.replicas.all[0].breaker.state == "open"
        assert (await ask(engine)).error.code == "engine_unavailable"
        assert len(mock.calls) == 3


async def test_another_server_is_asked_where_there_is_one(mock, tmp_path):
    async def script(call):
        await (fails(openrouter(503)) if len(mock.calls) == 1 else good)(call)

    mock.script = script
    urls = (mock.url, mock.url.replace("127.0.0.1", "localhost"))
    async with gateway(tmp_path, mock, base_url="", base_urls=urls) as gate:
        status, body, _ = await gate.answer()
        assert (status, body["choices"][0]["message"]["content"]) == (200, "Hello!")
        assert len({call.headers()["host"] for call in mock.calls}) == 2


async def test_after_the_first_word_it_is_an_error_event_and_nothing_is_repeated(gate):
    gate.mock.script = fails(openrouter(502), {"choices": [{"index": 0, "delta": {"content": "Hel"}}]})
    _, text, answer = await gate.answer(stream=True)
    seen = check_stream(text.encode(), n=1, include_usage=False)
    assert (answer.status, seen.texts, seen.error["code"]) == (200, {0: "Hel"}, "engine_failed")
    assert len(gate.mock.calls) == 1


@asynccontextmanager
async def pinging(folder, *mocks):
    """A server that pings after 0.1 s, over an engine for each mock and a route over all of them."""
    engines = tuple(
        UpstreamSettings(name=f"e{at}", base_url=mock.url, models={f"m{at}": "far"}, prices=PRICES)
        for at, mock in enumerate(mocks)
    )
    tree = settings.Settings(
        server=settings.ServerSettings(data_dir=str(folder)),
        engine=settings.EngineSettings(model="none"),
        stream=settings.StreamSettings(ping_s=0.1),
        engines=engines,
        routes=(settings.RouteSettings(model="near", engines=tuple(one.name for one in engines)),),
    )
    async with running(tree) as server, aiohttp.ClientSession() as session:
        yield Gateway(server.base_url, session, mocks[0])


def slowly(then, *, with_head):
    """Silent until the client was pinged twice."""

    async def script(call):
        if with_head:
            await call.start()
        await asyncio.sleep(0.35)
        await then(call)

    return script


async def ends(call):
    await call.say("Hello", "!")
    await call.finish(usage=USAGE)


async def errs(call):
    await call.event(openrouter(429))


async def is_away(call):
    await call.answer("503 No", {})


@pytest.mark.parametrize(
    ("script", "code"),
    [
        (slowly(good, with_head=False), None),
        (slowly(ends, with_head=True), None),
        (slowly(errs, with_head=True), "rate_limit_exceeded"),
        (slowly(is_away, with_head=False), "engine_unavailable"),
    ],
)
async def test_who_waits_for_a_first_word_hears_pings_and_then_of_an_error_in_an_event(tmp_path, mock, script, code):
    mock.script = script
    async with pinging(tmp_path, mock) as gate:
        status, text, answer = await gate.answer(stream=True, model="m0")
        first = text.index("data: ")
        assert (status, answer.headers["content-type"].partition(";")[0]) == (200, "text/event-stream")
        assert text[:first].count(": ping\n\n") >= 2
        seen = check_stream(text[first:].encode(), n=1, include_usage=False)
        assert (seen.error or {}).get("code") == code
        assert seen.texts == ({0: "Hello!"} if code is None else {})
        record = await gate.record(answer.headers["x-request-id"])
        assert record["ledger"]["completion_tokens"] == (3 if code is None else 0)
        status, _, _ = await gate.answer(model="m0")
        assert status == {None: 200, "rate_limit_exceeded": 429, "engine_unavailable": 502}[code], "nothing was sent"


@pytest.mark.parametrize("script", [slowly(errs, with_head=True), slowly(is_away, with_head=False)])
async def test_pings_keep_no_route_from_its_next_engine(tmp_path, mock, script):
    async with mock_upstream() as other, pinging(tmp_path, mock, other) as gate:
        mock.script = script
        status, text, answer = await gate.answer(stream=True)
        seen = check_stream(text[text.index("data: ") :].encode(), n=1, include_usage=False)
        assert (status, seen.texts, seen.error) == (200, {0: "Hello!"}, None)
        assert ": ping" in text
        assert (await gate.record(answer.headers["x-request-id"]))["engine"] == "e1"


async def test_a_client_that_leaves_before_the_first_word_closes_it_at_once(gate):
    asked = asyncio.Event()

    async def script(call):
        await call.start()
        await call.event(ROLE)
        asked.set()
        await call.has_left.wait()

    gate.mock.script = script
    asking = asyncio.ensure_future(gate.answer(stream=True))
    await asked.wait()
    await asyncio.sleep(0.05)
    asking.cancel()
    began = asyncio.get_running_loop().time()
    await gate.mock.calls[0].has_left.wait()
    assert asyncio.get_running_loop().time() - began < 0.25
    assert (await gate.idle())["running"] == 0


async def test_its_events_are_in_order(mock):
    async with engine_of(UpstreamSettings(name="e", base_url=mock.url, models={"near": "far"})) as engine:
        answer = await ask(engine)
    times = [getattr(one, "at", None) or one.ended_at for one in answer.events]
    assert times == sorted(times)
    assert [one.reason for one in answer.events if isinstance(one, Answered)] == ["ok"]
    assert answer.produced.usage.completion_tokens == USAGE["completion_tokens"]


async def test_a_first_word_leaves_in_one_write_with_the_head_and_the_role(gate):
    gate.mock.script = good
    async with gate.ask(stream=True) as answer:
        first, is_piece = await anext(aiter(answer.content.iter_chunks()))
        assert is_piece
        assert b'"role":"assistant"' in first
        assert b'"content":"' in first.replace(b'"content":""', b"")
        await answer.read()
