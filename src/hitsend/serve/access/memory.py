"""Limits counted in this process: no waiting, except once per level and month for what the ledger knows of it.

Enters: an `Ask`; later what it really used. Leaves: what is left of the rates, or a refusal. Always true: between
looking and taking nothing else runs, so however many requests come at once, no more pass than fit; a request that is
cancelled while it waits for the ledger has taken nothing; a restart forgets no spending. Next: `../chat/`.
"""

import asyncio
from collections.abc import Sequence
from functools import partial

from hitsend.core.clock import Clock
from hitsend.core.limits import Level, RateWindows
from hitsend.serve.access.book import Book, Key
from hitsend.serve.access.limits import Moment, day_text, first_of_month
from hitsend.serve.access.quota import Ask, BudgetUse, QuotaHealth, Spent, Used


class MemoryQuota:
    """The `Quota` of a server that shares its limits with nobody. For one event loop."""

    def __init__(self, clock: Clock, spent: Spent) -> None:
        self._clock = clock
        self._spent = spent
        self._book = Book()
        self._seeding: dict[Key, asyncio.Task[None]] = {}
        self._everybody: Level | None = None

    @property
    def num_open(self) -> int:
        """Reservations that haven't ended."""
        return self._book.num_open

    @property
    def num_levels(self) -> int:
        """Levels that take up memory."""
        return self._book.num_levels

    async def reserve(self, ask: Ask) -> RateWindows:
        """Take it, on every level at once."""
        await self._seed(ask.levels)
        if ask.levels and ask.levels[0].kind == "global":
            self._everybody = ask.levels[0]
        return self._book.reserve(ask, self._moment())

    async def settle(self, request_id: str, used: Used) -> None:
        """End the reservation."""
        self._book.settle(request_id, used, self._moment())

    async def preview(self, ask: Ask) -> RateWindows:
        """What `reserve` would return or raise now."""
        await self._seed(ask.levels)
        return self._book.preview(ask, self._moment())

    async def shed(self, levels: Sequence[Level]) -> None:
        """See `Quota.shed`; looking costs nothing here."""
        self._book.shed(levels, self._moment())

    def health(self) -> QuotaHealth:
        """There is nothing that could be away."""
        level = self._everybody
        counters = None if level is None else self._book.counters(level)
        if level is None or counters is None:
            return QuotaHealth()
        counters.advance(self._moment())
        spent = {
            "day": (level.limits.usd_per_day_microusd, counters.spent_day),
            "month": (level.limits.usd_per_month_microusd, counters.spent_month),
        }
        return QuotaHealth(
            budgets=tuple(
                BudgetUse(window, limit, used + counters.held)
                for window, (limit, used) in spent.items()
                if limit is not None
            )
        )

    def _moment(self) -> Moment:
        return Moment(round(self._clock.now() * 1_000_000), round(self._clock.wall() * 1_000_000))

    async def _seed(self, levels: Sequence[Level]) -> None:
        """Until everything is known that the budgets need. Raises what `Spent` raises."""
        while unseeded := self._book.unseeded(levels):
            level = unseeded[0]
            task = self._seeding.get(level.key)
            if task is None:
                task = self._seeding[level.key] = asyncio.create_task(self._load(level), name="spent")
                task.add_done_callback(partial(self._loaded, level.key))
            await asyncio.shield(task)  # others may wait for it too

    async def _load(self, level: Level) -> None:
        day = self._book.day(self._moment())
        month = await self._spent.spent_microusd(level, day_text(first_of_month(day)))
        today = await self._spent.spent_microusd(level, day_text(day))
        self._book.seed(level, day, (today, month), self._moment())

    def _loaded(self, key: Key, task: "asyncio.Task[None]") -> None:
        del self._seeding[key]
        if not task.cancelled():
            task.exception()  # told to those who wait; where nobody does any more, it is no news
