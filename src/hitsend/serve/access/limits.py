"""The arithmetic of limits: what is in use on each level, whether a request still fits, how long it would have to wait.

Enters: levels with their counters, an `Ask`, and the moment, as integers. Leaves: counters changed on every level at
once, or a `Refusal` and none changed. Always true: integers only, so nothing is lost or made by rounding; a bucket is
kept as what is missing from it, never less than 0, so it holds at most its limit; time that goes backwards refills
nothing; reserved and given back in full leaves every counter as it was. Next: `memory.py`.

    A rate of `limit` per minute is a bucket of `limit` tokens, each of 60,000,000 units, so `limit` units come back per
    microsecond. Budgets: spent in the UTC day (or month) + held + asked <= limit.
"""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from functools import lru_cache

import msgspec

from hitsend.core.errors import InsufficientQuota, InvalidRequest, RateLimitExceeded, ServeError
from hitsend.core.limits import LIMIT_NAMES, Level, LevelUse, LimitName, Limits, RateWindow, RateWindows
from hitsend.serve.access.quota import Ask, Used

UNITS = 60_000_000
"""Units in one token: the number of microseconds in a minute."""

HINT_US = 1_000_000
"""What is suggested where the wait can't be known, because it ends when a running request does."""

DAY_US = 86_400_000_000

RATES = LIMIT_NAMES[:3]


class Moment(msgspec.Struct, frozen=True):
    """Now, twice: a clock that only goes on, for the rates, and the wall's (UTC since the epoch), for the budgets."""

    now_us: int
    wall_us: int


class Refusal(msgspec.Struct, frozen=True):
    """Why not. `value` is the limit's, `asked` and `left` in the same unit; `retry_after_us` None: it can never pass.

    `is_certain`: the wait is enough for all limits, whatever the running requests do.
    """

    level: Level
    limit: LimitName
    value: int
    asked: int
    left: int
    retry_after_us: int | None
    is_certain: bool = True


class Counters:
    """What is in use on one level. `missing` are units, by `RATES`; money is micro-dollars; `day` counts from 1970."""

    __slots__ = (
        "at_us",
        "day",
        "held",
        "missing",
        "rates",
        "running",
        "seeded_month",
        "spent_day",
        "spent_month",
        "told",
    )

    def __init__(self, moment: Moment) -> None:
        self.at_us = moment.now_us
        self.day = moment.wall_us // DAY_US
        self.missing = [0, 0, 0]
        self.rates = [0, 0, 0]
        self.told: tuple[int | None, ...] | None = None
        self.running = self.held = self.spent_day = self.spent_month = 0
        self.seeded_month: int | None = None

    @property
    def is_seeded(self) -> bool:
        """Whether spending is counted: only once it is known what the ledger has."""
        return self.seeded_month is not None

    def advance(self, moment: Moment) -> None:
        """Let time pass, as far as it went on: buckets refill at the rates they had, a new day or month has spent 0."""
        elapsed = moment.now_us - self.at_us
        if elapsed > 0:
            self.at_us = moment.now_us
            missing, rates = self.missing, self.rates
            for which in (0, 1, 2):
                if missing[which]:
                    left = missing[which] - elapsed * rates[which]
                    missing[which] = max(0, left)
        day = moment.wall_us // DAY_US
        if day > self.day:
            if month_of(day) != month_of(self.day):
                self.spent_month = 0
            self.spent_day = 0
            self.day = day

    def keep_to(self, told: tuple[int | None, ...]) -> None:
        """The level's limits from now on: what is missing comes back at the rates that are told."""
        if self.told is told:
            return
        self.told = told
        for which in (0, 1, 2):
            rate = told[which]
            if rate is not None:
                self.rates[which] = rate

    def seed(self, day: int, spent_day: int, spent_month: int, moment: Moment) -> None:
        """What the ledger knew of that day and its month. What of it is over by now doesn't count."""
        self.advance(moment)
        self.spent_day = spent_day if day == self.day else 0
        self.spent_month = spent_month if month_of(day) == month_of(self.day) else 0
        self.seeded_month = month_of(self.day)

    def is_idle(self, moment: Moment) -> bool:
        """Whether it need not be kept: a fresh one would be the same. What is known of spending is kept for its month,
        because finding it out again means adding up the ledger."""
        self.advance(moment)
        if self.running or self.held or any(self.missing):
            return False
        return self.seeded_month is None or (self.spent_month == 0 and month_of(self.day) > self.seeded_month)

    def snapshot(self) -> tuple[int, ...]:
        """Everything that is counted."""
        return (*self.missing, self.running, self.held, self.spent_day, self.spent_month)


Pair = tuple[Level, Counters]
Rates = tuple[int | None, int | None, int | None]


def check(pairs: Sequence[Pair], ask: Ask, moment: Moment) -> Refusal | None:
    """The refusal with the longest wait among all limits of all levels; None: it fits. Takes nothing."""
    found: list[Refusal] = []
    for level, counters in pairs:
        counters.advance(moment)
        counters.keep_to(level.told)
        if not _fits(level.told, counters, ask):
            found += _failing(level, counters, ask, moment)
    if not found:
        return None
    worst = max(found, key=_wait)
    is_certain = all(refusal.is_certain for refusal in found)
    return msgspec.structs.replace(worst, is_certain=is_certain)


