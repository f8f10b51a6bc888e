"""Three gateways, each a whole edge with real account, on one ledger and one server of limits."""

import asyncio
import contextlib

import pytest

from hitsend.core.limits import Level, Limits
from hitsend.serve.access.outage import UnreachablePolicy
from hitsend.serve.database.connection import database_url
from hitsend.serve.usage.report import Spending
from tests.access.books import org
from tests.access.quotas import in_valkey
from tests.api.test_limits_at_the_edge import IN, OUT, Limited
from tests.usage.storage import storage

pytestmark = pytest.mark.slow  # waits for sockets or processes, or tries very many examples

CLOSED = UnreachablePolicy("closed", "closed")


@contextlib.asynccontextmanager
async def gateways(server, folder, *levels: Level, num: int = 3, timeout_s: float = 20.0):
    async with contextlib.AsyncExitStack() as stack:
        opened = await stack.enter_async_context(storage(database_url(None, folder)))
        found = []
        for _ in range(num):
            gateway = Limited(opened, *levels)
            shared = in_valkey(server, Spending(opened.database), timeout_s=timeout_s, lease_s=60, policy=CLOSED)
            gateway.quota = await stack.enter_async_context(shared)
            found.append(gateway)
        yield opened, found


@pytest.mark.parametrize(
    ("limits", "admits"), [({"usd_per_day_microusd": 25 * (IN + 2 * OUT) + 1}, 25), ({"parallel_requests": 11}, 11)]
)
async def test_of_500_requests_to_three_gateways_never_more_pass_than_fit(server, tmp_path, limits, admits):
    levels = (Level("global", (), Limits(requests_per_minute=10_000)), org(**limits))
    async with gateways(server, tmp_path, *levels) as (opened, found):
        for gateway in found:
            gateway.gate.clear()
        calls = [gateway.call(stream=number % 2 == 0) for number in range(167) for gateway in found][:500]
        running = [asyncio.create_task(call.run()) for call in calls]
        async with asyncio.timeout(60):
            while sum(task.done() for task in running) < 500 - admits or sum(one.running for one in found) < admits:
                await asyncio.sleep(0.01)
            for gateway in found:
                gateway.gate.set()
            await asyncio.gather(*running)
        statuses = [call.answer.status for call in calls]
        assert (statuses.count(200), statuses.count(429)) == (admits, 500 - admits)
        assert len(await opened.rows()) == admits
        assert await opened.holds() == []
        assert [gateway.quota.num_open for gateway in found] == [0, 0, 0]
        assert server.client.hget('{t}:level:["org","acme"]', "run") == "0"


async def test_a_closed_limit_is_a_503_that_says_when_to_come_again(own_server, tmp_path):
    async with gateways(own_server, tmp_path, org(requests_per_minute=5), num=1, timeout_s=0.3) as (_, (gateway,)):
        own_server.pause()
        for _ in range(2):
            answer = await gateway.ask()
            assert (answer.status, answer.error["code"]) == (503, "storage_failed")
            assert answer.headers[b"retry-after"] == b"1"
            assert "org acme" in answer.error["message"]
        own_server.resume()
        async with asyncio.timeout(20):
            while not gateway.quota.health().is_up:
                await asyncio.sleep(0.02)
        assert (await gateway.ask()).status == 200
