"""A route's name stands for engines: who is asked, who is asked next, who is billed. Real sockets."""

import asyncio

import pytest

from hitsend import settings
from tests.mock_upstream import USAGE, good

pytestmark = pytest.mark.slow  # a server each


def fails(status):
    async def script(call):
        await call.answer(status, {"error": {"code": "some_code"}})

    return script


async def closes(call):
    """Hangs up without a word."""


async def cut_before_a_word(call):
    await call.start()


async def cut_after_a_word(call):
    await call.start()
    await call.say("Hel")


def says(*words, usage=USAGE, logprob=None):
    async def script(call):
        await call.start()
        for word in words:
            more = {}
            if logprob is not None:
                more = {
                    "logprobs": {"content": [{"token": word, "logprob": logprob, "bytes": None, "top_logprobs": []}]}
                }
            await call.say(word, **more)
        await call.finish(usage=usage)

    return script


def events(record, kind):
    return [event for event in record["events"] if event["type"] == kind]


@pytest.mark.parametrize("engines", [("a", "b"), ("engine-a", "engine-b")])
async def test_the_first_engine_answers_and_the_record_says_why(routed, engines):
    async with routed(engines=engines) as gate:
        status, body, record = await gate.asked("r1")
        assert (status, body["model"], body["choices"][0]["message"]["content"]) == (200, "auto", "Hello!")
        (event,) = events(record, "routed")
        assert (event["route"], event["engine"], event["model"], event["attempt"]) == ("auto", "engine-a", "a", 1)
        assert [one["name"] for one in event["candidates"]] == list(engines)
        assert "first in order" in event["reason"]
        assert (record["ledger"]["model"], record["ledger"]["engine"]) == ("a", "engine-a")
        assert gate.b.calls == []
        assert "auto" in [model["id"] for model in (await gate.get("/v1/models"))["data"]]


@pytest.mark.parametrize(
    ("script", "stream"),
    [
        (fails("500 no"), False),
        (fails("429 no"), True),
        (fails("401 no"), False),
        (closes, True),
        (cut_before_a_word, False),
        (cut_before_a_word, True),
    ],
)
async def test_what_fails_before_its_first_byte_is_asked_elsewhere_and_billed_once(routed, script, stream):
    async with routed() as gate:
        gate.a.script = script
        status, body, record = await gate.asked("r1", stream=stream)
        assert status == 200
        assert "Hel" in str(body)
        assert [event["engine"] for event in events(record, "routed")] == ["engine-a", "engine-b"]
        (gone,) = events(record, "abandoned")
        assert (gone["engine"], gone["billed_microusd"]) == ("engine-a", 0)
        assert record["state"] == "finished"
        assert (record["ledger"]["model"], record["ledger"]["engine"]) == ("b", "engine-b")
        assert record["ledger"]["cost_microusd"] == record["cost_microusd"] == 7 * 10 + 3 * 20
        assert sum(one["ms"] for one in record["segments"]) == pytest.approx(record["wall_ms"], abs=0.1)
        assert [row["cost_microusd"] for row in await gate.rows() if row["key_name"] != "route:auto"] == [130]
        assert await gate.drifted() == []
        assert (await gate.get("/inspect/state"))["holds_open"] == 0


async def test_silence_is_given_up_and_asked_elsewhere(routed):
    async def silent(call):
        await call.has_left.wait()

    async with routed(of_engine={"a": {"stall_timeout_s": 0.2}}) as gate:
        gate.a.script = silent
        status, _, record = await gate.asked("r1")
        assert status == 200
        assert [event["code"] for event in events(record, "abandoned")] == ["engine_timeout"]
        assert record["ledger"]["prompt_tokens"] == 7
        (gone,) = events(record, "abandoned")
        rows = {row["request_id"]: row for row in await gate.rows()}
        assert set(rows) == {"r1", "r1/tried/a"}
        tried = rows["r1/tried/a"]  # it may have worked: a cost, but nobody's
        assert (tried["key_name"], tried["is_estimate"]) == ("route:auto", True)
        assert tried["cost_microusd"] == gone["cost_microusd"] > 0
        assert await gate.drifted() == []


