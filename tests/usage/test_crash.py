"""kill -9 between hold and settle."""

import asyncio
import random
import sys

import pytest

from hitsend.core.clock import SystemClock
from hitsend.serve.usage.ledger import RECOVERED
from tests.usage.storage import storage

pytestmark = pytest.mark.slow  # waits for sockets or processes, or tries very many examples


async def _run_and_kill(url, num_lines):
    """Kill the process after that many confirmations; return all that it gave."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.usage.crashing", url, stdout=asyncio.subprocess.PIPE
    )
    lines = []
    try:
        for _ in range(num_lines):
            async with asyncio.timeout(30):
                lines.append(await child.stdout.readline())
    finally:
        child.kill()
        lines += (await child.stdout.read()).splitlines(keepends=True)
        await child.wait()
    return [line.decode().split() for line in lines if line.endswith(b"\n")]


async def _check(url, num_lines):
    said = await _run_and_kill(url, num_lines)
    held = {words[1] for words in said if words[0] == "held"}
    settled = {words[1]: int(words[2]) for words in said if words[0] == "settled"}
    async with storage(url, SystemClock()) as opened:
        assert await opened.holds() == []
        rows = await opened.rows()
    by_request = {row["request_id"]: row for row in rows}
    assert len(by_request) == len(rows)
    assert held <= by_request.keys()
    for request_id, cost in settled.items():
        assert (by_request[request_id]["cost_microusd"], by_request[request_id]["reason"]) == (cost, "stop")
    for row in rows:
        assert (row["reason"], row["cost_microusd"]) in {("stop", 21), (RECOVERED, 0)}
        assert row["is_estimate"] == (row["reason"] == RECOVERED)
    assert any(row["reason"] == RECOVERED for row in rows)


async def test_a_killed_server_leaves_a_ledger_that_adds_up(new_url):
    await _check(new_url(), 9)
    await _check(new_url(), 140)


@pytest.mark.slow
async def test_a_server_killed_at_any_moment_leaves_a_ledger_that_adds_up(new_url):
    draw = random.Random(7)
    for _ in range(30):
        await _check(new_url(), draw.randrange(1, 400))