def take(pairs: Iterable[Pair], ask: Ask) -> None:
    """Reserve, on every level. Only after `check` found nothing, in the same moment."""
    asked = (UNITS, ask.input_tokens * UNITS, ask.output_tokens * UNITS)
    for level, counters in pairs:
        told, missing = level.told, counters.missing
        for which in (0, 1, 2):
            if told[which] is not None:
                missing[which] += asked[which]
        counters.running += 1
        counters.held += ask.held_microusd


def settle(pairs: Iterable[Pair], ask: Ask, used: Used, moment: Moment) -> None:
    """End a reservation that was taken of these levels with the limits they had then. More than reserved is a debt."""
    unused = (1 - used.requests, ask.input_tokens - used.input_tokens, ask.output_tokens - used.output_tokens)
    for level, counters in pairs:
        counters.advance(moment)
        told, missing = level.told, counters.missing
        for which in (0, 1, 2):
            if unused[which] and told[which] is not None:
                missing[which] = max(0, missing[which] - unused[which] * UNITS)
        counters.running -= 1
        counters.held -= ask.held_microusd
        if counters.is_seeded:
            counters.spent_day += used.cost_microusd
            counters.spent_month += used.cost_microusd


def rates_of(limits: Limits) -> Rates:
    """The limits per minute, by `RATES`."""
    return (limits.requests_per_minute, limits.input_tokens_per_minute, limits.output_tokens_per_minute)


def has_budget(limits: Limits) -> bool:
    """Whether the level's spending has to be known."""
    return limits.usd_per_day_microusd is not None or limits.usd_per_month_microusd is not None


