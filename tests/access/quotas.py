"""The same quota twice, in memory and in a real server, behind one clock that a test moves: what both must do alike."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from hitsend.serve.access.memory import MemoryQuota
from hitsend.serve.access.outage import UnreachablePolicy
from hitsend.serve.access.scripts import Scripts
from hitsend.serve.access.valkey import ValkeyQuota
from tests.access.valkey_server import Server

HAND_SET = "local function clock() return tonumber(redis.call('GET', '{t}:test-now')) end\n"
"""Instead of the server's own clock, in these tests only."""


class HandClock:
    """Time that moves only when told, here and (where there is one) in the server; both clocks tell the same."""

    def __init__(self, server: Server | None = None, us: int = 1_800_000_000_000_000) -> None:
        self.us = us
        self._server = server
        self.set(us)

    def now(self) -> float:
        return self.us / 1_000_000

    def wall(self) -> float:
        return self.us / 1_000_000

    def set(self, us: int) -> None:
        self.us = us
        if self._server is not None:
            self._server.client.set("{t}:test-now", us)

    def advance(self, seconds: float) -> None:
        self.set(self.us + round(seconds * 1_000_000))


@contextlib.asynccontextmanager
async def in_valkey(
    server: Server,
    spent: Any,
    *,
    clock: HandClock | None = None,
    prefix: str = "t",
    lease_s: float = 30.0,
    timeout_s: float = 5.0,
    policy: UnreachablePolicy | None = None,
) -> AsyncIterator[ValkeyQuota]:
    """One gateway's quota. Without a clock it runs on the server's own, as in production."""
    from hitsend.core.clock import SystemClock

    here = clock or SystemClock()
    scripts = Scripts(server.url, prefix, timeout_s, here, clock_source=HAND_SET if clock else None)
    quota = ValkeyQuota(scripts, here, spent, lease_s, policy or UnreachablePolicy())
    await quota.start()
    try:
        yield quota
    finally:
        await quota.stop()


@contextlib.asynccontextmanager
async def opened(kind: str, server: Server | None, spent: Any) -> AsyncIterator[tuple[Any, HandClock]]:
    """A quota of either kind, and the clock that it goes by."""
    clock = HandClock(server)
    if kind == "memory":
        yield MemoryQuota(clock, spent), clock
    else:
        async with in_valkey(server, spent, clock=clock) as quota:
            yield quota, clock
