"""One gateway of a race, as a process of its own: `racing_gateway.py URL NAME NUM LIMITS_JSON`.

Starts at a line on stdin, prints how many of its NUM requests at once were let pass, holds them until a second line,
then settles and prints `done`.
"""

import asyncio
import json
import sys

from hitsend.core.clock import SystemClock
from hitsend.core.errors import LimitError
from hitsend.core.limits import Level, Limits
from hitsend.serve.access.outage import UnreachablePolicy
from hitsend.serve.access.quota import Used
from hitsend.serve.access.scripts import Scripts
from hitsend.serve.access.valkey import ValkeyQuota
from tests.access.books import asking, org


class Nothing:
    """A ledger without rows."""

    async def spent_microusd(self, level: Level, since_day: str) -> int:
        return 0


async def race(url: str, name: str, num: int, limits: dict[str, int]) -> None:
    clock = SystemClock()
    quota = ValkeyQuota(
        Scripts(url, "race", 20.0, clock), clock, Nothing(), 60.0, UnreachablePolicy("closed", "closed")
    )
    await quota.start()
    levels = (Level("global", (), Limits(parallel_requests=10_000)), org(**limits))
    passed = []

    async def one(number: int) -> None:
        try:
            await quota.reserve(asking(f"{name}-{number}", *levels, tokens=(10, 20), held=5))
        except LimitError:
            return
        passed.append(f"{name}-{number}")

    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await asyncio.gather(*(one(number) for number in range(num)))
    assert quota.health().num_outages == 0
    print(len(passed), flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await asyncio.gather(*(quota.settle(request_id, Used(10, 20, 5)) for request_id in passed))
    print("done", flush=True)
    await quota.stop()


if __name__ == "__main__":
    asyncio.run(race(sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])))
