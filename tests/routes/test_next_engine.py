"""When a route goes on: engines that lack their model, and verdicts on several drafts and choices. Real sockets."""

import re

import pytest

from hitsend import settings
from hitsend.core.errors import ConfigError
from tests.mock_upstream import USAGE
from tests.routes.test_routed import fails, says

pytestmark = pytest.mark.slow  # a server each

BOTH = {"reasoning_effort": "high", "thinking_token_budget": 99}


async def test_each_draft_and_each_choice_has_a_verdict_of_its_own(routed):
    async def judge(call):
        await says("No." if "Hello!" in call.body["messages"][0]["content"] else "Yes")(call)

    async def two(call):
        await call.start()
        await call.say("x", index=0)
        await call.say("y", index=1)
        await call.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        await call.finish(usage=USAGE, index=1)

    asked = {"chat_template_kwargs": {"enable_thinking": False}}
    told = {"c": {"passes": ("chat_template_kwargs",)}}
    async with routed(
        num=4, engines=("a", "b", "d"), strategy="cascade", cascade=settings.CascadeSettings(judge="c"), of_engine=told
    ) as gate:
        gate.more[0].script, gate.b.script = judge, says("Good")
        _, _, record = await gate.asked("r1")
        assert record["ledger"]["model"] == "b", "the second draft was judged too"
        assert gate.more[0].calls[0].body | asked == gate.more[0].calls[0].body
        gate.a.script = two
        _, body, record = await gate.asked("r2", n=2)
        assert (record["ledger"]["model"], len(body["choices"])) == ("a", 2)
        judged = [row["request_id"] for row in await gate.rows() if "/judge" in row["request_id"]]
        assert sorted(judged) == ["r1/judge", "r1/judge/2", "r2/judge", "r2/judge/2"]
        assert await gate.drifted() == []


@pytest.mark.parametrize("strategy", ["fallback", "cascade"])
async def test_a_model_that_an_engine_has_not_is_asked_elsewhere(routed, strategy):
    rule = settings.CascadeSettings(regex=".*")
    async with routed(strategy=strategy, cascade=rule) as gate:
        gate.a.script = fails("404 no")
        status, body, record = await gate.asked("r1")
        assert (status, body["choices"][0]["message"]["content"]) == (200, "Hello!")
        assert record["ledger"]["model"] == "b"
        assert (await gate.route())["engines"][0]["error_share"] == 1.0
        gate.b.script = fails("404 no")
        status, body, _ = await gate.asked("r2")
        assert (status, body["error"]["code"]) == (400, "invalid_request")


@pytest.mark.parametrize(
    ("status", "error", "code"),
    [
        ("413 no", {}, "request_too_large"),
        ("400 no", {"message": "prompt is too long: 9 tokens > 8 maximum"}, "context_length_exceeded"),
        ("400 no", {"code": "model_not_found"}, "invalid_request"),
    ],
)
async def test_what_does_not_fit_one_engine_is_asked_of_the_next(routed, status, error, code):
    async def script(call):
        await call.answer(status, {"error": error})

    async with routed() as gate:
        gate.a.script = script
        answered, _, record = await gate.asked("r1")
        assert (answered, record["ledger"]["model"]) == (200, "b")
        gate.b.script = script
        _, body, _ = await gate.asked("r2")
        assert body["error"]["code"] == code


@pytest.mark.parametrize(("lacking", "is_refused"), [("a", True), ("b", False)])
async def test_drafts_that_could_never_be_judged_stop_the_start(routed, lacking, is_refused):
    rule = settings.CascadeSettings(min_logprob=-0.5)
    of_engine = {lacking: {"lacks": ("logprobs",), "unsupported": "ignore"}}
    opened = routed(strategy="cascade", cascade=rule, of_engine=of_engine)
    if not is_refused:
        async with opened as gate:
            assert (await gate.asked("r1"))[0] == 200
        return
    with pytest.raises(ConfigError, match="a gives no logprobs"):
        async with opened:
            pass


@pytest.mark.parametrize(
    ("thinking", "asked", "sent"),
    [
        ("off", {"reasoning_effort": "high"}, {"chat_template_kwargs": {"enable_thinking": False}}),
        ("off", {"thinking_token_budget": 99}, {"chat_template_kwargs": {"enable_thinking": False}}),
        ("on", {"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": True}}),
        ("on", {"thinking_token_budget": 0}, {"chat_template_kwargs": {"enable_thinking": True}}),
        ("on", BOTH, BOTH | {"chat_template_kwargs": {"enable_thinking": True}}),
        ("leave", {"reasoning_effort": "high"}, {"reasoning_effort": "high"}),
    ],
)
async def test_nothing_that_the_client_wished_of_thoughts_goes_past_the_routes_will(routed, thinking, asked, sent):
    told = {"a": {"passes": ("chat_template_kwargs", "thinking_token_budget")}}
    async with routed(thinking=thinking, of_engine=told) as gate:
        status, body, _ = await gate.answer(**asked)
        assert status == 200, body
    wishes = ("chat_template_kwargs", "reasoning_effort", "thinking_token_budget")
    got = {name: value for name, value in gate.a.calls[0].body.items() if name in wishes}
    assert {name: value for name, value in got.items() if name != "chat_template_kwargs" or thinking != "leave"} == sent


