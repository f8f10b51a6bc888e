"""Everything that an upstream can do to a request, over real sockets."""

import asyncio

import pytest

from hitsend import settings
from hitsend.core.errors import ConfigError
from hitsend.serve.app import running
from hitsend.testing import check_stream
from tests.mock_upstream import USAGE, good
from tests.upstream.conftest import gateway

pytestmark = pytest.mark.slow  # waits for sockets or processes, or tries very many examples

HANG_S = 60


def fails(status, **headers):
    async def script(call):
        await call.answer(status, {"error": {"code": "some_code", "message": "SECRET words"}}, **headers)

    return script


async def test_an_answer_and_its_bill_are_the_upstreams(gate):
    status, body, _ = await gate.answer()
    assert status == 200
    assert body["choices"][0]["message"]["content"] == "Hello!"
    assert body["choices"][0]["finish_reason"] == "stop"
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (7, 3)
    assert body["hitsend"]["cost_microusd"] == 7 * 1 + 3 * 2
    record = await gate.record(body["hitsend"]["request_id"])
    assert (record["engine"], record["ledger"]["is_estimate"], record["ledger"]["cost_microusd"]) == (
        "there",
        False,
        13,
    )
    assert sum(one["ms"] for one in record["segments"]) == pytest.approx(record["wall_ms"], abs=0.1)
    metrics = await gate.text("/metrics")
    assert 'hitsend_tokens_output_total{engine="there"} 3.0' in metrics
    assert 'hitsend_tokens_billed_total{kind="completion",model="near"} 3.0' in metrics
    assert 'hitsend_engine_up{engine="there"} 1.0' in metrics


