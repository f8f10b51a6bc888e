"""A hold and a ledger row, and the statements that write and read them.

Enters: frozen structs. Leaves: the same, to and from the tables. Always true: a row is inserted only where none stands
for its request, in the same transaction that removes its hold; every statement here may run twice. Next: `ledger.py`.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Literal

import msgspec
from sqlalchemy import (
    ColumnElement,
    Connection,
    Insert,
    Table,
    and_,
    bindparam,
    delete,
    exists,
    func,
    insert,
    select,
    update,
)

from hitsend.core.request import Principal, Usage
from hitsend.serve.database.schema import HOLDS, LEDGER
from hitsend.serve.usage.allowance import DayNeurons
from hitsend.serve.usage.pricing import Price, held_neurons_micro


class HoldRequest(msgspec.Struct, frozen=True):
    """What is reserved for one request before work starts: its input and all the output it may produce.

    `neurons_limit_micro`: the most neurons that the account may use on one UTC day, this hold included (the provider's
    free plan); None: no limit.
    """

    request_id: str
    principal: Principal
    model: str
    engine: str
    price: Price
    input_tokens: int
    output_tokens: int
    neurons_limit_micro: int | None = None


class Hold(msgspec.Struct, frozen=True):
    """A reservation that is durable and will end in exactly one ledger row. `price` is the one that will be billed."""

    hold_id: str
    request: HoldRequest
    held_microusd: int
    created_at: float


class LedgerRow(msgspec.Struct, frozen=True):
    """One settled request. Prices are pico-USD per token; instants are seconds since the epoch; `day` is in UTC.

    `reason` is a finish reason, `refused`, an error's code, or `recovered_after_crash`; `is_estimate` marks rows whose
    counts are not the engine's own. `discarded_tokens` were computed for nobody and are not billed. `cost_microusd` is
    the list price; where `neurons_micro` is a number, the day's allowance comes off it in the statement.
    """

    request_id: str
    hold_id: str
    key_id: str | None
    key_name: str
    user_name: str | None
    app_name: str | None
    org_name: str | None
    model: str
    engine: str
    price_id: str
    price_input_picousd: int
    price_output_picousd: int
    price_cached_input_picousd: int | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    discarded_tokens: int
    cost_microusd: int
    reason: str
    is_estimate: bool
    created_at: float
    settled_at: float
    day: str
    neurons_micro: int | None = None

    @property
    def usage(self) -> Usage:
        """The billed tokens."""
        return Usage(self.prompt_tokens, self.completion_tokens, self.cached_tokens, self.reasoning_tokens)


SETTLED = (*LedgerRow.__struct_fields__, "settled_by")
"""The columns of a row, in the order of its fields."""

_CARRIED = (
    "request_id",
    "hold_id",
    "key_id",
    "key_name",
    "user_name",
    "app_name",
    "org_name",
    "model",
    "engine",
    "price_id",
    "price_input_picousd",
    "price_output_picousd",
    "price_cached_input_picousd",
    "created_at",
)
"""Columns that a ledger row takes over from its hold."""


def day_of(instant: float) -> str:
    """The UTC day, as YYYY-MM-DD."""
    return _day(int(instant) // 86_400)


@lru_cache(maxsize=8)
def _day(day: int) -> str:
    return datetime.fromtimestamp(day * 86_400, UTC).strftime("%Y-%m-%d")


HELD = (
    "hold_id",
    "request_id",
    "key_id",
    "key_name",
    "user_name",
    "app_name",
    "org_name",
    "model",
    "engine",
    "price_id",
    "price_input_picousd",
    "price_output_picousd",
    "price_cached_input_picousd",
    "input_tokens",
    "output_tokens",
    "held_microusd",
    "created_at",
    "neurons_micro",
    "owner",
    "lease_until",
)
"""The columns of a hold, in the order of `hold_values`, then who holds and until when."""


def hold_values(hold: Hold) -> dict[str, Any]:
    """A hold as column values, without owner and lease."""
    request, caller, price = hold.request, hold.request.principal, hold.request.price
    return {
        "hold_id": hold.hold_id,
        "request_id": request.request_id,
        "key_id": caller.key_id,
        "key_name": caller.name,
        "user_name": caller.user,
        "app_name": caller.app,
        "org_name": caller.org,
        "model": request.model,
        "engine": request.engine,
        "price_id": price.id,
        "price_input_picousd": price.input_picousd,
        "price_output_picousd": price.output_picousd,
        "price_cached_input_picousd": price.cached_input_picousd,
        "input_tokens": request.input_tokens,
        "output_tokens": request.output_tokens,
        "held_microusd": hold.held_microusd,
        "created_at": hold.created_at,
        "neurons_micro": held_neurons_micro(price, request.input_tokens, request.output_tokens),
    }


def ledger_row(held: Mapping[str, Any], usage: Usage, settled_at: float, **found: Any) -> LedgerRow:
    """The row that ends a hold, given the hold's column values and what was `found` (cost_microusd, reason, …)."""
    return LedgerRow(
        **{name: held[name] for name in _CARRIED},
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
        reasoning_tokens=usage.reasoning_tokens,
        settled_at=settled_at,
        day=day_of(settled_at),
        **found,
    )


def row_of(hold: Hold, usage: Usage, settled_at: float, **found: Any) -> LedgerRow:
    """The same for a hold that is at hand."""
    request, caller, price = hold.request, hold.request.principal, hold.request.price
    return LedgerRow(
        request_id=request.request_id,
        hold_id=hold.hold_id,
        key_id=caller.key_id,
        key_name=caller.name,
        user_name=caller.user,
        app_name=caller.app,
        org_name=caller.org,
        model=request.model,
        engine=request.engine,
        price_id=price.id,
        price_input_picousd=price.input_picousd,
        price_output_picousd=price.output_picousd,
        price_cached_input_picousd=price.cached_input_picousd,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
        reasoning_tokens=usage.reasoning_tokens,
        created_at=hold.created_at,
        settled_at=settled_at,
        day=day_of(settled_at),
        **found,
    )


