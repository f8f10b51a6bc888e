"""Workers AI: its codes, its oddities and its neurons, against an emulator on a real socket."""

import asyncio
import time

import pytest

from hitsend.core.errors import ConfigError
from hitsend.core.request import Message, Principal, Usage
from hitsend.serve.usage.pricing import PriceBook, neurons_micro
from hitsend.settings_upstreams import WorkersAISettings
from hitsend.testing import FakeClock
from tests.upstream.asking import ask, engine_of, request_of
from tests.upstream.conftest import gateway
from tests.upstream.workers_ai import ACCOUNT, CODES, KEY, Emulator

QWEN = "@cf/qwen/qwen3.8-27b"


def settings_of(mock, **fields):
    root = mock.url.removesuffix("/v1")
    fields = {"models": {"near": QWEN}, "base_url": root + ACCOUNT, "stall_timeout_s": 20.0} | fields
    return WorkersAISettings(name="cf", **fields)


async def settled(gate, request_id):
    """The ledger's row, once it stands."""
    for _ in range(1000):
        row = (await gate.get(f"/inspect/requests/{request_id}")).get("ledger")
        if row is not None:
            return row
        await asyncio.sleep(0.02)
    raise AssertionError("no row")


@pytest.fixture
def emulator(mock):
    mock.script = Emulator()
    return mock.script


@pytest.mark.parametrize("route", ["openai", "native"])
async def test_every_code_has_its_own_reaction(mock, emulator, route):
    for code, (status, _, ours, may_repeat) in CODES.items():
        async with engine_of(settings_of(mock, route=route), key=KEY) as engine:
            emulator.fails, emulator.calls[:] = code, []
            answer = await ask(engine)
            assert (code, answer.error.code) == (code, ours)
            assert len(emulator.calls) == (2 if may_repeat else 1), (code, status)
            assert str(code) in answer.error.message
            assert answer.produced.usage.total_tokens == 0 or ours == "engine_timeout", (code, "it did no work")


async def test_the_days_end_is_waited_for_and_nothing_is_asked_before(mock, emulator):
    clock = FakeClock(wall=20_000 * 86_400.0 + 80_000.0)
    async with engine_of(settings_of(mock), clock=clock, key=KEY) as engine:
        emulator.fails = 3036
        first = await ask(engine)
        assert (first.error.code, first.error.retry_after_s) == ("insufficient_quota", 6_400.0)
        emulator.fails = None
        clock.advance(6_399.0)
        again = await ask(engine)
        assert (again.error.code, again.error.retry_after_s, len(emulator.calls)) == ("insufficient_quota", 1.0, 1)
        assert engine.state().is_ready is False
        clock.advance(2.0)
        assert (await ask(engine)).text == "Hello!"


async def test_no_capacity_is_no_fault_of_its_own(mock, emulator):
    async with engine_of(settings_of(mock, breaker_failures=1, retry_share=0.0), key=KEY) as engine:
        emulator.fails = 3040
        for _ in range(3):
            assert (await ask(engine)).error.code == "server_overloaded"
        emulator.fails = None
        assert (await ask(engine)).text == "Hello!", "the breaker stayed closed"


FORMS = {
    "openai": ("Hello!", ["stop"]),
    "odd": ("123.10", ["stop"]),
    "legacy": ("Hello7", ["stop"]),
    "whole": ("Hello7", ["stop"]),
    "reasoning": ("Hello!", ["stop"]),
}


@pytest.mark.parametrize("route", ["openai", "native"])
async def test_every_form_of_an_answer_is_the_same_answer(mock, emulator, route):
    async with engine_of(settings_of(mock, route=route), key=KEY) as engine:
        for form, (text, reasons) in FORMS.items():
            emulator.form = form
            answer = await ask(engine)
            assert (form, answer.text, answer.reasons, answer.error) == (form, text, reasons, None)
            assert (answer.produced.usage.completion_tokens, answer.produced.is_estimate) == (500, False)
        for form in ("tools", "tools_stop"):
            emulator.form = form
            answer = await ask(engine)
            assert answer.reasons == ["tool_calls"], form
            assert [(call.name, call.arguments) for call in answer.calls if call.name] == [("look", '{"at":"it"}')], (
                form
            )
            assert answer.calls[0].id
    path = f"{ACCOUNT}/v1/chat/completions" if route == "openai" else f"{ACCOUNT}/run/{QWEN}"
    assert {one for one, _ in emulator.calls} == {path}


async def test_frames_that_break_off_are_an_error_and_so_is_a_failure_inside_a_200(mock, emulator):
    async with engine_of(settings_of(mock, retry_share=0.0), key=KEY) as engine:
        emulator.form = "legacy_cut"
        answer = await ask(engine)
        assert (answer.text, answer.reasons, answer.error.code) == ("Hel", [], "engine_failed")
        emulator.form = "failed_whole"
        answer = await ask(engine)
        assert (answer.text, answer.error.code) == ("", "server_overloaded")


async def test_so_many_tokens_as_were_asked_for_are_length(mock, emulator):
    async with engine_of(settings_of(mock), key=KEY) as engine:
        emulator.form = "legacy"
        assert (await ask(engine, max_tokens=500)).reasons == ["length"]