async def test_a_stream_is_one_event_per_chunk(gate):
    _, text, _ = await gate.answer(stream=True, stream_options={"include_usage": True})
    seen = check_stream(text.encode(), n=1, include_usage=True)
    assert seen.texts == {0: "Hello!"}
    assert seen.finish_reasons == {0: "stop"}
    assert seen.usage["completion_tokens"] == 3
    assert text.count('"content":') == 1 + 3


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
async def test_other_dialects_get_it_too(gate, path):
    body = {"model": "near", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
    if path == "/v1/responses":
        body = {"model": "near", "input": "hi", "store": False}
    async with gate.session.post(gate.url + path, json=body) as answer:
        assert answer.status == 200
        assert "Hello!" in await answer.text()


async def test_nothing_of_the_callers_headers_goes_along(tmp_path, mock, monkeypatch):
    monkeypatch.setenv("UPSTREAM_TEST_KEY", "sk-canary")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    async with gateway(tmp_path, mock, api_key_env="UPSTREAM_TEST_KEY") as gate:
        headers = {"authorization": "Bearer caller-secret", "cookie": "a=b", "x-request-id": "mine"}
        status, body, _ = await gate.answer(headers=headers)
        assert status == 200
        sent = mock.calls[0].headers()
        assert sent["authorization"] == "Bearer sk-canary"
        assert set(sent) == {"host", "content-type", "accept", "accept-encoding", "user-agent", "content-length"} | {
            "authorization"
        }
        assert "sk-canary" not in str(await gate.record(body["hitsend"]["request_id"]))
        assert "sk-canary" not in await gate.text("/inspect/state")


async def test_a_redirect_is_not_followed(gate):
    async def script(call):
        await call.start("302 Found", location=f"{gate.mock.url}/elsewhere", content_length="0")

    gate.mock.script = script
    status, body, _ = await gate.answer()
    assert (status, body["error"]["code"], len(gate.mock.calls)) == (502, "engine_unavailable", 1)
    assert "302" in body["error"]["message"]


async def test_its_429_is_a_429_that_says_when(gate):
    gate.mock.script = fails("429 Too Many Requests", retry_after="17")
    status, body, answer = await gate.answer()
    assert (status, body["error"]["code"], answer.headers["retry-after"]) == (429, "rate_limit_exceeded", "17")
    assert len(gate.mock.calls) == 1, "it said no: asking again would be rude"
    assert "SECRET" not in body["error"]["message"]


@pytest.mark.parametrize(
    ("status", "expected"),
    [("400 Bad Request", 400), ("404 Not Found", 400), ("422 No", 400), ("401 No", 502), ("403 No", 502)],
)
async def test_its_refusals_are_told_by_code_only(gate, status, expected):
    gate.mock.script = fails(status)
    got, body, _ = await gate.answer(stream=True)
    assert got == expected, "a stream that never began has a status"
    assert "SECRET" not in body["error"]["message"]
    assert ("some_code" in body["error"]["message"]) == (expected == 400)
    assert len(gate.mock.calls) == 1
    record = await gate.record(_.headers["x-request-id"])
    assert record["ledger"]["cost_microusd"] == 0


@pytest.mark.parametrize("first", ["500 Oops", "503 Busy", "cut", "nothing"])
async def test_what_failed_before_its_first_byte_is_asked_once_more(gate, first):
    async def script(call):
        if len(gate.mock.calls) > 1:
            await good(call)
        elif first == "cut":
            await call.raw(b"HTTP/1.1 20")
        elif first != "nothing":
            await call.answer(first)

    gate.mock.script = script
    status, body, _ = await gate.answer()
    assert (status, len(gate.mock.calls)) == (200, 2)
    record = await gate.record(body["hitsend"]["request_id"])
    attempts = [event["will_retry"] for event in record["events"] if event["type"] == "answered"]
    assert attempts == [True, False]
    assert record["ledger"]["completion_tokens"] == 3


async def test_it_is_not_asked_a_third_time(gate):
    gate.mock.script = fails("500 Oops", retry_after="3")
    status, body, answer = await gate.answer()
    assert (status, body["error"]["code"], answer.headers["retry-after"]) == (502, "engine_unavailable", "3")
    assert len(gate.mock.calls) == 2


async def test_the_retry_budget_runs_dry(tmp_path, mock):
    async with gateway(tmp_path, mock, retry_share=0.0) as gate:
        mock.script = fails("500 Oops")
        await gate.answer()
        assert len(mock.calls) == 1


async def cut(call):
    await call.start()
    await call.say("Hel", "lo")


async def garbled(call):
    await call.start()
    await call.say("Hel")
    await call.event('{"choices":[{"delta":{"content":')


async def broken(call):
    await call.start()
    await call.say("Hel")
    await call.event({"error": {"message": "SECRET"}})


async def half_a_letter(call):
    await call.start()
    await call.say("Hel")
    await call.raw(b'data: {"choices":[{"delta":{"content":"\xc3"}}]}\n\n')


@pytest.mark.parametrize("script", [cut, garbled, broken, half_a_letter])
async def test_a_broken_stream_is_an_error_and_never_a_stop(gate, script):
    gate.mock.script = script
    _, text, answer = await gate.answer(stream=True)
    seen = check_stream(text.encode(), n=1, include_usage=False)
    assert seen.error["code"] == "engine_failed"
    assert "SECRET" not in text
    assert seen.finish_reasons == {}
    assert seen.texts[0].startswith("Hel"), "what came is shown"
    assert len(gate.mock.calls) == 1, "never after the first byte"
    record = await gate.record(answer.headers["x-request-id"])
    assert record["ledger"]["is_estimate"]
    assert record["ledger"]["completion_tokens"] >= 1
    status, _, _ = await gate.answer()
    assert status == 500


async def test_silence_is_a_timeout_before_the_answer_and_inside_it(tmp_path, mock):
    async with gateway(tmp_path, mock, stall_timeout_s=0.2) as gate:

        async def silent(call):
            await asyncio.sleep(HANG_S)

        mock.script = silent
        status, body, _ = await gate.answer()
        assert (status, body["error"]["code"], len(mock.calls)) == (504, "engine_timeout", 1)

        async def stalls(call):
            await call.start()
            await call.say("Hel")
            await asyncio.sleep(HANG_S)

        mock.script = stalls
        _, text, _ = await gate.answer(stream=True)
        seen = check_stream(text.encode(), n=1, include_usage=False)
        assert (seen.error["code"], seen.texts[0]) == ("engine_timeout", "Hel")
        for call in mock.calls:
            async with asyncio.timeout(5):
                await call.has_left.wait()


async def test_missing_usage_is_counted_and_flagged(gate):
    async def script(call):
        await call.start()
        await call.say("one", "two", "three", "four")
        await call.finish()

    gate.mock.script = script
    status, body, _ = await gate.answer()
    assert status == 200
    assert body["usage"]["completion_tokens"] == 4
    assert body["usage"]["prompt_tokens"] > 0
    record = await gate.record(body["hitsend"]["request_id"])
    assert record["ledger"]["is_estimate"]


async def test_a_lost_done_after_the_end_is_an_end(gate):
    async def script(call):
        await call.start()
        await call.say("hi")
        await call.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})

    gate.mock.script = script
    status, body, _ = await gate.answer()
    assert (status, body["choices"][0]["finish_reason"]) == (200, "length")


