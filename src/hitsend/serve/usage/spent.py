"""What was spent, by kind of token, and what is left of the budgets.

Enters: an open database, a key (None: everybody), a range of UTC days; levels with budgets. Leaves: `Spent`, `Budget`s.
Always true: the kinds' costs add up to the rows' (what rounding leaves goes to the dearest kind); a key sees its own
rows only; budgets count settled rows, not what is held at the moment. Next: `books.py`.
"""

from collections.abc import Sequence
from datetime import UTC, date, datetime
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, func, select

from hitsend.core.clock import Clock
from hitsend.core.limits import Level
from hitsend.serve.database.connection import Database
from hitsend.serve.database.schema import LEDGER
from hitsend.serve.usage.report import Spending, Totals, between, read_ledger, sums, totals_of
from hitsend.serve.usage.statement import GROUPS, By

_PICO = 1_000_000


class Kind(msgspec.Struct, frozen=True):
    """One kind of token: input (computed), cached_input, output or reasoning."""

    kind: str
    num_tokens: int
    cost_microusd: int


class SpentPart(msgspec.Struct, frozen=True):
    """One model, day, …: `of` names it."""

    of: dict[str, str | None]
    totals: Totals
    kinds: tuple[Kind, ...]


class Spent(msgspec.Struct, frozen=True):
    """`totals` and `kinds` are the sums of the parts."""

    by: By
    since: str | None
    until: str | None
    parts: tuple[SpentPart, ...]
    totals: Totals
    kinds: tuple[Kind, ...]


class Budget(msgspec.Struct, frozen=True):
    """One budget of one level. `left_microusd` is never below 0."""

    level: str
    name: str
    since: str
    limit_microusd: int
    spent_microusd: int
    left_microusd: int


def _prices() -> tuple[ColumnElement[Any], ...]:
    """Pico-dollars of input, cached input, output and reasoning, row by row."""
    row = LEDGER.c
    cached_price = func.coalesce(row.price_cached_input_picousd, row.price_input_picousd)
    return (
        (row.prompt_tokens - row.cached_tokens) * row.price_input_picousd,
        row.cached_tokens * cached_price,
        (row.completion_tokens - row.reasoning_tokens) * row.price_output_picousd,
        row.reasoning_tokens * row.price_output_picousd,
    )


async def spent(database: Database, by: By, key_id: str | None, since: date | None, until: date | None) -> Spent:
    """Add up that key's rows (None: all), settled on those days. Raises StorageFailed."""
    group = GROUPS[by]
    priced = [func.coalesce(func.sum(price), 0) for price in _prices()]
    columns = tuple(group.values())
    query = between(select(*columns, *priced, *sums()).group_by(*columns).order_by(*columns), since, until)
    if key_id is not None:
        query = query.where(LEDGER.c.key_id == key_id)
    parts = []
    async with read_ledger(database) as connection:
        for found in await connection.execute(query):
            names, prices = found[: len(group)], found[len(group) : len(group) + len(priced)]
            totals = totals_of(found[len(group) + len(priced) :])
            parts.append(SpentPart(dict(zip(group, names, strict=True)), totals, _kinds(totals, prices)))
    return Spent(
        by=by,
        since=None if since is None else since.isoformat(),
        until=None if until is None else until.isoformat(),
        parts=tuple(parts),
        totals=sum((part.totals for part in parts), Totals()),
        kinds=_summed(parts),
    )


def _kinds(totals: Totals, picousd: Sequence[int]) -> tuple[Kind, ...]:
    counts = (
        totals.prompt_tokens - totals.cached_tokens,
        totals.cached_tokens,
        totals.completion_tokens - totals.reasoning_tokens,
        totals.reasoning_tokens,
    )
    costs = [int(price) // _PICO for price in picousd]
    costs[max(range(len(costs)), key=lambda at: costs[at])] += totals.cost_microusd - sum(costs)
    return tuple(map(Kind, NAMES, counts, costs))


NAMES = ("input", "cached_input", "output", "reasoning")


def _summed(parts: Sequence[SpentPart]) -> tuple[Kind, ...]:
    kinds = [[part.kinds[at] for part in parts] for at in range(len(NAMES))]
    return tuple(
        Kind(name, sum(each.num_tokens for each in of), sum(each.cost_microusd for each in of))
        for name, of in zip(NAMES, kinds, strict=True)
    )


async def budgets(database: Database, clock: Clock, levels: Sequence[Level]) -> tuple[Budget, ...]:
    """What is left of each budget of these levels, per UTC day and month. Raises StorageFailed."""
    today = datetime.fromtimestamp(clock.wall(), UTC).date()
    spending = Spending(database)
    found = []
    for level in levels:
        limits = level.limits
        for name, since, limit in (
            ("usd_per_day", today, limits.usd_per_day_microusd),
            ("usd_per_month", today.replace(day=1), limits.usd_per_month_microusd),
        ):
            if limit is not None:
                used = await spending.spent_microusd(level, since.isoformat())
                found.append(Budget(level.title, name, since.isoformat(), limit, used, max(0, limit - used)))
    return tuple(found)
