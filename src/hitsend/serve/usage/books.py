"""What can be asked of the ledger of a running server, as functions.

Enters: its database, its counters and the state of its engine. Leaves: statements, pages of rows, reconciliations.
Always true: asking changes nothing; all raise StorageFailed when the ledger can't be read. Next: `records.py`.
"""

from collections.abc import Awaitable, Callable
from datetime import date
from functools import partial
from typing import Protocol

import msgspec

from hitsend.core.clock import Clock
from hitsend.core.limits import Level
from hitsend.serve.database.connection import Database
from hitsend.serve.usage.ledger import Ledger
from hitsend.serve.usage.metrics import Metrics
from hitsend.serve.usage.reconcile import Counted, EngineCounts, ProcessFigures, Reconciliation, reconcile
from hitsend.serve.usage.spent import Budget, Spent, budgets, spent
from hitsend.serve.usage.statement import By, NumberedRow, Statement, page_of_rows, statement


class Rows(Protocol):
    """A page of ledger rows."""

    def __call__(
        self, *, since: date | None, until: date | None, after: int, limit: int
    ) -> Awaitable[tuple[NumberedRow, ...]]:
        """The next `limit` rows after that number."""
        ...


class Books(msgspec.Struct, frozen=True):
    """The questions."""

    statement: Callable[[By, date | None, date | None], Awaitable[Statement]]
    rows: Rows
    reconcile: Callable[[], Awaitable[Reconciliation]]
    spent: Callable[[By, str | None, date | None, date | None], Awaitable[Spent]]
    budgets: Callable[[tuple[Level, ...]], Awaitable[tuple[Budget, ...]]]


class Counters(msgspec.Struct, frozen=True):
    """What this process counted. `num_busy`: choices at the engines, `num_open`: requests."""

    ledger: Ledger
    metrics: Metrics
    engine: EngineCounts
    num_busy: Callable[[], int]
    num_open: Callable[[], int]

    def figures(self) -> ProcessFigures:
        """All of it at this moment."""
        counted = self.metrics.counted()
        return ProcessFigures(
            owner=self.ledger.owner,
            started_at=self.ledger.started_at,
            is_at_rest=not (self.num_busy() or self.ledger.holds_open or self.num_open()),
            engine=self.engine.engine,
            sampled_tokens=self.engine.output_tokens,
            prefill_tokens=self.engine.prefill_tokens,
            sampled_in_metrics=counted.pop("sampled"),
            prefill_in_metrics=counted.pop("prefill"),
            metrics=Counted(**counted),
        )


def open_books(database: Database, clock: Clock, counters: Counters | None) -> Books:
    """The books of this process. Without counters (they are another process's) only what is stored is reconciled."""
    return Books(
        statement=partial(statement, database),
        rows=partial(page_of_rows, database),
        reconcile=lambda: reconcile(database, clock.wall(), None if counters is None else counters.figures),
        spent=partial(spent, database),
        budgets=partial(budgets, database, clock),
    )
