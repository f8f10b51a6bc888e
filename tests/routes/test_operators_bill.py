"""What a route costs the operator: it is in the ledger whatever happens, and within budgets. Real sockets."""

import asyncio
import json
import time

import aiohttp
import msgspec
import pytest
from sqlalchemy import event
from sqlalchemy.engine import Engine

from hitsend import settings
from hitsend.serve.api.routes import Routes
from hitsend.serve.app import built, running
from tests.batching.conftest import Client, line
from tests.edge import Call
from tests.mock_upstream import good, mock_upstream
from tests.routes.conftest import CHEAP, DEAR, Routed
from tests.routes.test_routed import says
from tests.served import serving

pytestmark = pytest.mark.slow  # servers

NEVER = settings.CascadeSettings(regex="never")


@pytest.fixture
def today():
    """Budgets of a day are to be seen: not when it ends meanwhile."""
    if time.time() % 86_400 > 86_340:
        pytest.skip("the UTC day is about to end, and what was spent with it")


def tree(folder, mocks, **route):
    engines = tuple(
        settings.UpstreamSettings(
            name=f"engine-{name}", base_url=mock.url, models={name: "there"}, prices=prices, retry_share=0.0
        )
        for name, mock, prices in zip("ab", mocks, (CHEAP, DEAR), strict=True)
    )
    return settings.Settings(
        server=settings.ServerSettings(data_dir=str(folder)),
        engine=settings.EngineSettings(model="none"),
        engines=engines,
        routes=(settings.RouteSettings(**{"model": "auto", "engines": ("a", "b")} | route),),
    )


async def test_a_client_that_leaves_while_a_draft_is_written_down_loses_nothing_of_it(tmp_path):
    async with mock_upstream() as a, mock_upstream() as b:
        async with built(tree(tmp_path, (a, b), strategy="cascade", cascade=NEVER)) as services:
            call = Call(Routes(services), "/v1/chat/completions", _body(), ((b"x-request-id", b"r1"),), None)

            def leave(_connection, _cursor, statement, parameters, *_):
                if statement.startswith("INSERT INTO ledger") and "r1/draft/a" in repr(parameters):
                    call.leave()

            event.listen(Engine, "before_cursor_execute", leave)
            try:
                await call.run()
            finally:
                event.remove(Engine, "before_cursor_execute", leave)
            assert b.calls == [], "nobody was there any more"
            row = json.loads(await services.records.get("r1/draft/a"))["ledger"]
        assert (row["prompt_tokens"], row["completion_tokens"], row["reason"]) == (7, 3, "rejected")


def _body():
    return {"model": "auto", "messages": [{"role": "user", "content": "hi"}]}


async def seen(gate, num):
    """Wait until so many copies have ended, or were never sent."""
    async with asyncio.timeout(20):
        while True:
            shadow = (await gate.route())["shadow"]
            if shadow["num_copied"] + shadow["num_skipped"] == num:
                return
            await asyncio.sleep(0.01)


async def test_what_copies_may_cost_on_a_day_is_bounded_also_after_a_restart(routed, today):
    fields = {"engines": ("a",), "shadow": "b", "operator_usd_per_day": 0.0012}
    async with routed(**fields) as gate:
        for number in range(10):
            await gate.asked(f"s{number}")
            await seen(gate, number + 1)
        rows = [row for row in await gate.rows() if row["key_name"] == "route:auto" and row["completion_tokens"]]
        assert 1 <= len(rows) == len(gate.b.calls) <= 9, "as long as the rest is enough for a prompt and a word"
        shadow = (await gate.route())["shadow"]
        assert (shadow["num_copied"], shadow["num_skipped"], shadow["num_failed"]) == (len(rows), 10 - len(rows), 0)
        assert await gate.drifted() == []
    async with routed(**fields) as gate:
        await gate.asked("again")
        await seen(gate, 1)
        assert gate.b.calls == []


async def test_without_anything_left_nobody_drafts_for_nothing(routed, today):
    rule = {"strategy": "cascade", "cascade": NEVER, "operator_usd_per_day": 0.000001}
    async with routed(**rule) as gate:
        assert (await gate.asked("r1"))[0] == 200
        assert len(gate.a.calls) == 1
        status, _, record = await gate.asked("r2")
        assert (status, record["ledger"]["model"]) == (200, "b")
        assert len(gate.a.calls) == 1
        (why,) = [one["reason"] for one in record["events"] if one["type"] == "routed"]
        assert "no drafts" in why
        assert (await gate.explain())["order"] == ["b"]