def windows(pairs: Sequence[Pair], ask: Ask, *, is_taken: bool) -> RateWindows:
    """What is left of each rate where it is the least, and all limits as they stand with the request, taken or not."""
    tightest: list[tuple[int, int, int] | None] = [None, None, None]
    uses = []
    more = (0, 0, 0, 0) if is_taken else (1, ask.input_tokens, ask.output_tokens, ask.held_microusd)
    for level, counters in pairs:
        told = level.told
        used = [-(-missing // UNITS) for missing in counters.missing]  # in whole tokens, rounded up
        for which in (0, 1, 2):
            limit = told[which]
            if limit is None:
                continue
            reset_us = -(-counters.missing[which] // limit)
            found, other = (max(0, limit - used[which]), -reset_us, limit), tightest[which]
            if other is None or found[:2] < other[:2]:
                tightest[which] = found
        uses.append(LevelUse(level.title, _in_use(told, counters, ask, used, more), told))
    requests, input_tokens, output_tokens = map(_window, tightest)
    return RateWindows(requests, input_tokens, output_tokens, tuple(uses))


def _in_use(
    told: tuple[int | None, ...], counters: Counters, ask: Ask, used: Sequence[int], more: tuple[int, int, int, int]
) -> tuple[int, ...]:
    """By `LIMIT_NAMES`; 0 where there is no limit."""
    held = counters.held + more[3]
    return (
        used[0] + more[0] if told[0] is not None else 0,
        used[1] + more[1] if told[1] is not None else 0,
        used[2] + more[2] if told[2] is not None else 0,
        counters.running + more[0] if told[3] is not None else 0,
        ask.input_tokens + ask.output_tokens if told[4] is not None else 0,
        counters.spent_day + held if told[5] is not None else 0,
        counters.spent_month + held if told[6] is not None else 0,
    )


def _window(found: tuple[int, int, int] | None) -> RateWindow | None:
    if found is None:
        return None
    remaining, reset_us, limit = found
    return RateWindow(limit, remaining, -reset_us / 1_000_000)


def error_of(refusal: Refusal, left: RateWindows, input_param: str = "messages") -> ServeError:
    """The refusal as the caller gets it."""
    level, name = refusal.level, refusal.limit
    if refusal.retry_after_us is None:
        return never(refusal, input_param)
    wait_s, by = refusal.retry_after_us / 1_000_000, (level.kind, name)
    soon = f"in {-(-refusal.retry_after_us // 1000) / 1000:g} s"
    what = f"{name} of {level.title} is {_shown(name, refusal.value)}"
    left_asked = f"{_shown(name, refusal.left)} left, {_shown(name, refusal.asked)} asked"
    if name in ("usd_per_day", "usd_per_month"):
        when = "when running requests have ended" if refusal.retry_after_us == HINT_US else soon
        text = f"budget reached: {what}, {left_asked}; try again {when}"
        return InsufficientQuota(text, retry_after_s=wait_s, windows=left, refused_by=by)
    if name == "parallel_requests":
        text = f"too many requests at once: {what}, all are running; try again when one has ended"
    else:
        text = f"rate limit reached: {what}, {left_asked}; try again {soon}"
    return RateLimitExceeded(text, retry_after_s=wait_s, windows=left, refused_by=by)


def never(refusal: Refusal, param: str) -> InvalidRequest:
    """What no waiting helps: more is asked than the limit ever allows."""
    name = refusal.limit
    asked, limit = _shown(name, refusal.asked), _shown(name, refusal.value)
    text = f"{param}: {asked} asked, {name} of {refusal.level.title} is {limit}: this can never pass"
    return InvalidRequest(text, param=param)


def param_of(refusal: Refusal, ask: Ask) -> str:
    """The field to blame for what can never pass: the answer's length, unless the input alone is too much."""
    is_input = refusal.limit == "input_tokens_per_minute" or not ask.output_tokens
    if refusal.limit == "tokens_per_request":
        is_input = is_input or ask.input_tokens >= refusal.value
    return ask.input_param if is_input else "max_tokens"


@lru_cache(maxsize=64)
def month_of(day: int) -> int:
    """The month of a day, counted from year 0."""
    date = datetime.fromtimestamp(day * 86_400, UTC)
    return date.year * 12 + date.month - 1


@lru_cache(maxsize=64)
def first_of_month(day: int) -> int:
    """The first day of the day's month."""
    return day - datetime.fromtimestamp(day * 86_400, UTC).day + 1


@lru_cache(maxsize=64)
def first_of_next_month(day: int) -> int:
    """The day on which the next month begins."""
    return first_of_month(first_of_month(day) + 31)


def day_text(day: int) -> str:
    """The day as YYYY-MM-DD."""
    return datetime.fromtimestamp(day * 86_400, UTC).strftime("%Y-%m-%d")


def _fits(told: tuple[int | None, ...], counters: Counters, ask: Ask) -> bool:
    """Whether `_failing` would find nothing; the usual answer, at a fraction of its price."""
    requests, inputs, outputs, parallel, size, day, month = told
    missing = counters.missing
    if requests is not None and missing[0] + UNITS > requests * UNITS:
        return False
    if inputs is not None and ask.input_tokens and missing[1] + ask.input_tokens * UNITS > inputs * UNITS:
        return False
    if outputs is not None and ask.output_tokens and missing[2] + ask.output_tokens * UNITS > outputs * UNITS:
        return False
    if parallel is not None and counters.running >= parallel:
        return False
    if size is not None and ask.input_tokens + ask.output_tokens > size:
        return False
    if not ask.held_microusd:
        return True
    more = counters.held + ask.held_microusd
    return (day is None or counters.spent_day + more <= day) and (month is None or counters.spent_month + more <= month)


def _failing(level: Level, counters: Counters, ask: Ask, moment: Moment) -> list[Refusal]:
    limits, found = level.limits, []
    asked = (1, ask.input_tokens, ask.output_tokens)
    for which, rate in enumerate(rates_of(limits)):
        if rate is None or not asked[which]:
            continue
        over = counters.missing[which] + (asked[which] - rate) * UNITS
        if over > 0:
            left = max(0, (rate * UNITS - counters.missing[which]) // UNITS)
            behind_us = max(0, counters.at_us - moment.now_us)  # a clock that went back has to catch up first
            wait_us = None if asked[which] > rate else -(-over // rate) + behind_us
            found.append(Refusal(level, RATES[which], rate, asked[which], left, wait_us))
    parallel, size = limits.parallel_requests, ask.input_tokens + ask.output_tokens
    if parallel is not None and counters.running >= parallel:
        found.append(Refusal(level, "parallel_requests", parallel, 1, 0, HINT_US, is_certain=False))
    if limits.tokens_per_request is not None and size > limits.tokens_per_request:
        most = limits.tokens_per_request
        found.append(Refusal(level, "tokens_per_request", most, size, most, None))
    if ask.held_microusd and has_budget(limits):
        found += _over_budget(level, counters, ask.held_microusd, moment)
    return found


def _over_budget(level: Level, counters: Counters, asked: int, moment: Moment) -> Iterable[Refusal]:
    for name, limit, spent in _budgets(level.limits, counters):
        held = counters.held
        if limit is None or spent + held + asked <= limit:
            continue
        next_day = counters.day + 1 if name == "usd_per_day" else first_of_next_month(counters.day)
        wait_us: int | None = next_day * DAY_US - moment.wall_us
        if asked > limit:
            wait_us = None
        elif spent + asked <= limit:  # only what is held for running requests stands in the way
            wait_us = HINT_US
        left = max(0, limit - spent - held)
        yield Refusal(level, name, limit, asked, left, wait_us, is_certain=held + asked <= limit < spent + asked)


def _budgets(limits: Limits, counters: Counters) -> tuple[tuple[LimitName, int | None, int], ...]:
    return (
        ("usd_per_day", limits.usd_per_day_microusd, counters.spent_day),
        ("usd_per_month", limits.usd_per_month_microusd, counters.spent_month),
    )


def _wait(refusal: Refusal) -> float:
    return float("inf") if refusal.retry_after_us is None else refusal.retry_after_us


def _shown(name: LimitName, value: int) -> str:
    return f"{value / 1_000_000:.6f} USD" if name in ("usd_per_day", "usd_per_month") else str(value)