def _insert_unless(table: Table, columns: tuple[str, ...], taken: ColumnElement[bool]) -> Insert:
    """INSERT … SELECT :values WHERE NOT taken: one statement that any SQL database reads the same way."""
    values = [bindparam(f"v_{name}", type_=table.c[name].type).label(name) for name in columns]
    return insert(table).from_select(list(columns), select(*values).where(~taken))


_THIS_REQUEST = bindparam("this_request", type_=LEDGER.c.request_id.type)
_THIS_HOLD = bindparam("this_hold", type_=LEDGER.c.hold_id.type)

_INSERT_HOLD = _insert_unless(
    HOLDS,
    HELD,
    exists().where(LEDGER.c.request_id == _THIS_REQUEST) | exists().where(HOLDS.c.request_id == _THIS_REQUEST),
)
_INSERT_ROW = _insert_unless(
    LEDGER,
    SETTLED,
    exists().where(LEDGER.c.request_id == _THIS_REQUEST),
)
_HOLD_IS_THERE = select(HOLDS.c.hold_id).where(HOLDS.c.hold_id == _THIS_HOLD)
_DELETE_HOLD = delete(HOLDS).where(HOLDS.c.hold_id == _THIS_HOLD)
_ROW_OF = select(*(LEDGER.c[name] for name in LedgerRow.__struct_fields__)).where(LEDGER.c.request_id == _THIS_REQUEST)
_KEEP_COUNT = {"preserve_rowcount": True}


def insert_hold(
    connection: Connection, hold: Hold, owner: str, lease_until: float
) -> Literal["taken", "used before"] | DayNeurons:
    """Take the hold, unless the request id was used before (by a hold or a row that isn't this one's) or the day has
    too few neurons left: then what it has is returned.
    """
    today = _too_full_day(connection, hold)
    if today is not None:
        return today
    values = hold_values(hold) | {"owner": owner, "lease_until": lease_until}
    parameters = {f"v_{name}": values[name] for name in HELD}
    parameters["this_request"] = hold.request.request_id
    if connection.execute(_INSERT_HOLD, parameters, execution_options=_KEEP_COUNT).rowcount:
        return "taken"
    is_standing = connection.execute(_HOLD_IS_THERE, {"this_hold": hold.hold_id}).first() is not None
    return "taken" if is_standing else "used before"


def _too_full_day(connection: Connection, hold: Hold) -> DayNeurons | None:
    """What the hold's day has, where that leaves too little for it."""
    request, limit = hold.request, hold.request.neurons_limit_micro
    if limit is None:
        return None
    today = day_neurons(connection, day_of(hold.created_at), but=hold.hold_id)
    wanted = held_neurons_micro(request.price, request.input_tokens, request.output_tokens) or 0
    return today if today.used_micro + today.held_micro + wanted > limit else None


def move_hold(connection: Connection, hold: Hold) -> DayNeurons | None:
    """Let the hold of that id stand for another engine; where that has too few neurons left, what its day has."""
    today = _too_full_day(connection, hold)
    if today is None:
        connection.execute(update(HOLDS).where(HOLDS.c.hold_id == hold.hold_id).values(hold_values(hold)))
    return today


def row_values(row: LedgerRow, owner: str) -> dict[str, Any]:
    """A row as column values. `owner`: the process that settles it."""
    return {name: getattr(row, name) for name in LedgerRow.__struct_fields__} | {"settled_by": owner}


def insert_row(connection: Connection, row: LedgerRow, owner: str) -> bool:
    """False where a row of that request stands already."""
    parameters = {f"v_{name}": value for name, value in row_values(row, owner).items()}
    parameters["this_request"] = row.request_id
    return bool(connection.execute(_INSERT_ROW, parameters, execution_options=_KEEP_COUNT).rowcount)


def find_row(connection: Connection, request_id: str) -> LedgerRow | None:
    """The row of that request, once it is settled."""
    found = connection.execute(_ROW_OF, {"this_request": request_id}).mappings().first()
    return None if found is None else LedgerRow(**found)


def day_neurons(connection: Connection, day: str, *, but: str = "") -> DayNeurons:
    """What the account used on that UTC day and what it holds now, `but` the hold of that id."""
    used = connection.execute(select(func.sum(LEDGER.c.neurons_micro)).where(LEDGER.c.day == day))
    held = connection.execute(select(func.sum(HOLDS.c.neurons_micro)).where(HOLDS.c.hold_id != but))
    return DayNeurons(int(used.scalar() or 0), int(held.scalar() or 0))


def end_hold(connection: Connection, row: LedgerRow, owner: str) -> LedgerRow:
    """Write the row and remove its hold. Where a row stands already it stays as it is and is returned."""
    is_fresh = insert_row(connection, row, owner)
    connection.execute(_DELETE_HOLD, {"this_hold": row.hold_id})
    standing = None if is_fresh else find_row(connection, row.request_id)
    return row if standing is None else standing


def end_hold_if_taken(connection: Connection, row: LedgerRow, owner: str) -> LedgerRow | None:
    """`end_hold` for a hold whose reservation was never confirmed: nothing is written unless it is there."""
    if connection.execute(_HOLD_IS_THERE, {"this_hold": row.hold_id}).first() is None:
        return None
    return end_hold(connection, row, owner)


def foreign_holds(owner: str) -> Any:
    """Holds that are not this owner's."""
    return select(HOLDS).where(and_(HOLDS.c.owner != owner))
