"""What the tests of limits share: moments, asks, and a random life of many levels with a second set of books."""

import random
from collections import defaultdict

from hitsend.core.errors import InvalidRequest, LimitError
from hitsend.core.limits import Level, Limits
from hitsend.serve.access.book import Book
from hitsend.serve.access.limits import DAY_US, UNITS, Moment, has_budget, month_of, rates_of
from hitsend.serve.access.quota import Ask, Used

WALL_US = 1_800_000_000_000_000  # 2027-01-15T08:00:00Z
SECOND = 1_000_000
MINUTE = 60 * SECOND


def at(seconds: float = 0.0, wall_us: int = WALL_US) -> Moment:
    passed = round(seconds * SECOND)
    return Moment(1_000 * SECOND + passed, wall_us + passed)


def org(name: str = "acme", **limits: int) -> Level:
    return Level("org", (name,), Limits(**limits))


def asking(request_id: str, *levels: Level, tokens: tuple[int, int] = (0, 0), held: int = 0) -> Ask:
    return Ask(request_id, levels, tokens[0], tokens[1], held)


class Shadow:
    """One level, counted in another way: what was taken and given back as running sums, money by day and month."""

    def __init__(self, limits: Limits) -> None:
        self.rates = rates_of(limits)
        self.running = self.held = self.at_us = 0
        self.spent: dict[tuple[str, int], int] = defaultdict(int)
        self.net = [0, 0, 0]
        self.lowest: list[int | None] = [None, None, None]

    def take(self, amounts: tuple[int, int, int], at_us: int) -> None:
        """No window from any earlier taking to now may hold more than a full bucket and what came back in it."""
        for which, rate in enumerate(self.rates):
            if rate is None:
                continue
            before = self.net[which] * UNITS - rate * at_us
            low = self.lowest[which]
            self.lowest[which] = low = before if low is None else min(low, before)
            self.net[which] += amounts[which]
            assert self.net[which] * UNITS - rate * at_us - low <= rate * UNITS


