"""`hitsend serve --workers 3` without a model: several processes over upstreams, one set of limits, one bill, one
state. Real processes and sockets."""

import asyncio
import json
import os
import signal
from contextlib import asynccontextmanager

import aiohttp
import pytest

from tests.journeys.test_kills import rows
from tests.journeys.test_workers import metric
from tests.mock_upstream import good, mock_upstream
from tests.served import descendants, serving, those_left, until

pytestmark = pytest.mark.slow  # processes

NUM = 3
READY = "hitsend is ready: near at"
"""Said once all of them serve."""
HI = {"model": "near", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}


def words(mock, *more):
    engine = {"kind": "openai", "name": "there", "base_url": mock.url, "models": {"near": "far"}}
    engine |= {"prices": {"input": 1, "output": 2}, "counts_prompts": "bytes"}
    told = ("engine.model=none", f"engines={json.dumps([engine])}", *more)
    return ("--workers", str(NUM), *(word for one in told for word in ("--set", one)))


async def asked(url, number, **fields):
    """So many at once, each on a connection of its own: they reach every process, all but surely."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def one():
            async with session.post(url + "/v1/chat/completions", json=HI | fields) as answer:
                return answer.status, await answer.text()

        return await asyncio.gather(*(one() for _ in range(number)))


@asynccontextmanager
async def gateways(mock, data, *more):
    """The server, waited for in a thread: the mock has to answer meanwhile."""
    context = serving(*words(mock, *more), data=data)
    served = await asyncio.to_thread(context.__enter__)
    try:
        assert READY in await asyncio.to_thread(until, (data / "server.log").read_text, lambda said: READY in said, 30)
        yield served
    finally:
        await asyncio.to_thread(context.__exit__, None, None, None)


async def test_all_answer_and_whoever_is_asked_tells_the_same(tmp_path):
    async with mock_upstream() as mock, gateways(mock, tmp_path) as served:
        answers = await asked(served.url, 30) + await asked(served.url, 10, stream=True)
        assert {status for status, _ in answers} == {200}
        assert all("Hello!" in text or '"Hel"' in text for _, text in answers)
        await asyncio.to_thread(served.wait_idle)
        found = rows(tmp_path)
        assert [(row["completion_tokens"], row["cost_microusd"]) for row in found.values()] == [(3, 13)] * 40
        for _ in range(NUM):
            text = await asyncio.to_thread(served.text, "/metrics")
            assert metric(text, "hitsend_tokens_billed_total", kind="completion", model="near") == 3 * 40
            assert metric(text, "hitsend_tokens_output_total", engine="there") == 3 * 40
            assert metric(text, "hitsend_engine_up", engine="there") == 1
            assert metric(text, "hitsend_upstream_requests_total", engine="there", outcome="ok") == 40
        state = await asyncio.to_thread(served.state)
        assert (len(state["gateways"]), state["engine"]["model"], state["slots_total"]) == (NUM, None, NUM * 256)


async def test_what_runs_anywhere_is_seen_everywhere_and_ends_with_its_client(tmp_path):
    async def hangs(call):
        await call.start()
        await call.say("Hel")
        await call.has_left.wait()

    async with mock_upstream() as mock, gateways(mock, tmp_path) as served:
        mock.script = hangs
        asking = asyncio.ensure_future(asked(served.url, 9, stream=True))
        async with asyncio.timeout(30):
            while len(mock.calls) < 9:
                await asyncio.sleep(0.02)
        for _ in range(NUM):
            state = await asyncio.to_thread(served.state)
            assert (state["running"], state["holds_open"]) == (9, 9)
            upstream = state["upstreams"]["there"]
            assert (upstream["running"], upstream["slots_total"], upstream["is_ready"]) == (9, NUM * 256, True)
            assert (
                metric(await asyncio.to_thread(served.text, "/metrics"), "hitsend_requests_running", engine="there")
                == 9
            )
        asking.cancel()
        await asyncio.wait({asking})
        assert (await asyncio.to_thread(served.wait_idle))["running"] == 0
        assert mock.num_open == 0


async def test_one_set_of_limits_for_all(tmp_path):
    async def slow(call):
        await asyncio.sleep(0.2)
        await good(call)

    async with mock_upstream() as mock, gateways(mock, tmp_path) as served:
        mock.script = slow
        limits = {"limits": {"requests_per_minute": 7}}
        async with aiohttp.ClientSession() as session, session.patch(served.url + "/admin/limits", json=limits) as done:
            assert done.status == 200, await done.text()
        await asyncio.sleep(2.5)  # a change is honoured within 2 s
        statuses = [status for status, _ in await asked(served.url, 30)]
        assert (statuses.count(200), statuses.count(429)) == (7, 23)


async def test_one_that_dies_is_nobody_elses_loss_and_a_stop_leaves_nothing(tmp_path):
    async with mock_upstream() as mock, gateways(mock, tmp_path) as served:

        def pids():
            return {one["pid"] for one in served.state()["gateways"]}

        before = await asyncio.to_thread(pids)
        os.kill(min(before), signal.SIGKILL)
        after = await asyncio.to_thread(until, pids, lambda now: len(now) == NUM and now != before, 30)
        assert len(after & before) == NUM - 1
        assert {status for status, _ in await asked(served.url, 12)} == {200}
        every = descendants(served.process.pid)
        served.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(served.process.wait, 20)
        assert await asyncio.to_thread(until, lambda: those_left(every), lambda left: not left) == set()
