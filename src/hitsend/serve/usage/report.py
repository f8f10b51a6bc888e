"""What was used and what it cost: the ledger, added up.

Enters: an open database and, if wanted, a range of UTC days. Leaves: a `UsageReport`. Always true: sums are integers
and computed by the database from settled rows only; the parts of each grouping add up to the total. Next:
`statement.py`.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from datetime import date
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Integer, Select, cast, func, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from hitsend.core.errors import StorageFailed
from hitsend.core.limits import Level
from hitsend.serve.database.connection import Database
from hitsend.serve.database.schema import HOLDS, LEDGER


class Totals(msgspec.Struct, frozen=True):
    """Sums over some rows. `estimated_rows` counts those whose figures are not the engine's own."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    discarded_tokens: int = 0
    cost_microusd: int = 0
    estimated_rows: int = 0

    def __add__(self, other: "Totals") -> "Totals":
        return Totals(
            *(
                mine + its
                for mine, its in zip(msgspec.structs.astuple(self), msgspec.structs.astuple(other), strict=True)
            )
        )


class ModelTotals(msgspec.Struct, frozen=True):
    """One served model."""

    model: str
    totals: Totals


class CallerTotals(msgspec.Struct, frozen=True):
    """One key (null: the anonymous local principal)."""

    key_id: str | None
    name: str
    user: str | None
    app: str | None
    org: str | None
    totals: Totals


class DayTotals(msgspec.Struct, frozen=True):
    """One UTC day."""

    day: str
    totals: Totals


class UsageReport(msgspec.Struct, frozen=True):
    """The whole answer of `hitsend usage --json`."""

    since: str | None = None
    until: str | None = None
    totals: Totals = Totals()
    by_model: tuple[ModelTotals, ...] = ()
    by_caller: tuple[CallerTotals, ...] = ()
    by_day: tuple[DayTotals, ...] = ()
    holds_open: int = 0


@asynccontextmanager
async def read_ledger(database: Database) -> AsyncGenerator[AsyncConnection]:
    """A reading transaction whose failure is StorageFailed."""
    try:
        async with database.reading() as connection:
            yield connection
    except SQLAlchemyError as error:
        raise StorageFailed("the ledger can't be read now", retry_after_s=1.0) from error


_CALLER = (
    LEDGER.c.key_id,
    LEDGER.c.key_name,
    LEDGER.c.user_name,
    LEDGER.c.app_name,
    LEDGER.c.org_name,
)


async def usage_report(database: Database, since: date | None = None, until: date | None = None) -> UsageReport:
    """Add up the rows settled from `since` to `until`, both days included."""
    async with database.reading() as connection:
        by_model = await _grouped(connection, (LEDGER.c.model,), since, until)
        by_caller = await _grouped(connection, _CALLER, since, until)
        by_day = await _grouped(connection, (LEDGER.c.day,), since, until)
        total = await _grouped(connection, (), since, until)
        holds_open = (await connection.execute(select(func.count()).select_from(HOLDS))).scalar_one()
    return UsageReport(
        since=None if since is None else since.isoformat(),
        until=None if until is None else until.isoformat(),
        totals=total[0][1],
        by_model=tuple(ModelTotals(names[0], totals) for names, totals in by_model),
        by_caller=tuple(
            CallerTotals(key_id, name, user, app, org, totals) for (key_id, name, user, app, org), totals in by_caller
        ),
        by_day=tuple(DayTotals(names[0], totals) for names, totals in by_day),
        holds_open=holds_open,
    )


async def _grouped(
    connection: AsyncConnection, by: tuple[ColumnElement[Any], ...], since: date | None, until: date | None
) -> list[tuple[tuple[Any, ...], Totals]]:
    found = await connection.execute(between(select(*by, *sums()).group_by(*by).order_by(*by), since, until))
    return [(tuple(row[: len(by)]), totals_of(row[len(by) :])) for row in found]


def totals_of(values: Sequence[Any]) -> Totals:
    """What `sums` found."""
    return Totals(*map(int, values))


def sums() -> list[ColumnElement[Any]]:
    """The columns of `Totals`, added up."""
    summed = (LEDGER.c[name] for name in Totals.__struct_fields__[1:-1])
    # PostgreSQL adds bigints up to a numeric and has no sum of booleans
    return [
        func.count(),
        *(func.coalesce(func.sum(column), 0) for column in summed),
        func.coalesce(func.sum(cast(LEDGER.c.is_estimate, Integer)), 0),
    ]


def between(query: Select[Any], since: date | None, until: date | None) -> Select[Any]:
    """Only the rows settled on those UTC days, both included."""
    if since is not None:
        query = query.where(LEDGER.c.day >= since.isoformat())
    if until is not None:
        query = query.where(LEDGER.c.day <= until.isoformat())
    return query


_LEVEL_COLUMNS = {
    "global": (),
    "org": (LEDGER.c.org_name,),
    "app": (LEDGER.c.org_name, LEDGER.c.app_name),
    "user": (LEDGER.c.org_name, LEDGER.c.app_name, LEDGER.c.user_name),
    "key": (LEDGER.c.key_id,),
}
"""What a level's path stands for, in order."""


class Spending:
    """What the levels above requests have spent, for their budgets."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def spent_microusd(self, level: Level, since_day: str) -> int:
        """Cost of the level's rows from that UTC day (YYYY-MM-DD) on, without open holds. Raises StorageFailed."""
        query = select(func.coalesce(func.sum(LEDGER.c.cost_microusd), 0)).where(LEDGER.c.day >= since_day)
        for column, name in zip(_LEVEL_COLUMNS[level.kind], level.path, strict=True):
            query = query.where(column == name if name else column.is_(None))
        try:
            async with self._database.reading() as connection:
                return int((await connection.execute(query)).scalar_one())
        except SQLAlchemyError as error:
            raise StorageFailed(f"what {level.title} has spent can't be read, so its budget can't be kept") from error
