"""A statement: what every part of the house used, what it costs at list price, and what is due after the allowance.

Enters: an open database, a range of UTC days and what to group by. Leaves: a `Statement`, or the rows themselves.
Always true: one SELECT sees all of it, so the parts add up to the totals exactly, also while requests are being
settled; the rows of the same range add up to the same sums; the day's free neurons belong to the whole account, so they
are lines of their own and come off no part; rows are read one after another, however many there are.
Next: `reconcile.py`.
"""

from collections.abc import AsyncGenerator
from datetime import date
from typing import Any, Literal

import msgspec
from sqlalchemy import ColumnElement, Select, case, func, select

from hitsend.serve.database.connection import Database
from hitsend.serve.database.schema import LEDGER
from hitsend.serve.usage.allowance import billed_microusd, billed_neurons_micro
from hitsend.serve.usage.report import Totals, between, read_ledger, sums, totals_of
from hitsend.serve.usage.rows import LedgerRow

By = Literal["org", "app", "user", "key", "model", "engine", "day"]

GROUPS: dict[By, dict[str, ColumnElement[Any]]] = {
    "org": {"org": LEDGER.c.org_name},
    "app": {"org": LEDGER.c.org_name, "app": LEDGER.c.app_name},
    "user": {"org": LEDGER.c.org_name, "app": LEDGER.c.app_name, "user": LEDGER.c.user_name},
    "key": {"key_id": LEDGER.c.key_id, "key": LEDGER.c.key_name},
    "model": {"model": LEDGER.c.model},
    "engine": {"engine": LEDGER.c.engine},
    "day": {"day": LEDGER.c.day},
}
"""What tells one part from another. A name means something only below the names above it."""


class Part(msgspec.Struct, frozen=True):
    """One organisation, application, …: `of` names it. Cost is at list price."""

    of: dict[str, str | None]
    totals: Totals
    neurons_micro: int


class AllowanceLine(msgspec.Struct, frozen=True):
    """What a UTC day's neurons cost less than their rows say: `amount_microusd` = billed - listed.

    It also takes back what rounding each row put on; a day whose bill is rounded up can add a micro-dollar.
    """

    day: str
    neurons_micro: int
    billed_neurons_micro: int
    listed_microusd: int
    amount_microusd: int


class Statement(msgspec.Struct, frozen=True):
    """`totals` is the sum of the parts; `due_microusd` is its cost plus the allowance lines."""

    by: By
    since: str | None
    until: str | None
    parts: tuple[Part, ...]
    totals: Totals
    neurons_micro: int
    allowance: tuple[AllowanceLine, ...]
    due_microusd: int


class NumberedRow(msgspec.Struct, frozen=True):
    """A ledger row and its number, which only grows: read on `after` it."""

    seq: int
    row: LedgerRow


class Days:
    """The neurons of each day and what their rows cost, as they come."""

    def __init__(self) -> None:
        self._found: dict[str, list[int]] = {}

    def add(self, day: str, neurons_micro: int, listed_microusd: int) -> None:
        """Some rows' neurons."""
        kept = self._found.setdefault(day, [0, 0])
        kept[0] += neurons_micro
        kept[1] += listed_microusd

    def lines(self) -> tuple[AllowanceLine, ...]:
        """One line for each day that has neurons, in order."""
        return tuple(
            AllowanceLine(
                day=day,
                neurons_micro=neurons,
                billed_neurons_micro=billed_neurons_micro(neurons),
                listed_microusd=listed,
                amount_microusd=billed_microusd(neurons) - listed,
            )
            for day, (neurons, listed) in sorted(self._found.items())
            if neurons
        )


async def statement(database: Database, by: By, since: date | None = None, until: date | None = None) -> Statement:
    """Add up the rows settled from `since` to `until`, both days included."""
    group = GROUPS[by]
    has_neurons = LEDGER.c.neurons_micro.is_not(None)
    figures = (
        func.coalesce(func.sum(LEDGER.c.neurons_micro), 0),
        func.coalesce(func.sum(case((has_neurons, LEDGER.c.cost_microusd), else_=0)), 0),
        *sums(),
    )
    names = (*group.values(), LEDGER.c.day.label("settled_day"))
    by_columns = (*group.values(), LEDGER.c.day)
    query = between(select(*names, *figures).group_by(*by_columns).order_by(*by_columns), since, until)
    parts: dict[tuple[str | None, ...], Part] = {}
    days = Days()
    async with read_ledger(database) as connection:
        for found in await connection.execute(query):
            key, values = tuple(found[: len(group)]), found[len(names) :]
            neurons, listed = int(values[0]), int(values[1])
            days.add(found[len(group)], neurons, listed)
            part = parts.get(key) or Part(dict(zip(group, key, strict=True)), Totals(), 0)
            parts[key] = Part(part.of, part.totals + totals_of(values[2:]), part.neurons_micro + neurons)
    totals = sum((part.totals for part in parts.values()), Totals())
    lines = days.lines()
    return Statement(
        by=by,
        since=None if since is None else since.isoformat(),
        until=None if until is None else until.isoformat(),
        parts=tuple(parts.values()),
        totals=totals,
        neurons_micro=sum(part.neurons_micro for part in parts.values()),
        allowance=lines,
        due_microusd=totals.cost_microusd + sum(line.amount_microusd for line in lines),
    )


_ROW = tuple(LEDGER.c[name] for name in LedgerRow.__struct_fields__)


async def stream_rows(
    database: Database, since: date | None = None, until: date | None = None
) -> AsyncGenerator[NumberedRow]:
    """Every row of the range in the order of settlement, as they stood when the first was read."""
    async with read_ledger(database) as connection:
        result = await connection.stream(_rows(since, until), execution_options={"yield_per": 1000})
        async for found in result.mappings():
            yield _numbered(found)


async def page_of_rows(
    database: Database, *, since: date | None, until: date | None, after: int, limit: int
) -> tuple[NumberedRow, ...]:
    """The next `limit` rows after that number."""
    query = _rows(since, until).where(LEDGER.c.seq > after).limit(limit)
    async with read_ledger(database) as connection:
        return tuple(_numbered(found) for found in (await connection.execute(query)).mappings())


def totals_of_row(row: LedgerRow) -> Totals:
    """One row as sums."""
    return Totals(
        requests=1,
        prompt_tokens=row.prompt_tokens,
        cached_tokens=row.cached_tokens,
        completion_tokens=row.completion_tokens,
        reasoning_tokens=row.reasoning_tokens,
        discarded_tokens=row.discarded_tokens,
        cost_microusd=row.cost_microusd,
        estimated_rows=int(row.is_estimate),
    )


def _rows(since: date | None, until: date | None) -> Select[Any]:
    return between(select(LEDGER.c.seq, *_ROW).order_by(LEDGER.c.seq), since, until)


def _numbered(found: Any) -> NumberedRow:
    values = dict(found)
    return NumberedRow(values.pop("seq"), LedgerRow(**values))