@pytest.mark.parametrize("phase", ["connected", "refusal", "head", "text"])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_takes_the_upstream_with_it(gate, phase, stream):
    is_there = asyncio.Event()

    async def script(call):
        if phase == "refusal":
            await call.start("500 no", content_length="9")
        elif phase != "connected":
            await call.start()
        if phase == "text":
            await call.say("one", "two")
        is_there.set()
        await asyncio.sleep(HANG_S)

    gate.mock.script = script
    asking = asyncio.ensure_future(gate.answer(stream=stream, headers={"x-request-id": "left"}))
    async with asyncio.timeout(10):
        await is_there.wait()
    await asyncio.sleep(0.1)  # let what was written arrive
    asking.cancel()
    await asyncio.wait({asking})
    async with asyncio.timeout(5):
        await gate.mock.calls[0].has_left.wait()
    state = await gate.idle()
    assert (state["running"], state["holds_open"]) == (0, 0)
    record = await gate.record("left")
    assert record["state"] == "cancelled"
    assert record["ledger"]["completion_tokens"] == (2 if phase == "text" else 0)
    assert record["ledger"]["is_estimate"]
    assert record["ledger"]["prompt_tokens"] > 0, "the upstream had it"


async def test_the_breaker_opens_refuses_at_once_and_recovers(tmp_path, mock):
    options = {"breaker_failures": 3, "breaker_open_s": 2.0, "retry_share": 0.0}
    async with gateway(tmp_path, mock, **options) as gate:
        mock.script = fails("500 Oops")
        for _ in range(3):
            await gate.answer()
        status, body, answer = await gate.answer()
        assert (status, body["error"]["code"], len(mock.calls)) == (502, "engine_unavailable", 3)
        assert int(answer.headers["retry-after"]) >= 1
        assert (await gate.get("/inspect/state"))["upstreams"]["there"]["is_ready"] is False
        assert (await gate.get("/readyz"))["status"] == "not ready"
        assert (await gate.get("/healthz"))["status"] == "ok"
        mock.script = good
        for _ in range(200):
            status, _, _ = await gate.answer()
            if status == 200:
                break
            await asyncio.sleep(0.1)
        assert status == 200
        assert len(mock.calls) == 4


async def test_an_upstream_that_is_away_is_a_502(tmp_path, mock):
    async with gateway(tmp_path, mock, base_url="http://127.0.0.1:1/v1") as gate:
        status, body, answer = await gate.answer()
        assert (status, body["error"]["code"]) == (502, "engine_unavailable")
        assert "127.0.0.1" not in body["error"]["message"]
        record = await gate.record(answer.headers["x-request-id"])
        assert record["ledger"]["prompt_tokens"] == 0


async def test_no_more_run_at_once_than_it_may_have(tmp_path, mock):
    goes_on = asyncio.Event()

    async def script(call):
        await goes_on.wait()
        await good(call)

    mock.script = script
    async with gateway(tmp_path, mock, max_concurrent=2) as gate:
        running_now = [asyncio.ensure_future(gate.answer()) for _ in range(2)]
        while len(mock.calls) < 2:
            await asyncio.sleep(0.01)
        status, body, answer = await gate.answer()
        assert (status, body["error"]["code"], answer.headers["retry-after"]) == (503, "server_overloaded", "1")
        goes_on.set()
        assert [status for status, _, _ in await asyncio.gather(*running_now)] == [200, 200]