async def test_a_judge_that_cannot_be_paid_rejects(routed):
    cascade = settings.CascadeSettings(judge="c", bills_drafts=True)
    async with routed(num=3, engines=("a", "b"), strategy="cascade", cascade=cascade, operator_usd_per_day=0.0) as gate:
        status, _, record = await gate.asked("r1")
        assert (status, record["ledger"]["model"]) == (200, "b")
        assert gate.more[0].calls == []
        (verdict,) = [one["verdicts"]["judge"] for one in record["events"] if one["type"] == "judged"]
        assert verdict.startswith("rejected: the judge failed")


async def test_the_budget_for_everybody_counts_what_nobody_pays_for(routed, today):
    """It is counted as the ledger has it: a restart finds nothing that wasn't known before."""
    async with routed(strategy="cascade", cascade=NEVER, shadow="b") as gate:
        async with gate.session.patch(gate.url + "/admin/limits", json={"limits": {"usd_per_day": 1}}) as answer:
            assert answer.status == 200, await answer.text()
        async with gate.session.post(gate.url + "/admin/keys", json={"name": "k", "role": "admin"}) as answer:
            gate.session.headers["authorization"] = f"Bearer {(await answer.json())['key']}"
        await gate.asked("r1")
        assert (await gate.compared())["num_compared"] == 1
        await gate.idle()
        total = sum(row["cost_microusd"] for row in await gate.rows())
        assert total == 13 + 130 + 130
        metrics = await gate.text("/metrics")
        (used,) = [row for row in metrics.splitlines() if row.startswith('hitsend_budget_used_microusd{window="day"}')]
        assert float(used.split()[1]) == total


async def test_a_line_of_a_batch_that_a_crash_cut_off_pays_for_its_draft_once(tmp_path):
    async with mock_upstream() as a, mock_upstream() as b, aiohttp.ClientSession() as session:
        came = asyncio.Event()

        async def never(call):
            came.set()
            await call.has_left.wait()

        a.script, b.script = says("Wrong"), never
        engines = [_engine("a", a.url, 1.0), _engine("b", b.url, 10.0)]
        told = ("engine.model=none", f"engines={json.dumps(engines)}", f"routes={json.dumps([_route()])}")
        words = [word for one in told for word in ("--set", one)]
        with serving(*words, data=tmp_path) as served:
            batch = await Client(session, served.url).begin(line("x", model="auto", stop=None))
            async with asyncio.timeout(30):
                await came.wait()
            served.kill()
        b.script = good
        again = tree(tmp_path, (a, b), strategy="cascade", cascade=msgspec.structs.replace(NEVER, bills_drafts=True))
        async with running(again) as server:
            batch = await Client(session, server.base_url).until(batch)
            assert batch["request_counts"] == {"total": 1, "completed": 1, "failed": 0}
            found = await Routed(server.base_url, session, (a, b)).rows()
        rows = {row["request_id"].removeprefix(batch["id"]): row for row in found}
        assert len(a.calls) == 2, "the draft was asked for anew"
        paid = {name: row["cost_microusd"] for name, row in rows.items() if row["key_name"] != "route:auto"}
        assert paid == {"-1": 0, "-1/draft/a": 13, "-1-2": 130}
        assert rows["-1-2/draft/a"]["key_name"] == "route:auto"
        assert rows["-1"]["reason"] == "recovered_after_crash"


def _engine(name, url, price):
    prices = {"input": price, "output": 2 * price}
    return {"kind": "openai", "name": name, "base_url": url, "models": {name: "there"}, "prices": prices}


def _route():
    cascade = {"regex": "never", "bills_drafts": True}
    return {"model": "auto", "engines": ["a", "b"], "strategy": "cascade", "cascade": cascade}


async def test_a_copy_lives_no_longer_than_a_request(routed):
    async def pings(call):
        await call.start()
        await call.say("Hel")
        while not call.has_left.is_set():
            await call.raw(b": still here\n\n")
            await asyncio.sleep(0.02)

    async with routed(engines=("a",), shadow="b", stream={"request_timeout_s": 0.5}) as gate:
        gate.b.script = pings
        await gate.asked("s1")
        copy = await gate.record("s1/shadow")
        assert (copy["state"], copy["ledger"]["completion_tokens"]) == ("cancelled", 1)
        assert copy["error"]["code"] == "deadline_exceeded"
        assert (await gate.idle())["holds_open"] == 0
        assert (await gate.route())["shadow"]["num_failed"] == 1
        assert gate.b.calls[0].has_left.is_set()
