"""Whether the books agree: ledger, engine counters, metrics and flight records.

Enters: the database, and from a running server what its engine and its metrics counted since it started. Leaves: a
`Reconciliation`: every check by name with both figures. Always true: nothing is changed; figures of a process are
compared with the rows that this process settled (`settled_by`); while requests are under way, what has to be equal at
rest is held to the one inequality that is true at any moment. Next: `records.py`.
"""

from collections.abc import AsyncGenerator, Callable
from datetime import UTC, datetime
from typing import Any, Literal, Protocol

import msgspec
from sqlalchemy import ColumnElement, Select, and_, exists, func, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from hitsend.serve.database.connection import Database
from hitsend.serve.database.schema import HOLDS, LEDGER, RECORDS
from hitsend.serve.usage import owner as owners
from hitsend.serve.usage.ledger import RECOVERED, UNCONFIRMED
from hitsend.serve.usage.pricing import PICO_PER_MICRO, PICOUSD_PER_MICRONEURON, REPEAT
from hitsend.serve.usage.report import read_ledger

MAX_EXAMPLES = 20
STORED_LATER_S = 5.0
"""Records are stored a moment after their rows: younger rows are not missed yet."""

_NOT_COUNTED = (RECOVERED, UNCONFIRMED)
"""Rows that end a hold of which no request of this process remained."""


class StepCounts(Protocol):
    """What is read of an engine's `StepFigures`."""

    @property
    def prefill_tokens(self) -> int: ...  # noqa: D102  # the names are explained where StepFigures is
    @property
    def output_tokens(self) -> int: ...  # noqa: D102


class EngineCounts:
    """What one engine computed since this process started, counted apart from the metrics."""

    def __init__(self, engine: str) -> None:
        self.engine = engine
        self.prefill_tokens = 0
        self.output_tokens = 0

    def observe_step(self, figures: StepCounts) -> None:
        """Count one pass through the model."""
        self.prefill_tokens += figures.prefill_tokens
        self.output_tokens += figures.output_tokens


