"""Two servers on one PostgreSQL database: ids are used once between them, and one buries the other's dead."""

import asyncio
import os
import signal

import aiohttp
import pytest

from hitsend.core.clock import SystemClock
from hitsend.core.errors import InvalidRequest
from hitsend.core.request import Usage
from hitsend.serve.usage.ledger import RECOVERED, Settlement
from tests.drills.crashes import ask, launcher, ledger
from tests.usage.storage import storage, wanted

pytestmark = pytest.mark.slow

ELSEWHERE = "another-boot:1:1:1:x"


async def reasons(url, count):
    """Reasons by request, once so many rows stand and no hold."""
    for _ in range(600):
        rows, holds = await ledger(url)
        if len(rows) >= count and not holds:
            break
        await asyncio.sleep(0.05)
    return {row["request_id"]: row["reason"] for row in rows}


async def test_a_living_gateway_recovers_a_dead_one_s_hold(postgres_server, tmp_path):
    url = await asyncio.to_thread(postgres_server.make)
    async with launcher() as at, aiohttp.ClientSession() as session:
        dying, port = await at.start(url, str(tmp_path / "a"), "mid-stream")
        living, other = await at.start(url, str(tmp_path / "b"), None)
        assert await ask(session, other, "whole")
        assert not await ask(session, port, "doomed-1")
        assert await at.reap(dying)
        assert await reasons(url, 2) == {"whole": "stop", "doomed-1": RECOVERED}
        assert await ask(session, other, "after")
        os.kill(living, signal.SIGTERM)
        assert await at.reap(living)


async def test_a_hold_from_another_machine_is_recovered_after_its_lease_and_not_before(postgres_server, tmp_path):
    url = await asyncio.to_thread(postgres_server.make, "filled")
    async with storage(url, SystemClock(), ELSEWHERE) as remote, launcher() as at:
        await remote.ledger.reserve(wanted("remote"))  # for the default lease of 30 s
        pid, _ = await at.start(url, str(tmp_path), None)
        await asyncio.sleep(2)
        assert (await ledger(url))[1] == 1
        sooner = "UPDATE holds SET lease_until = extract(epoch from now()) + 1"
        await remote.database.write(lambda c: c.exec_driver_sql(sooner))
        assert await reasons(url, 1) == {"remote": RECOVERED}
        os.kill(pid, signal.SIGTERM)
        assert await at.reap(pid)


async def test_an_id_is_used_once_between_gateways(new_url):
    url = await asyncio.to_thread(new_url)
    async with storage(url, owner="a:1:1:1:x") as one, storage(url, owner="b:1:1:1:x") as two:
        for number in range(20):
            tries = await asyncio.gather(
                *(opened.ledger.reserve(wanted(f"r{number}")) for opened in (one, two)), return_exceptions=True
            )
            refused = [isinstance(tried, InvalidRequest) for tried in tries]
            assert sorted(refused) == [False, True], tries
            owner = (one, two)[refused.index(False)]
            await owner.ledger.settle(tries[refused.index(False)], Settlement(Usage(1, 1), "stop"))
        assert len(await one.rows()) == 20
        assert await two.holds() == []
