"""What happens to limits while the server that counts them is away.

Enters: that it went away or is back; requests meanwhile. Leaves: a request counted in this process only, or
StorageFailed, as the policy says for each kind of limit; and what the server has to be told when it is back. Always
true: a closed limit lets nothing pass uncounted; an open rate or parallel limit lets no more pass in this process than
it would if this process were alone; costs are never forgotten. Next: `valkey.py`.
"""

import logging
from collections import deque
from typing import Literal

import msgspec

from hitsend.core.clock import Clock
from hitsend.core.errors import StorageFailed
from hitsend.core.limits import Level, Limits, RateWindows
from hitsend.serve.access.book import Book
from hitsend.serve.access.limits import Moment, has_budget, rates_of
from hitsend.serve.access.quota import Ask, Used

logger = logging.getLogger(__name__)

MOST_OWED = 100_000
"""Ended requests that are remembered until the server is back; more are forgotten, oldest first, and that is logged."""


class UnreachablePolicy(msgspec.Struct, frozen=True):
    """What becomes of a request with such limits while the server is away."""

    rates: Literal["open", "closed"] = "open"
    budgets: Literal["open", "closed"] = "closed"


class Owed(msgspec.Struct, frozen=True):
    """An end that the server wasn't told. `since_us`: the last of its moments that is known to be before that end."""

    ask: Ask
    used: Used
    epoch: str
    since_us: int


class Charge(msgspec.Struct, frozen=True):
    """The cost of a request that the server never heard of."""

    number: int
    levels: tuple[Level, ...]
    cost_microusd: int
    since_us: int


class Outage:
    """Whether the server is away, and the books of that time."""

    def __init__(self, clock: Clock, policy: UnreachablePolicy, *, retry_s: float) -> None:
        self.is_on = False
        self.num_unchecked = self.num_refused = self.num_outages = self.num_forgotten = 0
        self.owed: deque[Owed] = deque()
        self.charges: deque[Charge] = deque()
        self._clock = clock
        self._policy = policy
        self._retry_s = retry_s
        self._book = Book()
        self._asks: dict[str, Ask] = {}
        self._num_charges = 0

    @property
    def num_open(self) -> int:
        """Requests that run counted in this process only."""
        return len(self._asks)

    @property
    def num_levels(self) -> int:
        """Levels counted in this process."""
        return self._book.num_levels

    def holds(self, request_id: str) -> bool:
        """Whether a request of that id runs, counted here."""
        return request_id in self._asks

    def begin(self, reason: str) -> None:
        """The server doesn't answer."""
        if not self.is_on:
            self.is_on = True
            self.num_outages += 1
            logger.warning(
                "the limits' server is away (%s): rates are %s, budgets are %s",
                *(reason, self._policy.rates, self._policy.budgets),
            )

    def end(self) -> None:
        """The server answers, and has been told everything."""
        self.is_on = False
        logger.info("the limits' server is there")

    def reserve(self, ask: Ask, *, is_preview: bool) -> RateWindows:
        """Count it here, or refuse. Raises StorageFailed where a limit is closed, and what a `Quota` raises."""
        closed = self._closed(ask)
        if closed is not None:
            self.num_refused += 1
            text = f"limits of {closed.title} can't be counted right now: their server is away; try again soon"
            raise StorageFailed(text, retry_after_s=max(1.0, self._retry_s))
        here = msgspec.structs.replace(ask, levels=tuple(_without_budgets(level) for level in ask.levels))
        if is_preview:
            return self._book.preview(here, self._moment())
        left = self._book.reserve(here, self._moment())
        self.num_unchecked += 1
        self._asks[ask.request_id] = ask
        return left

    def settle(self, request_id: str, used: Used, since_us: int) -> bool:
        """End what was counted here. False: nothing of that id was."""
        ask = self._asks.pop(request_id, None)
        if ask is None:
            return False
        self._book.settle(request_id, used, self._moment())
        budgeted = tuple(level for level in ask.levels if has_budget(level.limits))
        if budgeted and used.cost_microusd:
            self._num_charges += 1
            self.charges.append(Charge(self._num_charges, budgeted, used.cost_microusd, since_us))
            self._bound(self.charges)
        return True

    def owe(self, ask: Ask, used: Used, epoch: str, since_us: int) -> None:
        """The server holds it, and has to be told that it ended."""
        self.owed.append(Owed(ask, used, epoch, since_us))
        self._bound(self.owed)

    def _closed(self, ask: Ask) -> Level | None:
        for level in ask.levels:
            limits = level.limits
            counts = any(rate is not None for rate in rates_of(limits)) or limits.parallel_requests is not None
            if counts and self._policy.rates == "closed":
                return level
            if has_budget(limits) and ask.held_microusd and self._policy.budgets == "closed":
                return level
        return None

    def _bound(self, queue: "deque[Owed] | deque[Charge]") -> None:
        if len(queue) > MOST_OWED:
            queue.popleft()
            self.num_forgotten += 1
            if self.num_forgotten == 1:
                logger.error("over %d ended requests wait for the limits' server: the oldest are forgotten", MOST_OWED)

    def _moment(self) -> Moment:
        return Moment(round(self._clock.now() * 1_000_000), round(self._clock.wall() * 1_000_000))


def _without_budgets(level: Level) -> Level:
    limits: Limits = msgspec.structs.replace(level.limits, usd_per_day_microusd=None, usd_per_month_microusd=None)
    return msgspec.structs.replace(level, limits=limits)
