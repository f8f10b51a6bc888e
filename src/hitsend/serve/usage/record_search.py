"""Which flight records are meant, and how long those took.

Enters: a `RecordFilter`, an open database. Leaves: conditions for lists, percentiles with the requests behind them.
Always true: what a filter says of a summary in memory and of a row on disk is the same; everything it asks about stands
in the index `ix_records_search`; percentiles are of the newest `MOST_COUNTED` at most, and say of how many they are.
Next: `records.py`.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec
from sqlalchemy import ColumnElement, and_, or_, select
from sqlalchemy.exc import SQLAlchemyError

from hitsend.core.errors import StorageFailed
from hitsend.serve.database.connection import Database
from hitsend.serve.database.schema import RECORDS

MOST_COUNTED = 5_000
SHARES = (50, 75, 90, 95, 99)

Place = tuple[float, str]
"""Where a record stands in the order of arrival: when it came (seconds since the epoch), then its id."""


class Searched(Protocol):
    """The part of a summary that is searched by."""

    @property
    def request_id(self) -> str: ...  # noqa: D102  # as in the record
    @property
    def received_at(self) -> float: ...  # noqa: D102
    @property
    def key_name(self) -> str: ...  # noqa: D102
    @property
    def model(self) -> str | None: ...  # noqa: D102
    @property
    def finish_reason(self) -> str | None: ...  # noqa: D102
    @property
    def wall_ms(self) -> float: ...  # noqa: D102
    @property
    def cost_microusd(self) -> int: ...  # noqa: D102


class RecordFilter(msgspec.Struct, frozen=True):
    """All that is set must hold. `before`: only those that stand behind that place in a list of the newest."""

    name: str | None = None
    model: str | None = None
    finish_reason: str | None = None
    min_wall_ms: float | None = None
    min_cost_microusd: int | None = None
    before: Place | None = None

    def has(self, one: Searched) -> bool:
        """Whether that one is meant."""
        return (
            self.name in (None, one.key_name)
            and self.model in (None, one.model)
            and self.finish_reason in (None, one.finish_reason)
            and (self.min_wall_ms is None or one.wall_ms >= self.min_wall_ms)
            and (self.min_cost_microusd is None or one.cost_microusd >= self.min_cost_microusd)
            and (self.before is None or place_of(one) < self.before)
        )

    def conditions(self, key_id: str | None) -> list[ColumnElement[bool]]:
        """The same for the table; only that key's, if given."""
        table = RECORDS.c
        equal = (
            (table.key_id, key_id),
            (table.key_name, self.name),
            (table.model, self.model),
            (table.finish_reason, self.finish_reason),
        )
        found: list[ColumnElement[bool]] = [column == value for column, value in equal if value is not None]
        if self.min_wall_ms is not None:
            found.append(table.wall_ms >= self.min_wall_ms)
        if self.min_cost_microusd is not None:
            found.append(table.cost_microusd >= self.min_cost_microusd)
        if self.before is not None:
            at, request_id = self.before
            found.append(table.received_at <= at)
            found.append(or_(table.received_at < at, and_(table.received_at == at, table.request_id < request_id)))
        return found


EVERY = RecordFilter()


def place_of(one: Searched) -> Place:
    """Where it stands."""
    return (one.received_at, one.request_id)


class Percentile(msgspec.Struct, frozen=True):
    """`ms` is what `request_id` took: `share` of 100 took no longer."""

    share: int
    ms: float
    request_id: str


class Percentiles(msgspec.Struct, frozen=True):
    """Of `num_requests` records, the newest that are meant. `ttft` leaves out those that never had a token."""

    num_requests: int
    wall: tuple[Percentile, ...]
    ttft: tuple[Percentile, ...]


async def percentiles_of(database: Database, key_id: str | None, wanted: RecordFilter) -> Percentiles:
    """What took how long, with the very requests that stand at each percentile. Raises StorageFailed."""
    table = RECORDS.c
    query = (
        select(table.request_id, table.wall_ms, table.ttft_ms)
        .where(*wanted.conditions(key_id))
        .order_by(table.received_at.desc())
        .limit(MOST_COUNTED)
    )
    try:
        async with database.reading() as connection:
            rows = (await connection.execute(query)).all()
    except SQLAlchemyError as error:
        raise StorageFailed("stored records can't be read now", retry_after_s=1.0) from error
    return Percentiles(
        num_requests=len(rows),
        wall=_ranked([(wall, request_id) for request_id, wall, _ in rows]),
        ttft=_ranked([(ttft, request_id) for request_id, _, ttft in rows if ttft is not None]),
    )


def _ranked(taken: Sequence[tuple[float, str]]) -> tuple[Percentile, ...]:
    """The nearest rank: always a request that there was, never a value between two."""
    if not taken:
        return ()
    ordered = sorted(taken)
    ranks = [-(-share * len(ordered) // 100) for share in SHARES]
    return tuple(Percentile(share, *ordered[rank - 1]) for share, rank in zip(SHARES, ranks, strict=True))
