"""What the storage tests share: a real database, a clock set by hand, a database that fails on demand."""

import contextlib

from sqlalchemy import event, select

from hitsend.core.request import Principal
from hitsend.serve.database.connection import Database
from hitsend.serve.database.schema import HOLDS, LEDGER
from hitsend.serve.database.writer import Writer
from hitsend.serve.usage.ledger import Ledger
from hitsend.serve.usage.pricing import Price
from hitsend.serve.usage.rows import HoldRequest
from hitsend.settings import UsageSettings

QWEN = Price(id="test", input_picousd=450_000, output_picousd=3_200_000)
ALICE = Principal(key_id="a1", name="alice", user="u", app="a", org="o")


class HandClock:
    """Time that moves only when told."""

    def __init__(self) -> None:
        self.seconds = 1_800_000_000.0

    def now(self) -> float:
        return self.seconds

    def wall(self) -> float:
        return self.seconds


class Storage:
    """A database, its writer and a ledger, started."""

    def __init__(self, database: Database, clock: HandClock, owner: str | None) -> None:
        self.database = database
        self.clock = clock
        self.writer = Writer(database)
        self.ledger = Ledger(database, self.writer, clock, UsageSettings(), owner=owner)

    async def rows(self) -> list[dict]:
        async with self.database.reading() as connection:
            return [dict(row) for row in (await connection.execute(select(LEDGER).order_by(LEDGER.c.seq))).mappings()]

    async def holds(self) -> list[dict]:
        async with self.database.reading() as connection:
            return [dict(row) for row in (await connection.execute(select(HOLDS))).mappings()]


@contextlib.asynccontextmanager
async def storage(url: str, clock: HandClock | None = None, owner: str | None = None):
    database = await Database.open(url)
    opened = Storage(database, clock or HandClock(), owner)
    opened.writer.start()
    try:
        await opened.ledger.start()
        yield opened
        await opened.ledger.stop()
    finally:
        await opened.writer.stop()
        await database.close()


class Faults:
    """Fails statements number `first` to `first + length - 1`, commits counted too, from the moment it is attached.

    Nothing is written at once meanwhile: such statements don't pass where these are counted."""

    def __init__(self, database: Database, first: int, length: int) -> None:
        self.seen = 0
        self.failed = 0
        self._range = range(first, first + length)
        self._engines = database.sync_engines
        self._database = database
        database.write_at_once = lambda *_: None
        for engine in self._engines:
            event.listen(engine, "before_cursor_execute", self._on_statement)
            event.listen(engine, "commit", self._on_commit)

    def detach(self) -> None:
        del self._database.write_at_once
        for engine in self._engines:
            event.remove(engine, "before_cursor_execute", self._on_statement)
            event.remove(engine, "commit", self._on_commit)

    def _on_statement(self, connection, cursor, statement, parameters, context, executemany) -> None:
        self._count(connection)

    def _on_commit(self, connection) -> None:
        self._count(connection)

    def _count(self, connection) -> None:
        self.seen += 1
        if self.seen in self._range:
            self.failed += 1
            raise connection.dialect.loaded_dbapi.OperationalError("disk I/O error")


def wanted(request_id: str, *, input_tokens: int = 10, output_tokens: int = 20, **changes) -> HoldRequest:
    values = {"principal": ALICE, "model": "m", "engine": "embedded", "price": QWEN} | changes
    return HoldRequest(request_id=request_id, input_tokens=input_tokens, output_tokens=output_tokens, **values)
