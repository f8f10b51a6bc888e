"""Who holds what: the counters of every level in use, and the reservations that are open on them.

Enters: an `Ask` or what it really used, and the moment. Leaves: what is left, or the error that tells why not. Always
true: all limits of all levels are looked at before any is taken; a reservation ends once; a level that is as good as
new is forgotten, so memory follows the levels in use. Pure: `memory.py` brings time and the ledger. Next: `memory.py`.
"""

from collections import OrderedDict
from collections.abc import Sequence

from hitsend.core.errors import InvalidRequest
from hitsend.core.limits import Level, LevelKind, RateWindows
from hitsend.serve.access import limits
from hitsend.serve.access.limits import Counters, Moment, Pair
from hitsend.serve.access.quota import Ask, Used

SWEPT = 2
"""Levels looked at per reservation: more than one, so that forgetting keeps up with remembering."""

MOST_KNOWN = 1024
"""Callers whose levels are kept together with their counters."""

Key = tuple[LevelKind, tuple[str, ...]]


class Book:
    """Counters by level, reservations by request id."""

    def __init__(self) -> None:
        self._counters: OrderedDict[Key, Counters] = OrderedDict()
        self._open: dict[str, tuple[Ask, tuple[Pair, ...]]] = {}
        self._known: dict[int, tuple[Sequence[Level], tuple[Pair, ...]]] = {}
        self._latest = Moment(0, 0)

    @property
    def num_open(self) -> int:
        """Reservations that haven't ended."""
        return len(self._open)

    @property
    def num_levels(self) -> int:
        """Levels that are remembered."""
        return len(self._counters)

    def counters(self, level: Level) -> Counters | None:
        """What is in use on a level, if it is remembered."""
        return self._counters.get(level.key)

    def unseeded(self, levels: Sequence[Level]) -> list[Level]:
        """Those with a budget of which it isn't known what was spent."""
        kept = self._known.get(id(levels))
        if kept is not None and all(counters.is_seeded or not limits.has_budget(at.limits) for at, counters in kept[1]):
            return []
        wanted = [level for level in levels if limits.has_budget(level.limits)]
        return [level for level in wanted if (known := self.counters(level)) is None or not known.is_seeded]

    def day(self, moment: Moment) -> int:
        """Today, counted from 1970; never a day before one that was seen."""
        self._see(moment)
        return self._latest.wall_us // limits.DAY_US

    def seed(self, level: Level, day: int, spent: tuple[int, int], moment: Moment) -> None:
        """What the ledger has of a level: spent in that day and in its month."""
        self._see(moment)
        counters = self._pairs((level,))[0][1]
        if not counters.is_seeded:
            counters.seed(day, *spent, moment)

    def reserve(self, ask: Ask, moment: Moment) -> RateWindows:
        """Take it. Raises RateLimitExceeded, InsufficientQuota or InvalidRequest, and then nothing was taken."""
        if ask.request_id in self._open:
            raise InvalidRequest(f"request id {ask.request_id!r} is in use", param="x-request-id")
        self._see(moment)
        pairs = self._pairs(ask.levels)
        refusal = limits.check(pairs, ask, moment)
        if refusal is not None:
            left = limits.windows(pairs, ask, is_taken=False)
            self._sweep(moment)
            raise limits.error_of(refusal, left, limits.param_of(refusal, ask))
        limits.take(pairs, ask)
        self._open[ask.request_id] = (ask, pairs)
        self._sweep(moment)  # not before: it could forget what `seed` has just told of these levels
        return limits.windows(pairs, ask, is_taken=True)

    def settle(self, request_id: str, used: Used, moment: Moment) -> bool:
        """End a reservation. False: there is none of that id."""
        ask, pairs = self._open.pop(request_id, (None, ()))
        if ask is None:
            return False
        self._see(moment)
        limits.settle(pairs, ask, used, moment)
        return True

    def preview(self, ask: Ask, moment: Moment) -> RateWindows:
        """What `reserve` would say. The counters are the same afterwards."""
        left = self.reserve(ask, moment)
        self.settle(ask.request_id, Used(requests=0), moment)
        return left

    def shed(self, levels: Sequence[Level], moment: Moment) -> None:
        """Refuse what can't pass whatever it asks for: no request left in the minute, or none beside those running."""
        self._see(moment)
        kept = self._known.get(id(levels))
        if kept is not None and all(_has_room(*pair) for pair in kept[1]):
            return
        pairs = [(level, known) for level in levels if (known := self.counters(level)) is not None]
        anything = Ask("", (), input_tokens=0, output_tokens=0, held_microusd=0)
        refusal = limits.check(pairs, anything, moment)
        if refusal is not None:
            raise limits.error_of(refusal, limits.windows(pairs, anything, is_taken=False))

    def _see(self, moment: Moment) -> None:
        """A level that is forgotten and comes back must not live through a time again that the clock went back over."""
        last = self._latest
        if moment.now_us >= last.now_us and moment.wall_us >= last.wall_us:
            self._latest = moment
        else:
            self._latest = Moment(max(last.now_us, moment.now_us), max(last.wall_us, moment.wall_us))

    def _pairs(self, levels: Sequence[Level]) -> tuple[Pair, ...]:
        """A caller's levels are one and the same tuple in all its requests: with whom they stand is found once."""
        kept = self._known.get(id(levels))
        if kept is not None:
            return kept[1]
        found = []
        for level in levels:
            counters = self._counters.get(level.key)
            if counters is None:
                counters = self._counters[level.key] = Counters(self._latest)
            found.append((level, counters))
        if len(self._known) >= MOST_KNOWN:
            self._known.clear()
        self._known[id(levels)] = (levels, tuple(found))  # as long as they are kept, the id is nobody else's
        return tuple(found)

    def _sweep(self, moment: Moment) -> None:
        for _ in range(min(SWEPT, len(self._counters))):
            key = next(iter(self._counters))
            if self._counters[key].is_idle(moment):
                del self._counters[key]
                self._known.clear()
            else:
                self._counters.move_to_end(key)


def _has_room(level: Level, counters: Counters) -> bool:
    """Whether one more request surely passes, without asking how much time went by: that could only give more room."""
    requests, parallel = level.told[0], level.told[3]
    if requests is not None and counters.missing[0] + limits.UNITS > requests * limits.UNITS:
        return False
    return parallel is None or counters.running < parallel