async def test_an_engine_that_cannot_be_told_hears_nothing_of_the_clients_wish_either(routed):
    async with routed(thinking="off") as gate:
        status, body, _ = await gate.answer(reasoning_effort="high")
    assert status == 200
    assert "reasoning_effort" not in gate.a.calls[0].body
    assert any("can't be told" in one for one in body["hitsend"]["warnings"])


@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_in_place_of_an_answers_first_word_goes_to_the_next_and_the_last_ones_is_a_status(
    routed, stream
):
    async def script(call):
        await call.start()
        await call.event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        await call.event({"error": {"code": 429, "message": "SECRET"}})

    async with routed() as gate:
        gate.a.script = script
        status, _, record = await gate.asked("r1", stream=stream)
        assert (status, record["ledger"]["model"], record["ledger"]["completion_tokens"]) == (200, "b", 3)
        assert [row["request_id"] for row in await gate.rows()] == ["r1"], "the first one did no work"
        gate.b.script = script
        status, body, record = await gate.asked("r2", stream=stream)
        assert (status, body["error"]["code"], record["ledger"]["cost_microusd"]) == (429, "rate_limit_exceeded", 0)


@pytest.mark.parametrize("path", ["explain", "asked"])
async def test_an_engine_whose_hold_can_never_fit_is_named_and_not_asked(routed, path):
    """The prompt alone is some 100 tokens by its bytes, which the hold has: at 10 USD per million over the day's."""
    async with routed(engines=("b", "a")) as gate:
        body = {"name": "k", "limits": {"usd_per_day": "0.0005"}}
        async with gate.session.post(gate.url + "/admin/keys", json=body) as answer:
            key = (await answer.json())["key"]
        headers = {"authorization": f"Bearer {key}"}
        if path == "explain":
            found = (await gate.answer(path="/v1/routes/explain", headers=headers, max_tokens=3))[1]
            assert (found["target"], found["order"], found["refused"]) == ("a", ["a"], None)
            assert "can never pass" in found["candidates"][0]["unable"]
            assert "usd_per_day" in found["reason"]
        else:
            status, _, _ = await gate.answer(headers=headers, max_tokens=3)
            assert (status, len(gate.a.calls), gate.b.calls) == (200, 1, [])


def without_seconds(text):
    """How long is left of the day goes on while the second one is asked."""
    return re.sub(r"in [0-9.]+ s", "in some s", text)


async def test_what_would_be_refused_is_said(routed):
    async with routed(engines=("b", "a"), unsupported="refuse") as gate:
        keys = []
        for usd in ("0.0005", "0.002"):
            body = {"name": "k", "role": "admin", "limits": {"usd_per_day": usd}}
            async with gate.session.post(gate.url + "/admin/keys", json=body, headers=(keys or [None])[0]) as answer:
                keys.append({"authorization": f"Bearer {(await answer.json())['key']}"})

        async def explained(key, **fields):
            return (await gate.answer(path="/v1/routes/explain", headers=key, max_tokens=3, **fields))[1]

        assert "can never pass" in (await explained(keys[0]))["refused"], "the first one is final there"
        assert "can never pass" in (await explained(keys[0], model="b"))["refused"]
        assert (await explained(keys[0], model="a"))["refused"] is None
        assert (await explained(keys[1]))["refused"] is None
        gate.b.script = says("Hello", usage={"prompt_tokens": 150, "completion_tokens": 3})
        assert (await gate.answer(headers=keys[1], max_tokens=3))[0] == 200
        refused = (await explained(keys[1]))["refused"]
        status, body, _ = await gate.answer(headers=keys[1], max_tokens=3)
        assert (status, body["error"]["code"]) == (429, "insufficient_quota")
        assert without_seconds(refused) == without_seconds(body["error"]["message"])


async def test_where_no_engine_could_ever_hold_it_explain_says_so(routed):
    async with routed(engines=("b", "a")) as gate:
        body = {"name": "k", "limits": {"usd_per_day": "0.00001"}}
        async with gate.session.post(gate.url + "/admin/keys", json=body) as answer:
            headers = {"authorization": f"Bearer {(await answer.json())['key']}"}
        status, body, _ = await gate.answer(path="/v1/routes/explain", headers=headers)
        assert (status, "can never pass" in body["error"]["message"]) == (400, True)
