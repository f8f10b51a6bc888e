"""Many holds or rows in a few statements: what one transaction of the writer does for a whole group of requests.

Enters: a connection inside a transaction, and all that the group brought of one kind. Leaves: one result for each, in
order. Always true: the same answers as `insert_hold` and `end_hold` give one by one, also when it runs twice; where
several can write at once (PostgreSQL), a lone one is asked about and inserted by one statement, so that a group that
failed by a race with another gateway is told apart request by request when it is tried again alone. Next: `ledger.py`.
"""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from sqlalchemy import Connection, delete

from hitsend.serve.database.schema import HOLDS, LEDGER
from hitsend.serve.database.sqlite import delete_in, insert_many, insertion_unless_taken, select_in
from hitsend.serve.database.writer import Writer
from hitsend.serve.usage.allowance import DayNeurons
from hitsend.serve.usage.rows import (
    HELD,
    SETTLED,
    Hold,
    LedgerRow,
    find_row,
    hold_values,
    insert_hold,
    insert_row,
)

Taken = Literal["taken", "used before"] | DayNeurons


def insert_holds(connection: Connection, holds: Sequence[tuple[Hold, str, float]]) -> list[Taken]:
    """Take (hold, owner, lease_until) each. See `insert_hold`; where a day's limit counts, one after the other."""
    if _is_alone(connection, holds) or any(hold.request.neurons_limit_micro is not None for hold, _, _ in holds):
        return [insert_hold(connection, *each) for each in holds]
    values = [(*hold_values(hold).values(), owner, lease_until) for hold, owner, lease_until in holds]
    is_lone = len(holds) == 1 and connection.dialect.name == "sqlite"
    if is_lone and connection.exec_driver_sql(*_lone_insertion(values[0])).rowcount == 1:
        return ["taken"]
    asked = [hold.request.request_id for hold, _, _ in holds]
    taken = {row[0]: "" for row in select_in(connection, LEDGER.c.request_id, asked, (LEDGER.c.request_id,))}
    held = (HOLDS.c.request_id, HOLDS.c.hold_id)
    taken |= dict(select_in(connection, HOLDS.c.request_id, asked, held))
    fresh = []
    for (hold, _, _), row in zip(holds, values, strict=True):
        if hold.request.request_id not in taken:
            taken[hold.request.request_id] = hold.hold_id
            fresh.append(row)
    if fresh:
        insert_many(connection, HOLDS, HELD, fresh)
    return ["taken" if taken[hold.request.request_id] == hold.hold_id else "used before" for hold, _, _ in holds]


def take_at_once(writer: Writer, hold: Hold, owner: str, lease_until: float) -> bool:
    """Whether the hold was taken without waiting for anything. False says nothing: `insert_holds` is to be asked."""
    if hold.request.neurons_limit_micro is not None:
        return False
    return writer.write_at_once(*_lone_insertion((*hold_values(hold).values(), owner, lease_until))) is True


def _lone_insertion(values: tuple[Any, ...]) -> tuple[str, tuple[Any, ...]]:
    return insertion_unless_taken(HOLDS, HELD, values, (LEDGER.c.request_id, HOLDS.c.request_id))


def end_holds(connection: Connection, ended: Sequence[tuple[LedgerRow, str]]) -> list[LedgerRow]:
    """Write the rows of (row, owner) and remove their holds. A row that stands already stays, and is returned."""
    rows = [row for row, _ in ended]
    if _is_alone(connection, rows):
        standing = None if insert_row(connection, *ended[0]) else find_row(connection, rows[0].request_id)
        connection.execute(delete(HOLDS).where(HOLDS.c.hold_id == rows[0].hold_id))
        return [standing or rows[0]]
    asked = [row.request_id for row in rows]
    standing_ids = {row[0] for row in select_in(connection, LEDGER.c.request_id, asked, (LEDGER.c.request_id,))}
    owners = {row.request_id: owner for row, owner in reversed(ended)}
    fresh = {row.request_id: row for row in reversed(rows) if row.request_id not in standing_ids}
    if fresh:
        settled = [(*msgspec.structs.astuple(row), owners[row.request_id]) for row in fresh.values()]
        insert_many(connection, LEDGER, SETTLED, settled)
    delete_in(connection, HOLDS.c.hold_id, [row.hold_id for row in rows])
    return [fresh.get(row.request_id) or find_row(connection, row.request_id) or row for row in rows]


def _is_alone(connection: Connection, several: Sequence[object]) -> bool:
    """Whether it must be one statement. SQLite has one writer at a time, and ours began as one."""
    return len(several) == 1 and connection.dialect.name != "sqlite"