async def test_nobody_else_is_asked_after_the_first_byte(routed):
    async with routed() as gate:
        gate.a.script = cut_after_a_word
        status, text, record = await gate.asked("r1", stream=True)
        assert status == 200
        assert '"Hel"' in text
        assert '"error"' in text
        assert "[DONE]" not in text
        assert gate.b.calls == []
        assert record["state"] == "failed"


async def test_an_engines_own_400_is_final(routed):
    async with routed() as gate:
        gate.a.script = fails("400 no")
        status, body, _ = await gate.asked("r1")
        assert (status, body["error"]["code"]) == (400, "invalid_request")
        assert gate.b.calls == []


async def test_an_open_breaker_is_passed_over(routed):
    async with routed(of_engine={"a": {"breaker_failures": 1, "breaker_open_s": 60.0}}) as gate:
        gate.a.script = fails("500 no")
        await gate.asked("r1")
        _, _, record = await gate.asked("r2")
        assert len(gate.a.calls) == 1
        (event,) = events(record, "routed")
        assert event["engine"] == "engine-b"
        assert "left alone" in event["reason"]


async def test_when_all_fail_the_last_error_is_told_and_nothing_billed(routed):
    async with routed() as gate:
        gate.a.script = fails("500 no")
        gate.b.script = closes
        status, body, record = await gate.asked("r1")
        assert (status, body["error"]["code"]) == (502, "engine_unavailable")
        assert record["state"] == "failed"
        assert [row["cost_microusd"] for row in await gate.rows()] == [0]
        assert (await gate.idle())["holds_open"] == 0


async def test_without_falling_back_only_the_chosen_one_is_asked(routed):
    async with routed(falls_back=False) as gate:
        gate.a.script = fails("500 no")
        status, _, _ = await gate.asked("r1")
        assert status == 502
        assert gate.b.calls == []


async def test_what_one_engine_does_not_take_goes_to_one_that_does(routed):
    async with routed(of_engine={"b": {"passes": ("top_k",)}}) as gate:
        status, _, record = await gate.asked("r1", top_k=5)
        assert status == 200
        (event,) = events(record, "routed")
        assert event["engine"] == "engine-b"
        assert "top_k" in event["reason"]
        status, body, _ = await gate.asked("r2", min_p=0.5)
        assert (status, body["error"]["param"]) == (400, "min_p")


async def test_refusing_is_a_setting(routed):
    async with routed(unsupported="refuse", of_engine={"b": {"passes": ("top_k",)}}) as gate:
        status, body, _ = await gate.asked("r1", top_k=5)
        assert (status, body["error"]["param"]) == (400, "top_k")


async def test_the_cheapest_that_can(routed):
    async with routed(engines=("b", "a"), strategy="cheapest", of_engine={"b": {"passes": ("top_k",)}}) as gate:
        assert (await gate.explain())["engine"] == "engine-a"
        assert (await gate.explain(top_k=5))["engine"] == "engine-b"
        assert gate.a.calls == gate.b.calls == []


async def test_no_field_of_a_client_names_an_engine(routed):
    async with routed() as gate:
        for fields in (
            {"engine": "engine-b"},
            {"base_url": gate.b.url},
            {"route": "b"},
            {"metadata": {"engine": "engine-b", "base_url": gate.b.url}},
            {"user": "engine-b"},
        ):
            await gate.answer(headers={"x-engine": "engine-b", "host": "127.0.0.1"}, **fields)
        assert gate.b.calls == []
        assert gate.b.num_connections == 0


async def test_a_route_is_allowed_by_its_own_name_alone(routed):
    async with routed() as gate:
        async with gate.session.post(gate.url + "/admin/keys", json={"name": "k", "models": ["auto"]}) as answer:
            key = (await answer.json())["key"]
        headers = {"authorization": f"Bearer {key}"}
        assert (await gate.answer(headers=headers))[0] == 200
        assert (await gate.answer(headers=headers, model="a"))[0] == 403


