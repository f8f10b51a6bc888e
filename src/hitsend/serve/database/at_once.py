"""One statement, in a transaction of its own, made by the event loop itself: for a request that comes alone.

Enters: a statement for SQLite and its values. Leaves: whether it wrote a row, or None: it wasn't made, or nobody knows.
Always true: it waits for nobody, neither for another process's lock nor for the disk, so the loop stands still for a
tenth of a millisecond; whoever gets None goes to the writer, with a statement that may run twice. Next: `sqlite.py`.

    Between requests that are seconds apart the processor forgets the code of both, so what counts is how much code runs
    at all: the way to the writer's thread and back takes four times as long as the transaction (decision 007).
"""

import sqlite3
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Engine, PoolProxiedConnection
from sqlalchemy.exc import SQLAlchemyError


class AtOnce:
    """Its connection, which is opened with the first statement and again after a fault. `engine`: whose database."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._taken: PoolProxiedConnection | None = None

    def run(self, statement: str, values: Sequence[Any]) -> bool | None:
        """Whether it wrote a row; durable as what `may_lag`, see `Database.write`."""
        try:
            connection = self._opened()
            connection.execute("BEGIN IMMEDIATE")
            has_written: bool = connection.execute(statement, values).rowcount == 1
            connection.execute("COMMIT")
        except (sqlite3.Error, SQLAlchemyError, ValueError, OverflowError):  # the writer meets it again, and says so
            if self._taken is not None and self._driver.in_transaction:
                self.close()
            return None
        return has_written

    def close(self) -> None:
        """Close the connection; a transaction that was open is undone. Safe to call twice."""
        taken, self._taken = self._taken, None
        if taken is not None:
            taken.close()

    def _opened(self) -> Any:
        if self._taken is None:
            self._taken = self._engine.raw_connection()
            self._taken.detach()  # from the pool: nobody else gets it, set up as it is
            self._driver.execute("PRAGMA synchronous=NORMAL")
            self._driver.execute("PRAGMA busy_timeout=0")
            self._driver.execute("PRAGMA wal_autocheckpoint=0")
        return self._driver

    @property
    def _driver(self) -> Any:
        assert self._taken is not None
        return self._taken.dbapi_connection