async def test_fields_that_it_does_not_take_are_refused_by_name(gate):
    status, body, _ = await gate.answer(top_k=5)
    assert (status, body["error"]["param"], len(gate.mock.calls)) == (400, "top_k", 0)


async def test_extensions_pass_where_the_settings_say_so(tmp_path, mock):
    async with gateway(tmp_path, mock, passes=("top_k",), max_tokens_field="max_completion_tokens") as gate:
        assert (await gate.answer(top_k=5, max_tokens=11))[0] == 200
        assert (mock.calls[0].body["top_k"], mock.calls[0].body["max_completion_tokens"]) == (5, 11)


async def test_what_needs_a_tokenizer_of_ours_says_that_there_is_none(gate):
    for path in ("/v1/chat/completions/render", "/v1/chat/completions/input_tokens"):
        status, body, _ = await gate.answer(path=path)
        assert (status, body["error"]["param"]) == (400, "model")
    async with gate.session.post(gate.url + "/tokenize", json={"content": "hi"}) as answer:
        assert answer.status == 404
    async with gate.session.post(gate.url + "/v1/completions", json={"model": "near", "prompt": "hi"}) as answer:
        assert answer.status == 400
    status, body, _ = await gate.answer(path="/v1/estimate", max_tokens=100)
    assert (status, body["engine"]["name"], body["max_output_tokens"]) == (200, "there", 100)
    assert body["cost"]["most_microusd"] == body["prompt_tokens"] + 200


async def test_several_models_and_unknown_ones(tmp_path, mock):
    async with gateway(tmp_path, mock, models={"near": "far", "small": "far-small"}) as gate:
        assert [one["id"] for one in (await gate.get("/v1/models"))["data"]] == ["near", "small"]
        await gate.answer(model="small")
        assert mock.calls[0].body["model"] == "far-small"
        assert (await gate.answer(model="other"))[0] == 404


async def test_usage_given_in_every_chunk_survives_a_cut(gate):
    async def script(call):
        await call.start()
        for number in range(1, 4):
            usage = USAGE | {"completion_tokens": 10 * number}
            await call.event({"choices": [{"index": 0, "delta": {"content": "x"}}], "usage": usage})

    gate.mock.script = script
    _, _, answer = await gate.answer(stream=True)
    record = await gate.record(answer.headers["x-request-id"])
    assert (record["ledger"]["prompt_tokens"] >= 7, record["ledger"]["completion_tokens"]) == (True, 30)


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"base_url": "ftp://127.0.0.1/v1"}, r"engines\[there\]\.base_url"),
        ({"base_url": "http://user:pw@127.0.0.1/v1"}, "base_url"),
        ({"base_url": "http://127.0.0.1/v1?x=1"}, "base_url"),
        ({"base_url": "http://evil\\@127.0.0.1/v1"}, "base_url"),
        ({"models": {}}, "models"),
        ({"name": "embedded"}, "name"),
        ({"api_key_env": "NOT_SET_ANYWHERE_12"}, "api_key_env"),
        ({"prices": None}, "prices"),
        ({"counts_prompts": "embedded"}, "counts_prompts"),
    ],
)
async def test_settings_that_cannot_work_stop_the_start(tmp_path, fields, names):
    given = {"name": "there", "base_url": "http://127.0.0.1:1/v1", "models": {"near": "far"}}
    given["prices"] = settings.UpstreamPrices(1.0, 1.0)
    tree = settings.Settings(
        server=settings.ServerSettings(data_dir=str(tmp_path)),
        engine=settings.EngineSettings(model="none"),
        engines=(settings.UpstreamSettings(**(given | fields)),),
    )
    with pytest.raises(ConfigError, match=names):
        async with running(tree):
            pass