async def test_a_canary_that_fails_is_rolled_back(routed):
    rule = {"share": 0.5, "least": 5}
    async with routed(strategy="canary", canary=_canary(**rule)) as gate:
        gate.b.script = fails("500 no")
        for number in range(24):
            assert (await gate.answer(headers={"x-request-id": f"c{number}"}))[0] == 200
        state = await gate.route()
        assert "failed" in state["rolled_back"]
        asked = len(gate.b.calls)
        assert asked >= 5
        for number in range(24, 30):
            _, _, record = await gate.asked(f"c{number}")
            assert len(events(record, "routed")) == 1
        assert len(gate.b.calls) == asked
        assert "rolled back" in events(record, "routed")[0]["reason"]


def _canary(**fields):
    return settings.CanarySettings(**fields)


def _cascade(**fields):
    return settings.CascadeSettings(**fields)


async def test_a_shadow_gets_a_copy_and_never_holds_up_the_answer(routed):
    release = asyncio.Event()

    async def late(call):
        await release.wait()
        await good(call)

    async with routed(engines=("a",), shadow="b", shadow_concurrent=1) as gate:
        gate.b.script = late
        _, body, record = await gate.asked("s1")
        assert body["choices"][0]["message"]["content"] == "Hello!"
        assert record["ledger"]["cost_microusd"] == 13
        (event,) = events(record, "shadowed")
        assert event["request_id"] == "s1/shadow"
        _, _, second = await gate.asked("s2")  # one copy runs: this one isn't copied
        assert events(second, "shadowed")[0]["request_id"] is None
        release.set()
        copy = await gate.record("s1/shadow")
        assert copy["ledger"]["key_id"] is None
        assert copy["ledger"]["key_name"] == "route:auto"
        assert copy["ledger"]["cost_microusd"] == 130
        assert (await gate.idle())["holds_open"] == 0
        shadow = await gate.compared()
        assert await gate.drifted() == []
        assert (shadow["num_copied"], shadow["num_skipped"], shadow["num_same"]) == (1, 1, 1)


async def test_a_shadow_that_runs_when_the_server_stops_leaves_no_hold(routed):
    async def never(call):
        await call.has_left.wait()

    async with routed(engines=("a",), shadow="b") as gate:
        gate.b.script = never
        await gate.asked("s1")
    # leaving the block stops the server: it must end, and the copy's hold with it


@pytest.mark.parametrize("stream", [False, True])
async def test_a_draft_that_is_accepted_is_the_answer(routed, stream):
    async with routed(strategy="cascade", cascade=_cascade(min_logprob=-0.5)) as gate:
        gate.a.script = says("Hel", "lo!", logprob=-0.1)
        status, body, record = await gate.asked("r1", stream=stream)
        assert status == 200
        assert "lo!" in str(body)
        assert "-0.1" not in str(body)
        (verdict,) = events(record, "judged")
        assert (verdict["accepted"], verdict["mean_logprob"]) == (True, pytest.approx(-0.1))
        assert record["ledger"]["model"] == "a"
        assert gate.b.calls == []
        assert gate.a.calls[0].body["logprobs"] is True


@pytest.mark.parametrize("bills", [False, True])
async def test_a_draft_that_is_rejected_is_never_seen_and_both_costs_are_written_down(routed, bills):
    async with routed(strategy="cascade", cascade=_cascade(min_logprob=-0.5, bills_drafts=bills)) as gate:
        gate.a.script = says("Wrong", logprob=-2.0)
        status, body, record = await gate.asked("r1", stream=False)
        assert status == 200
        assert body["choices"][0]["message"]["content"] == "Hello!"
        (verdict,) = events(record, "judged")
        assert not verdict["accepted"]
        (gone,) = events(record, "abandoned")
        assert (gone["code"], gone["cost_microusd"], gone["billed_microusd"]) == ("rejected", 13, 13 * bills)
        assert body["hitsend"]["cost_microusd"] == 130 + 13 * bills
        rows = {row["request_id"]: row for row in await gate.rows()}
        assert set(rows) == {"r1", "r1/draft/a"}
        assert (rows["r1"]["model"], rows["r1"]["cost_microusd"]) == ("b", 130)
        draft = rows["r1/draft/a"]
        assert (draft["model"], draft["cost_microusd"], draft["reason"]) == ("a", 13, "rejected")
        assert (draft["key_name"] == "route:auto") is not bills
        state = await gate.route()
        assert [one["num_rejected"] for one in state["engines"]] == [1, 0]
        assert await gate.drifted() == []