class Counted(msgspec.Struct, frozen=True):
    """The sums that metrics and ledger must agree on."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    discarded_tokens: int = 0
    cost_microusd: int = 0


class ProcessFigures(msgspec.Struct, frozen=True):
    """One moment of a server process. `sampled_in_metrics` and `prefill_in_metrics` are the engine's steps as the
    metrics have them.
    """

    owner: str
    started_at: float
    is_at_rest: bool
    engine: str
    sampled_tokens: int
    prefill_tokens: int
    sampled_in_metrics: int
    prefill_in_metrics: int
    metrics: Counted


class Check(msgspec.Struct, frozen=True):
    """`left` must be `relation` to `right`; `examples` are request ids."""

    name: str
    what: str
    left: int
    right: int
    relation: Literal["=", "<="] = "="
    examples: tuple[str, ...] = ()

    @property
    def is_good(self) -> bool:
        """Whether it holds."""
        return self.left <= self.right if self.relation == "<=" else self.left == self.right


class Reconciliation(msgspec.Struct, frozen=True):
    """`drifted` are the names of checks that don't hold. `owner` and `started_at` are None without a server;
    `is_at_rest` False: requests were under way, so some checks were weaker than they could be.
    """

    checks: tuple[Check, ...]
    drifted: tuple[str, ...]
    owner: str | None = None
    started_at: float | None = None
    is_at_rest: bool = True


async def reconcile(
    database: Database, now: float, figures: Callable[[], ProcessFigures] | None = None
) -> Reconciliation:
    """Compare everything. `now`: seconds since the epoch. `figures`: asked before and after the ledger is read."""
    before = figures() if figures is not None else None
    async with read_ledger(database) as connection:
        checks = [check async for check in _stored(connection, now)]
        rows = None if before is None else await _rows_of(connection, before)
        from_engine = None if before is None else await _rows_of(connection, before, engine=before.engine)
    if before is None or figures is None or rows is None or from_engine is None:
        return _summed_up(checks)
    after = figures()
    is_at_rest = before.is_at_rest and before == after
    checks += _metered(before.metrics, rows, "=" if is_at_rest else "<=")
    checks += _computed(after, from_engine, is_at_rest=is_at_rest)
    return msgspec.structs.replace(
        _summed_up(checks), owner=before.owner, started_at=before.started_at, is_at_rest=is_at_rest
    )


def _summed_up(checks: list[Check]) -> Reconciliation:
    return Reconciliation(tuple(checks), tuple(check.name for check in checks if not check.is_good))


def _metered(metrics: Counted, rows: Counted, relation: Literal["=", "<="]) -> list[Check]:
    """A request is counted when it has closed, after its row: metrics never run ahead of the ledger."""
    return [
        Check(f"metrics_{name}", f"{name}: in the metrics, in this process's rows", counted, in_rows, relation)
        for name, counted, in_rows in zip(
            Counted.__struct_fields__, msgspec.structs.astuple(metrics), msgspec.structs.astuple(rows), strict=True
        )
    ]


def _computed(engine: ProcessFigures, rows: Counted, *, is_at_rest: bool) -> list[Check]:
    """Rows come after steps: what is billed or discarded has been computed.

    A prompt is billed once, but computed again for choices that find no place beside the first and after a preemption:
    the engine may have computed more of it, never less.
    """
    return [
        Check(
            "tokens_sampled",
            "output tokens: billed or discarded, sampled by the engine",
            rows.completion_tokens + rows.discarded_tokens,
            engine.sampled_tokens,
            "=" if is_at_rest else "<=",
        ),
        Check(
            "prompt_tokens_computed",
            "prompt tokens: billed and not cached, computed by the engine",
            rows.prompt_tokens - rows.cached_tokens,
            engine.prefill_tokens,
            "<=",
        ),
        Check(
            "metrics_sampled",
            "output tokens: in the metrics, sampled by the engine",
            engine.sampled_in_metrics,
            engine.sampled_tokens,
        ),
        Check(
            "metrics_prompt_computed",
            "prompt tokens: in the metrics, computed by the engine",
            engine.prefill_in_metrics,
            engine.prefill_tokens,
        ),
    ]


async def _rows_of(connection: AsyncConnection, process: ProcessFigures, engine: str | None = None) -> Counted:
    query = select(
        func.count(),
        *(func.coalesce(func.sum(LEDGER.c[name]), 0) for name in Counted.__struct_fields__[1:]),
    ).where(
        LEDGER.c.day >= datetime.fromtimestamp(process.started_at, UTC).strftime("%Y-%m-%d"),
        LEDGER.c.settled_by == process.owner,
        LEDGER.c.reason.not_in(_NOT_COUNTED),
    )
    if engine is not None:
        query = query.where(LEDGER.c.engine == engine)
    return Counted(*map(int, (await connection.execute(query)).one()))


async def _stored(connection: AsyncConnection, now: float) -> AsyncGenerator[Check]:
    """What the database alone can tell."""
    held = (await connection.execute(select(HOLDS.c.request_id, HOLDS.c.owner, HOLDS.c.lease_until))).all()
    left = [
        row.request_id
        for row in held
        if (is_dead := owners.is_dead(row.owner)) or (is_dead is None and row.lease_until <= now)
    ]
    yield Check(
        "holds_without_owner", "holds whose process is gone", len(left), 0, examples=tuple(sorted(left)[:MAX_EXAMPLES])
    )
    for name, what, where in (
        ("rows_wrong_cost", "rows whose cost isn't their tokens at their price", _has_wrong_cost()),
        ("rows_wrong_neurons", "rows whose neurons aren't their tokens at their price", _has_wrong_neurons()),
        ("rows_without_record", "rows without a flight record", _has_no_record(now)),
    ):
        yield await _none_of(connection, name, what, select(LEDGER.c.request_id).where(where))
    is_billed = or_(RECORDS.c.prompt_tokens > 0, RECORDS.c.completion_tokens > 0)
    has_row = exists().where(LEDGER.c.request_id == RECORDS.c.request_id)
    lonely = select(RECORDS.c.request_id).where(is_billed, ~has_row)
    yield await _none_of(connection, "records_without_row", "billed flight records without a row", lonely)
    differing = (
        select(LEDGER.c.request_id)
        .join(RECORDS, RECORDS.c.request_id == LEDGER.c.request_id)
        .where(or_(*(RECORDS.c[name] != LEDGER.c[name] for name in _SHARED)))
    )
    yield await _none_of(connection, "records_differ", "flight records that say other figures than the row", differing)


_SHARED = ("prompt_tokens", "completion_tokens", "cost_microusd")


async def _none_of(connection: AsyncConnection, name: str, what: str, query: Select[Any]) -> Check:
    """A check that nothing is found."""
    found = (await connection.execute(query.limit(MAX_EXAMPLES))).scalars().all()
    count = len(found)
    if count == MAX_EXAMPLES:
        count = (await connection.execute(select(func.count()).select_from(query.subquery()))).scalar_one()
    return Check(name, what, count, 0, examples=tuple(sorted(found)))


def _picousd() -> ColumnElement[Any]:
    cached_price = func.coalesce(LEDGER.c.price_cached_input_picousd, LEDGER.c.price_input_picousd)
    return (
        (LEDGER.c.prompt_tokens - LEDGER.c.cached_tokens) * LEDGER.c.price_input_picousd
        + LEDGER.c.cached_tokens * cached_price
        + LEDGER.c.completion_tokens * LEDGER.c.price_output_picousd
    )


def _has_wrong_cost() -> ColumnElement[bool]:
    return (_picousd() + PICO_PER_MICRO // 2) // PICO_PER_MICRO != LEDGER.c.cost_microusd


def _has_wrong_neurons() -> ColumnElement[bool]:
    """A repeat costs nothing, but uses neurons: its row has no price to hold them against."""
    is_priced = and_(LEDGER.c.neurons_micro.is_not(None), LEDGER.c.price_id != REPEAT)
    return and_(is_priced, LEDGER.c.neurons_micro * PICOUSD_PER_MICRONEURON != _picousd())


def _has_no_record(now: float) -> ColumnElement[bool]:
    """Rows older than the oldest record are not missed: records are kept for some days only."""
    oldest = select(func.min(RECORDS.c.received_at)).scalar_subquery()
    return and_(
        LEDGER.c.created_at >= oldest,
        LEDGER.c.settled_at < now - STORED_LATER_S,
        LEDGER.c.reason.not_in(_NOT_COUNTED),
        ~exists().where(RECORDS.c.request_id == LEDGER.c.request_id),
    )