class Life:
    """Random requests on random levels, clocks that are up to 5 s wrong, and once in a while 30 s back."""

    def __init__(self, seed: int, num_levels: int = 12) -> None:
        self.random = random.Random(seed)
        self.book = Book()
        self.levels = [self._level(number) for number in range(num_levels)]
        self.shadows = [Shadow(level.limits) for level in self.levels]
        self.open: dict[str, tuple[tuple[int, ...], Ask]] = {}
        self.true_us = 1_000 * SECOND
        self.step_us = 0
        self.latest = Moment(0, 0)
        self.num = self.passed = self.refused = self.impossible = 0

    def _level(self, number: int) -> Level:
        draw = self.random

        def some(low: int, high: int) -> int | None:
            return draw.randint(low, high) if draw.random() < 0.6 else None

        limits = Limits(
            requests_per_minute=some(1, 600),
            input_tokens_per_minute=some(700, 30_000),
            output_tokens_per_minute=some(400, 20_000),
            parallel_requests=some(1, 20),
            tokens_per_request=some(1_200, 5_000),
            usd_per_day_microusd=some(80, 100_000),
            usd_per_month_microusd=some(1_000, 1_000_000),
        )
        return Level("key", (f"k{number}",), limits)

    def moment(self) -> Moment:
        """Now, as a wrong clock tells it; `latest` is the furthest that either clock was seen."""
        draw = self.random
        self.true_us += draw.choice((0, 1, draw.randrange(SECOND), draw.randrange(10 * SECOND)))
        if draw.random() < 0.0005:
            self.true_us += draw.randrange(2 * DAY_US)
        if draw.random() < 0.001:
            self.step_us -= 30 * SECOND
        skewed = self.true_us + self.step_us + draw.randint(-5 * SECOND, 5 * SECOND)
        found = Moment(skewed, WALL_US + skewed)
        self.latest = Moment(max(self.latest.now_us, skewed), max(self.latest.wall_us, found.wall_us))
        return found

    def step(self) -> None:
        """One operation, and what must be true after it."""
        if self.open and self.random.random() < 0.45:
            self.settle(self.random.choice(tuple(self.open)) if len(self.open) < 50 else next(iter(self.open)))
        else:
            self.reserve()

    def reserve(self) -> None:
        draw, moment = self.random, self.moment()
        chosen = tuple(draw.sample(range(len(self.levels)), 4))
        levels = tuple(self.levels[index] for index in chosen)
        self.num += 1
        tokens = (draw.randrange(900), draw.randrange(600))
        ask = asking(f"r{self.num}", *levels, tokens=tokens, held=draw.randrange(90))
        for level in self.book.unseeded(levels):
            self.book.seed(level, self.book.day(moment), self._spent(self.levels.index(level)), moment)
        before = self._counters(levels, moment)
        try:
            (self.book.preview if draw.random() < 0.1 else self._take)(ask, moment)
        except (LimitError, InvalidRequest) as error:
            assert self._counters(levels, moment) == before
            self.refused += isinstance(error, LimitError)
            self.impossible += isinstance(error, InvalidRequest)
            return
        if ask.request_id not in self.open:
            assert self._counters(levels, moment) == before
            return
        self.passed += 1
        for index in chosen:
            shadow, counters = self.shadows[index], self.book.counters(self.levels[index])
            shadow.running += 1
            shadow.held += ask.held_microusd
            assert shadow.at_us <= counters.at_us <= self.latest.now_us
            shadow.at_us = counters.at_us
            shadow.take((1, ask.input_tokens, ask.output_tokens), counters.at_us)
            self._compare(index)

    def _take(self, ask: Ask, moment: Moment) -> None:
        self.book.reserve(ask, moment)
        self.open[ask.request_id] = (tuple(self.levels.index(level) for level in ask.levels), ask)

    def settle(self, request_id: str) -> None:
        draw, moment = self.random, self.moment()
        chosen, ask = self.open.pop(request_id)
        began = draw.random() < 0.95
        used = Used(
            draw.randint(0, ask.input_tokens), draw.randint(0, ask.output_tokens), draw.randint(0, ask.held_microusd)
        )
        used = used if began else Used(requests=0)
        assert self.book.settle(request_id, used, moment)
        assert not self.book.settle(request_id, used, moment)
        for index in chosen:
            shadow = self.shadows[index]
            shadow.running -= 1
            shadow.held -= ask.held_microusd
            day = self._day(index)
            if has_budget(self.levels[index].limits):
                shadow.spent["day", day] += used.cost_microusd
                shadow.spent["month", month_of(day)] += used.cost_microusd
            given = (1 - used.requests, ask.input_tokens - used.input_tokens, ask.output_tokens - used.output_tokens)
            shadow.net = [net - back for net, back in zip(shadow.net, given, strict=True)]
            self._compare(index)

    def _day(self, index: int) -> int:
        counters = self.book.counters(self.levels[index])
        return self.latest.wall_us // DAY_US if counters is None else counters.day

    def _spent(self, index: int) -> tuple[int, int]:
        day, spent = self.latest.wall_us // DAY_US, self.shadows[index].spent
        return spent["day", day], spent["month", month_of(day)]

    def _compare(self, index: int) -> None:
        """The book and the shadow agree, and every limit is kept."""
        level, shadow = self.levels[index], self.shadows[index]
        counters, limits = self.book.counters(level), level.limits
        assert counters is not None
        assert (counters.running, counters.held) == (shadow.running, shadow.held)
        assert all(missing >= 0 for missing in counters.missing)
        for rate, missing in zip(shadow.rates, counters.missing, strict=True):
            assert missing <= (0 if rate is None else rate * UNITS)
        assert counters.running <= (limits.parallel_requests or counters.running)
        day, month = counters.day, month_of(counters.day)
        assert counters.spent_day == shadow.spent["day", day]
        assert counters.spent_month == shadow.spent["month", month]
        for limit, spent in (
            (limits.usd_per_day_microusd, counters.spent_day),
            (limits.usd_per_month_microusd, counters.spent_month),
        ):
            assert limit is None or spent + counters.held <= limit

    def _counters(self, levels: tuple[Level, ...], moment: Moment) -> list[tuple[int, ...]]:
        found = []
        for level in levels:
            counters = self.book.counters(level)
            if counters is not None:
                counters.advance(moment)
            found.append((0,) * 7 if counters is None else counters.snapshot())
        return found
