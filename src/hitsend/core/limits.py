"""What a caller may use, level by level: global, organisation, application, user, key.

Enters: nothing. Leaves: frozen values that `access/` fills and checks, and that errors and answers carry. Always true:
every limit is optional and all that are set must be kept at once; rates are per minute and refill continuously; money
is integer micro-dollars; a level is named by its whole path, so that two organisations' `bot` are two levels.
Next: `request.py`.
"""

from functools import cached_property
from typing import Annotated, Literal

import msgspec

MAX_PER_MINUTE = 100_000_000
"""Highest rate that can be set: with it, the buckets' exact integers still fit a double: Valkey's scripts need that."""

Rate = Annotated[int, msgspec.Meta(ge=1, le=MAX_PER_MINUTE)]
Microusd = Annotated[int, msgspec.Meta(ge=0, le=10**15)]
LevelKind = Literal["global", "org", "app", "user", "key"]
LimitName = Literal[
    "requests_per_minute",
    "input_tokens_per_minute",
    "output_tokens_per_minute",
    "parallel_requests",
    "tokens_per_request",
    "usd_per_day",
    "usd_per_month",
]

LIMIT_NAMES: tuple[LimitName, ...] = (
    "requests_per_minute",
    "input_tokens_per_minute",
    "output_tokens_per_minute",
    "parallel_requests",
    "tokens_per_request",
    "usd_per_day",
    "usd_per_month",
)


class Limits(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The limits of one level; None: none. Budgets count what the ledger has and what is held, per UTC day and month.

    `tokens_per_request` bounds input and allowed output of one request together.
    """

    requests_per_minute: Rate | None = None
    input_tokens_per_minute: Rate | None = None
    output_tokens_per_minute: Rate | None = None
    parallel_requests: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] | None = None
    tokens_per_request: Rate | None = None
    usd_per_day_microusd: Microusd | None = None
    usd_per_month_microusd: Microusd | None = None


class Level(msgspec.Struct, frozen=True, dict=True):
    """One level above a request. `path` is () for global, (org,), (org, app), (org, app, user), or (key_id,).

    A name that a principal doesn't have is "" in the path of those below it. What follows from the fields is found out
    once: each request asks for it several times.
    """

    kind: LevelKind
    path: tuple[str, ...]
    limits: Limits = Limits()

    @cached_property
    def key(self) -> tuple[LevelKind, tuple[str, ...]]:
        """What tells it from every other level, whatever its limits are."""
        return (self.kind, self.path)

    @cached_property
    def title(self) -> str:
        """As errors and records name it: `global`, `org acme`, `app acme/bot`, `user acme/bot/ann`, `key k1`."""
        return f"{self.kind} {'/'.join(self.path)}" if self.path else self.kind

    @cached_property
    def told(self) -> tuple[int | None, ...]:
        """All its limits, by `LIMIT_NAMES`."""
        of = self.limits
        rates = (of.requests_per_minute, of.input_tokens_per_minute, of.output_tokens_per_minute)
        budgets = (of.usd_per_day_microusd, of.usd_per_month_microusd)
        return (*rates, of.parallel_requests, of.tokens_per_request, *budgets)


class RateWindow(msgspec.Struct, frozen=True):
    """The tightest of the levels for one rate: its limit, what is left, and seconds until it would be full again."""

    limit: int
    remaining: int
    reset_s: float


class LevelCheck(msgspec.Struct, frozen=True):
    """One limit of one level that was tested: `value` is what is in use together with this request.

    Units are the limit's own: requests, tokens, micro-dollars. A value over the limit is why a request was refused.
    """

    level: str
    name: LimitName
    value: int
    limit: int


class LevelUse(msgspec.Struct, frozen=True, array_like=True):
    """All limits of one level that were tested, in short: what is in use of each, and the limits (None: not set), both
    by `LIMIT_NAMES`; 0 is in use where none is set. `checks` says the same one by one."""

    level: str
    values: tuple[int, ...]
    limits: tuple[int | None, ...]

    def checks(self) -> tuple[LevelCheck, ...]:
        """Of the limits that are set."""
        every = zip(LIMIT_NAMES, self.values, self.limits, strict=True)
        return tuple(LevelCheck(self.level, name, value, limit) for name, value, limit in every if limit is not None)


class RateWindows(msgspec.Struct, frozen=True):
    """What `x-ratelimit-*` tells; None where no level limits it. `uses`: all that was tested, for the record."""

    requests: RateWindow | None = None
    input_tokens: RateWindow | None = None
    output_tokens: RateWindow | None = None
    uses: tuple[LevelUse, ...] = ()

    @property
    def checks(self) -> tuple[LevelCheck, ...]:
        """The same as `uses`, limit by limit."""
        return tuple(check for use in self.uses for check in use.checks())