async def test_it_is_always_told_where_to_end_and_not_to_think(mock, emulator):
    async with engine_of(settings_of(mock), key=KEY) as engine:
        await ask(engine)
        sent = emulator.calls[-1][1]
        assert (sent["model"], sent["max_tokens"]) == (QWEN, 600)
        assert sent["chat_template_kwargs"] == {"enable_thinking": False}
        for fields, thinks in (
            ({"template_kwargs": {"enable_thinking": True}}, True),
            ({"reasoning_effort": "low"}, True),
            ({"reasoning_effort": "none"}, False),
        ):
            await ask(engine, **fields)
            assert emulator.calls[-1][1]["chat_template_kwargs"]["enable_thinking"] is thinks, fields
    async with engine_of(settings_of(mock, models={"near": "@cf/meta/llama-3.2-1b-instruct"}), key=KEY) as engine:
        await ask(engine)
        assert "chat_template_kwargs" not in emulator.calls[-1][1], "it wouldn't know the field"
    fields = {"thinking_by_default": True, "reject_if_busy": True, "route": "native"}
    async with engine_of(settings_of(mock, **fields), key=KEY) as engine:
        await ask(engine)
        sent = emulator.calls[-1][1]
        assert "chat_template_kwargs" not in sent
        assert "model" not in sent
        assert sent["options"] == {"rejectIfBusy": True}


async def test_a_conversation_stays_together_and_tenants_apart(mock, emulator):
    first = (Message("system", "s"), Message("user", "one"))
    later = (*first, Message("assistant", "a"), Message("user", "two"))
    mine, other = Principal(org="a"), Principal(org="b")
    async with engine_of(settings_of(mock), key=KEY) as engine:
        for messages, principal in ((first, mine), (later, mine), (first, other)):
            await ask(engine, request_of(messages=messages, principal=principal))
    sent = [call.headers()["x-session-affinity"] for call in mock.calls]
    assert sent[0] == sent[1] != sent[2]


def test_neurons_of_the_worked_example_are_exact():
    book = PriceBook(elsewhere={"near": ("workers_ai", QWEN)}, now=lambda: 1_796_000_000.0)
    price = book.find("near", is_local=False)
    assert neurons_micro(price, Usage(1000, 500)) == 1000 * 40_909 + 500 * 290_909 == 186_363_500
    assert neurons_micro(price, Usage(4000, 0)) + neurons_micro(price, Usage(0, 16_000)) == neurons_micro(
        price, Usage(4000, 16_000)
    )


@pytest.mark.slow  # a server of its own
async def test_a_row_has_neurons_beside_dollars_and_the_free_plan_ends_at_the_days_allowance(
    tmp_path, mock, emulator, monkeypatch
):
    if time.time() % 86_400 > 86_280:
        pytest.skip("the UTC day is about to end, and what is left of it with it")
    monkeypatch.setenv("CF_TEST_TOKEN", KEY)
    engine = settings_of(mock, api_key_env="CF_TEST_TOKEN", max_tokens=600)
    async with gateway(tmp_path, mock, engine=engine) as gate:
        status, body, _ = await gate.answer()
        assert status == 200
        row = await settled(gate, body["hitsend"]["request_id"])
        assert (row["neurons_micro"], row["cost_microusd"], row["is_estimate"]) == (186_363_500, 2050, False)
        emulator.usage = {"prompt_tokens": 1000, "completion_tokens": 5000}
        assert (await gate.answer(max_tokens=32_000))[0] == 200
        status, body, answer = await gate.answer(max_tokens=32_000)
        assert (status, body["error"]["code"]) == (429, "insufficient_quota"), "more than is left of the day"
        assert "00:00 UTC" in body["error"]["message"]
        assert int(answer.headers["retry-after"]) <= 86_400
        emulator.form = "failed_whole"
        status, body, _ = await gate.answer(stream=True)
        assert status == 503, "a failure inside a 200 still becomes a status"
        emulator.form = "hangs"
        async with asyncio.timeout(60), gate.ask(stream=True, headers={"x-request-id": "left"}) as answer:
            seen = b""
            while b"two" not in seen:
                seen += await answer.content.readexactly(1)
            answer.close()
        row = await settled(gate, "left")
        assert (row["is_estimate"], row["completion_tokens"]) == (True, 2)
        assert row["neurons_micro"] == row["prompt_tokens"] * 40_909 + 2 * 290_909
        assert row["prompt_tokens"] > 0, "what it read is billed there"


@pytest.mark.slow  # a server of its own
async def test_a_model_of_the_paid_plan_stops_the_start_on_the_free_one(tmp_path, mock, emulator):
    for plan, served in (("free", False), ("paid", True)):
        engine = settings_of(mock, models={"near": "@cf/zai-org/glm-5.3"}, plan=plan)
        if served:
            async with gateway(tmp_path, mock, engine=engine):
                continue
        with pytest.raises(ConfigError, match="paid plan"):
            async with gateway(tmp_path, mock, engine=engine):
                pass
