"""How hard the client itself was pushed: whether it was what limited the figures.

Enters: an event loop that something runs on. Leaves: a `Strain`. Always true: lag is measured by a timer of this loop,
CPU by the process's own clock (one core is 100 %); `is_limit` is said when either leaves too little room for
the figures to be the server's. Next: `report.py`.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

EVERY_S = 0.02
LAG_MS = 20.0
CPU_PERCENT = 85.0
MOST_LAGS = 100_000


class Strain(msgspec.Struct, frozen=True):
    """`lag_p99_ms`: how much later than due the loop came round; `cpu_percent`: of one core."""

    lag_p99_ms: float = 0.0
    cpu_percent: float = 0.0
    is_limit: bool = False


class Watch:
    """Looks until `stop`."""

    def __init__(self) -> None:
        self._lags: list[float] = []
        self._cpu_s = time.process_time()
        self._wall_s = time.perf_counter()

    async def look(self) -> None:
        """Until cancelled."""
        while True:
            due = time.perf_counter() + EVERY_S
            await asyncio.sleep(EVERY_S)
            if len(self._lags) < MOST_LAGS:
                self._lags.append((time.perf_counter() - due) * 1000)

    def strain(self) -> Strain:
        """What was seen so far."""
        wall_s = max(1e-9, time.perf_counter() - self._wall_s)
        cpu = 100 * (time.process_time() - self._cpu_s) / wall_s
        lags = sorted(self._lags)
        lag = max(0.0, lags[min(len(lags) - 1, int(0.99 * len(lags)))]) if lags else 0.0
        return Strain(lag, cpu, lag > LAG_MS or cpu > CPU_PERCENT)


@asynccontextmanager
async def watched() -> AsyncIterator[Watch]:
    """Look for the length of the block."""
    watch = Watch()
    task = asyncio.create_task(watch.look())
    try:
        yield watch
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