async def test_a_judge_is_asked_on_the_routes_account(routed):
    async with routed(num=3, engines=("a", "b"), strategy="cascade", cascade=_cascade(judge="c")) as gate:
        gate.more[0].script = says("No.")
        _, _, record = await gate.asked("r1")
        assert record["ledger"]["model"] == "b"
        assert "did not say yes" in str(events(record, "judged")[0]["verdicts"])
        gate.more[0].script = says("Yes")
        _, _, record = await gate.asked("r2")
        assert record["ledger"]["model"] == "a"
        assert "Hello!" in gate.more[0].calls[-1].body["messages"][0]["content"]
        judged = next(row for row in await gate.rows() if row["request_id"] == "r2/judge")
        assert (judged["key_name"], judged["model"]) == ("route:auto", "c")


async def test_a_draft_that_fails_is_a_reason_to_go_on(routed):
    async with routed(strategy="cascade", cascade=_cascade(regex="Hello!")) as gate:
        gate.a.script = fails("503 no")
        status, _, record = await gate.asked("r1")
        assert status == 200
        assert events(record, "judged") == []
        assert record["ledger"]["model"] == "b"


async def test_an_estimate_is_that_of_the_engine_that_would_be_asked(routed):
    async with routed(engines=("b", "a"), strategy="cheapest") as gate:
        _, found, _ = await gate.answer(path="/v1/estimate")
        assert (found["model"], found["engine"]["name"]) == ("auto", "engine-a")
        assert "cheapest" in found["engine"]["why"]
        assert gate.a.calls == []


async def test_a_client_that_leaves_ends_the_draft_and_pays_for_what_it_had(routed):
    came = asyncio.Event()

    async def never(call):
        await call.start()
        came.set()
        await call.has_left.wait()

    async with routed(strategy="cascade", cascade=_cascade(regex=".*")) as gate:
        gate.a.script = never
        asking = asyncio.create_task(gate.answer(headers={"x-request-id": "r1"}))
        await came.wait()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        async with asyncio.timeout(10):
            await gate.a.calls[0].has_left.wait()
        record = await gate.record("r1")
        assert record["state"] == "cancelled"
        assert gate.b.calls == []
        assert (await gate.idle())["holds_open"] == 0


async def test_what_is_left_of_the_callers_budget_decides(routed):
    cheap = {"b": {"prices": settings.UpstreamPrices(input=1.0, output=2.0)}}
    spends = {"prompt_tokens": 250, "completion_tokens": 3, "total_tokens": 253}
    async with routed(strategy="budget", budget_left={"a": 0.5}, of_engine=cheap) as gate:
        gate.a.script = says("Hello", usage=spends)
        body = {"name": "k", "limits": {"usd_per_day": "0.0007"}}
        async with gate.session.post(gate.url + "/admin/keys", json=body) as answer:
            assert answer.status in (200, 201), await answer.text()
            key = (await answer.json())["key"]
        headers = {"authorization": f"Bearer {key}"}
        for expected in ("a", "a", "b"):
            found = (await gate.answer(path="/v1/routes/explain", headers=headers, max_tokens=3))[1]
            assert found["target"] == expected, found
            status, body, _ = await gate.answer(headers=headers, max_tokens=3)
            assert status == 200, body


@pytest.mark.parametrize(("passes", "kwargs"), [(("chat_template_kwargs",), {"enable_thinking": False}), ((), None)])
async def test_a_route_decides_about_thoughts_where_the_engine_can_be_told(routed, passes, kwargs):
    async with routed(engines=("a",), thinking="off", of_engine={"a": {"passes": passes}}) as gate:
        _, body, _ = await gate.answer(path="/v1/chat/completions")
        assert gate.a.calls[0].body.get("chat_template_kwargs") == kwargs
        assert bool(body["hitsend"].get("warnings")) is (kwargs is None)
