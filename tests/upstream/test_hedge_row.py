"""What the server that was left may bill: a row and a record of its own, the operator's, within the budgets. Real
sockets, a whole server."""

import asyncio
from contextlib import asynccontextmanager

import aiohttp
import pytest

from hitsend import settings
from hitsend.cli.course import course
from hitsend.serve.app import running
from tests.mock_upstream import USAGE, good, mock_upstream
from tests.routes.conftest import Routed
from tests.upstream.test_hedge import late, refuses, silent, silent_after_its_head

pytestmark = pytest.mark.slow  # a server each

HEDGE = {"hedge_after_s": 0.02, "retry_share": 1.0}
LOST = "r1/hedge/near"


@asynccontextmanager
async def hedged(folder, *scripts, routes=(), **fields):
    """A server over one engine with two servers, which play `scripts` in the order in which they are asked."""
    async with mock_upstream() as one, mock_upstream() as other:
        calls = []

        async def play(call):
            calls.append(call)
            await scripts[min(len(calls), len(scripts)) - 1](call)

        one.script = other.script = play
        prices = settings.UpstreamPrices(input=10.0, output=20.0)
        given = {"base_urls": (one.url, other.url), "models": {"near": "far"}, "prices": prices} | HEDGE | fields
        tree = settings.Settings(
            server=settings.ServerSettings(data_dir=str(folder)),
            engine=settings.EngineSettings(model="none"),
            engines=(settings.UpstreamSettings(name="gpu", **given),),
            routes=routes,
        )
        async with running(tree) as server, aiohttp.ClientSession() as session:
            gate = Routed(server.base_url, session, (one, other))
            gate.played = calls
            yield gate


async def lost_row(gate):
    """Of the run that was left, once it is written."""
    for _ in range(500):
        found = [row for row in await gate.rows() if "/hedge/" in row["request_id"]]
        if found:
            break
        await asyncio.sleep(0.02)
    (row,) = found
    return row


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("first", [silent, silent_after_its_head])
async def test_who_was_left_has_a_row_of_nobodys_and_is_left_at_once(tmp_path, first, stream):
    async with hedged(tmp_path, first, good) as gate:
        status, _, record = await gate.asked("r1", model="near", stream=stream)
        left_s = asyncio.get_running_loop().time()
        async with asyncio.timeout(10):
            await gate.played[0].has_left.wait()
        assert asyncio.get_running_loop().time() - left_s < 0.25
        own = record["ledger"]
        assert (status, own["prompt_tokens"], own["completion_tokens"], own["is_estimate"]) == (200, 7, 3, False)
        row = await lost_row(gate)
        held = next(one for one in record["events"] if one["type"] == "reserved")["input_tokens"]
        assert (row["request_id"], row["engine"], row["model"], row["reason"]) == (LOST, "gpu", "near", "hedged")
        assert (row["key_name"], row["is_estimate"]) == ("engine:gpu", True)
        assert (0 < row["prompt_tokens"] <= held, row["completion_tokens"]) == (True, 0)
        assert row["cost_microusd"] == 10 * row["prompt_tokens"]
        (event,) = [one for one in record["events"] if one["type"] == "hedged"]
        assert (event["request_id"], event["was_first"]) == (LOST, True)
        assert event["at_ms"] - event["started_ms"] >= 20
        assert (await gate.record(LOST))["ledger"]["cost_microusd"] == row["cost_microusd"]
        assert any(LOST in line for line in course(record, str))
        assert await gate.drifted() == []


async def test_the_second_may_be_the_one_that_is_left(tmp_path):
    asked = asyncio.Event()

    async def second(call):
        asked.set()
        await call.has_left.wait()

    async with hedged(tmp_path, late(asked), second) as gate:
        status, body, record = await gate.asked("r1", model="near")
        assert (status, body["choices"][0]["message"]["content"]) == (200, "late")
        assert (await lost_row(gate))["reason"] == "hedged"
        assert [one["was_first"] for one in record["events"] if one["type"] == "hedged"] == [False]


async def test_who_refused_did_no_work(tmp_path):
    refused = asyncio.Event()

    async def second(call):
        await refuses(call)
        refused.set()

    async with hedged(tmp_path, late(refused), second) as gate:
        assert (await gate.asked("r1", model="near"))[0] == 200
        await gate.idle()
        assert [row["request_id"] for row in await gate.rows()] == ["r1"]


async def test_an_error_in_place_of_its_first_word_leaves_the_answer_to_the_other(tmp_path):
    refused = asyncio.Event()

    async def second(call):
        await call.start()
        await call.event({"error": {"code": 502}})
        refused.set()

    async with hedged(tmp_path, late(refused), second) as gate:
        status, body, _ = await gate.asked("r1", model="near")
        assert (status, body["choices"][0]["message"]["content"]) == (200, "late")


async def test_a_client_that_leaves_pays_for_one_and_the_operator_for_the_other(tmp_path):
    async with hedged(tmp_path, silent, silent_after_its_head) as gate:
        asking = asyncio.ensure_future(gate.answer(model="near", headers={"x-request-id": "r1"}, stream=True))
        async with asyncio.timeout(10):
            while len(gate.played) < 2:
                await asyncio.sleep(0.005)
            asking.cancel()
            began = asyncio.get_running_loop().time()
            await asyncio.wait({asking})
            for call in gate.played:
                await call.has_left.wait()
        assert asyncio.get_running_loop().time() - began < 0.25
        row = await lost_row(gate)
        own = (await gate.record("r1"))["ledger"]
        assert (own["key_name"], own["is_estimate"]) == ("local", True)
        assert (row["key_name"], row["prompt_tokens"]) == ("engine:gpu", own["prompt_tokens"])


async def test_the_budgets_of_everybody_and_of_its_route_count_it(tmp_path):
    route = settings.RouteSettings(model="auto", engines=("near",), operator_usd_per_day=0.5)
    async with hedged(tmp_path, silent, good, routes=(route,)) as gate:
        async with gate.session.patch(gate.url + "/admin/limits", json={"limits": {"usd_per_day": 1}}) as answer:
            assert answer.status == 200, await answer.text()
        async with gate.session.post(gate.url + "/admin/keys", json={"name": "k", "role": "admin"}) as answer:
            gate.session.headers["authorization"] = f"Bearer {(await answer.json())['key']}"
        await gate.asked("r1")
        row = await lost_row(gate)
        assert row["key_name"] == "route:auto", "what the route may cost the operator counts it too"
        await gate.idle()
        total = sum(row["cost_microusd"] for row in await gate.rows())
        assert total == 10 * row["prompt_tokens"] + 10 * USAGE["prompt_tokens"] + 20 * USAGE["completion_tokens"]
        metrics = await gate.text("/metrics")
        (used,) = [row for row in metrics.splitlines() if row.startswith('hitsend_budget_used_microusd{window="day"}')]
        assert float(used.split()[1]) == total


async def test_a_stop_waits_for_the_row(tmp_path):
    async with hedged(tmp_path, silent, good) as gate:
        await gate.asked("r1", model="near")
    async with hedged(tmp_path, good) as gate:
        assert (await lost_row(gate))["request_id"] == LOST
