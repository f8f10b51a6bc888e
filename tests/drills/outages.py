"""PostgreSQL is shut down at once (`pg_ctl -m immediate`) while requests settle, and the server lives through it."""

import asyncio
import json
import os
import random
import signal
import tempfile
from typing import Any

import aiohttp

from tests.drills.crashes import BILLED, NOTHING, Launcher, Tally, ask, judge, ledger
from tests.postgres import Postgres

UNCONFIRMED = "unconfirmed"
CLIENTS = 6
AGAIN_S = 30.0


async def outages(at: Launcher, server: Postgres, url: str, times: int) -> Tally:
    """Requests all the time, so many outages; then count what everybody was told against the ledger."""
    tally = Tally()
    expected: dict[str, set[str]] = {}
    draw = random.Random(times)
    is_over = asyncio.Event()
    with tempfile.TemporaryDirectory(prefix="hitsend-drill-") as data:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as session:
            pid, port = await at.start(url, data, None)
            clients = [asyncio.create_task(_client(session, port, i, expected, is_over)) for i in range(CLIENTS)]
            for _ in range(times):
                await asyncio.sleep(draw.uniform(0.05, 0.4))
                await asyncio.to_thread(server.immediate)
                await asyncio.sleep(draw.uniform(0.0, 0.3))
                await asyncio.to_thread(server.start)
                tally.lives += 1
                if not await _until(session, port, "/readyz", lambda shown: shown["status"] == "ready"):
                    tally.faults.append(f"not ready {AGAIN_S} s after outage {tally.lives}")
            is_over.set()
            await asyncio.gather(*clients)
            if not await ask(session, port, "after-all"):
                tally.faults.append("not served after the last outage")
            expected["after-all"] = {BILLED}
            if not await _until(session, port, "/inspect/state", lambda shown: shown["holds_open"] == 0):
                tally.faults.append("rows are still owed")
            rows, holds = await ledger(url)
            os.kill(pid, signal.SIGTERM)
            await at.reap(pid)
    tally.rows = len(rows)
    tally.faults += judge(rows, holds, expected)
    return tally


async def _client(
    session: aiohttp.ClientSession, port: int, index: int, expected: dict[str, set[str]], is_over: asyncio.Event
) -> None:
    number = 0
    while not is_over.is_set():
        request_id = f"client-{index}-{number}"
        is_told = await ask(session, port, request_id)
        expected[request_id] = {BILLED} if is_told else {NOTHING, UNCONFIRMED}
        number += 1
        await asyncio.sleep(0.005 if is_told else 0.1)


async def _until(session: aiohttp.ClientSession, port: int, path: str, is_good: Any) -> bool:
    for _ in range(int(AGAIN_S / 0.05)):
        async with session.get(f"http://127.0.0.1:{port}{path}") as answer:
            if is_good(json.loads(await answer.read())):
                return True
        await asyncio.sleep(0.05)
    return False
