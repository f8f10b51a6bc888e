"""What SQLite is told, and the threads that write to it and ask it small things.

Enters: transactions. Leaves: their results. Always true: writers take the write lock when their transaction begins (no
upgrade deadlocks), and give it back without the event loop, which may have other things to do; WAL mode with
`synchronous=FULL`, so that a commit survives a power cut, not only a kill: the cost (one fsync per commit) is shared by
all requests of a group, see `writer.py`. A transaction that may lag commits without an fsync: it is in the log, so the
death of any process leaves it there, and the next full commit, or `sync`, takes it to the disk; order is kept. The log
is moved into the file by a thread of its own, so that no commit waits for that, unless it grew to `MAX_LOG_PAGES`.
Next: `at_once.py`.
"""

import asyncio
import contextlib
import os
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

import msgspec
from sqlalchemy import URL, Column, Connection, Engine, Table, create_engine, delete, event, insert, select
from sqlalchemy.exc import SQLAlchemyError

from hitsend.serve.database.at_once import AtOnce

T = TypeVar("T")

BUSY_TIMEOUT_MS = 5000
MAX_LOG_PAGES = 16_000
"""64 MB, from where a commit moves the log itself."""

CACHE_KB = 1024
"""Per connection, of which a server has seven: what is read or written together lies together, so more isn't needed,
and SQLite's 2 MB each would fill up over the first hours."""

MOVE_EVERY_S = 5.0
MOVE_EVERY_COMMITS = 400
"""How long, and for how many commits, a log is left to grow: a lone client's write ten pages each, and would fill it up
to `MAX_LOG_PAGES` in a few seconds."""


class LoneThread:
    """Runs functions one after the other for an event loop.

    An executor's futures, locks and callbacks take as long as a small transaction where a request comes now and then,
    and finds none of that code in the processor's caches (decision 007).
    """

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]] | None] = SimpleQueue()
        self._num_asked = self._num_done = 0
        self._thread = Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @property
    def is_idle(self) -> bool:
        """Whether all that it was given is done."""
        return self._num_asked == self._num_done

    async def run(self, work: Callable[[], T]) -> T:
        """Its result, or what it raises; it runs even if nobody waits any more. Raises RuntimeError once closed."""
        if not self._thread.is_alive():
            raise RuntimeError("the database is closed")
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._num_asked += 1
        self._queue.put((work, future))
        return await future

    def close(self) -> None:
        """Return when all is done. Safe to call twice."""
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            work, future = job
            try:
                tell = partial(future.set_result, work())
            except StopIteration as error:  # no future takes it: whoever waits would wait forever
                tell = partial(future.set_exception, _told_otherwise(error))
            except BaseException as error:  # noqa: BLE001  # whoever waits gets it
                tell = partial(future.set_exception, error)
            self._num_done += 1
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                future.get_loop().call_soon_threadsafe(_tell, future, tell)
            del job, work, future, tell


def _told_otherwise(error: StopIteration) -> RuntimeError:
    """As a coroutine that raises it does."""
    told = RuntimeError("a transaction raised StopIteration")
    told.__cause__ = error
    return told


def _tell(future: asyncio.Future[Any], tell: Callable[[], None]) -> None:
    if not future.done():
        tell()


class SqliteThread:
    """A thread that writes, one that reads, one that moves the log, and one that waits for the disk where a commit did
    not."""

    def __init__(self, url: URL) -> None:
        engine = create_engine(
            url.set(drivername="sqlite"), hide_parameters=True, pool_reset_on_return=None, pool_use_lifo=True
        )
        self.engine = listening(engine).execution_options(hitsend_writes=True)
        self._writing = LoneThread("sqlite writer")
        self._reading = LoneThread("sqlite reader")
        self._moving = ThreadPoolExecutor(1, thread_name_prefix="sqlite log")
        self._syncing = ThreadPoolExecutor(1, thread_name_prefix="sqlite sync")
        self._at_once = AtOnce(self.engine)
        self._log = f"{url.database}-wal"
        self._asked = self._synced = 0
        self._moved_at = 0.0
        self._is_log_moved = True
        self._num_commits = 0
        self._move: asyncio.Future[None] | None = None

    async def write(self, work: Callable[[Connection], T], *, may_lag: bool) -> T:
        """See `Database.write`."""
        loop = asyncio.get_running_loop()
        self._is_log_moved = False
        done = await self._writing.run(partial(self._transact, work, may_lag))
        self._num_commits += 1
        is_due = self._num_commits >= MOVE_EVERY_COMMITS or loop.time() - self._moved_at >= MOVE_EVERY_S
        if is_due and (self._move is None or self._move.done()):
            self._moved_at, self._num_commits = loop.time(), 0
            self._move = loop.run_in_executor(self._moving, self._move_log)
        return done

    def write_at_once(self, statement: str, values: Sequence[Any]) -> bool | None:
        """See `Database.write_at_once`. Not beside another writer, nor what uses the disk; and the first commit after
        the log was moved is left to the thread, since SQLite begins a log anew with an fsync."""
        is_moving = self._move is not None and not self._move.done()
        if is_moving or self._is_log_moved or self._asked != self._synced or not self._writing.is_idle:
            return None
        has_written = self._at_once.run(statement, values)
        self._num_commits += has_written is not None
        return has_written

    async def read(self, work: Callable[[Connection], T]) -> T:
        """See `Database.read`."""
        return await self._reading.run(partial(self._look, work))

    async def sync(self) -> None:
        """Return when all that was committed before is on the disk. Raises OSError.

        A start after a power cut reads the frames of the log's file, so it is that file which is synced; frames
        that have been moved into the database already were synced by who moved them. One sync does for all who came
        before it began.
        """
        self._asked += 1
        await asyncio.get_running_loop().run_in_executor(self._syncing, self._sync, self._asked)

    def _sync(self, number: int) -> None:
        if number <= self._synced:
            return
        asked = self._asked
        with contextlib.suppress(FileNotFoundError):  # no log on this file system: then commits wait for the disk
            log = os.open(self._log, os.O_RDWR | os.O_CLOEXEC)
            try:
                os.fdatasync(log)
            finally:
                os.close(log)
        self._synced = asked

    def close(self) -> None:
        """When what was submitted is written. Safe to call twice."""
        self._moving.shutdown()
        self._syncing.shutdown()
        self._writing.close()
        self._reading.close()
        self._at_once.close()
        self.engine.dispose()

    def _transact(self, work: Callable[[Connection], T], may_lag: bool) -> T:  # noqa: FBT001  # by position only
        """In the thread. A connection that something went wrong on isn't used again."""
        with self.engine.connect() as connection:
            try:
                if connection.info.get("may_lag", False) != may_lag:
                    _say(connection, "PRAGMA synchronous=NORMAL" if may_lag else "PRAGMA synchronous=FULL")
                    connection.info["may_lag"] = may_lag
                with connection.begin():
                    return work(connection)
            except BaseException:
                connection.invalidate()
                raise

    def _look(self, work: Callable[[Connection], T]) -> T:
        """In the other thread."""
        with self.engine.connect() as connection:
            try:
                with connection.execution_options(hitsend_writes=False).begin():
                    return work(connection)
            except BaseException:
                connection.invalidate()
                raise

    def _move_log(self) -> None:
        with contextlib.suppress(SQLAlchemyError, sqlite3.Error), self.engine.connect() as connection:
            _say(connection, "PRAGMA wal_checkpoint(PASSIVE)")
        self._is_log_moved = True


def listening(engine: Engine) -> Engine:
    """An engine whose connections are set up as all must be."""
    event.listen(engine, "connect", _on_connect)
    event.listen(engine, "begin", _on_begin)
    return engine


def insert_many(connection: Connection, table: Table, names: tuple[str, ...], rows: Sequence[tuple[Any, ...]]) -> None:
    """Insert rows, their values in the order of the columns' names, in any database. SQLite's driver takes our values
    as they are; without going through every one of them, a row costs a third."""
    if connection.dialect.name != "sqlite":
        connection.execute(insert(table), [dict(zip(names, row, strict=True)) for row in rows])
        return
    connection.exec_driver_sql(_insertion(table.name, names), list(rows))


def insertion_unless_taken(
    table: Table, names: tuple[str, ...], row: tuple[Any, ...], keys: tuple[Column[str], ...]
) -> tuple[str, tuple[Any, ...]]:
    """A statement for SQLite, and its values, that inserts a row unless one of the columns has the value already that
    is the row's of the same name. It saves who comes alone the asking before."""
    values = tuple(row[names.index(key.name)] for key in keys)
    places = tuple((key.table.name, key.name) for key in keys)
    return _insertion_unless_taken(table.name, names, places), (*row, *values)


def select_in(
    connection: Connection, column: Column[str], values: Sequence[str], wanted: Sequence[Column[Any]]
) -> Sequence[Any]:
    """Rows of `wanted` columns where the column has one of the values; one prepared statement, however many."""
    if connection.dialect.name != "sqlite":
        return connection.execute(select(*wanted).where(column.in_(values))).all()
    names = tuple(each.name for each in wanted)
    found = connection.exec_driver_sql(_selection(column.table.name, column.name, names), (_listed(values),))
    return found.fetchall()


def delete_in(connection: Connection, column: Column[str], values: Sequence[str]) -> None:
    """Delete the rows where the column has one of the values."""
    if connection.dialect.name != "sqlite":
        connection.execute(delete(column.table).where(column.in_(values)))
        return
    connection.exec_driver_sql(_deletion(column.table.name, column.name), (_listed(values),))


def _listed(values: Sequence[str]) -> str:
    return msgspec.json.encode(values).decode()


@cache
def _selection(table: str, name: str, wanted: tuple[str, ...]) -> str:
    return f"SELECT {', '.join(wanted)} FROM {table} WHERE {name} IN (SELECT value FROM json_each(?))"  # noqa: S608


@cache
def _deletion(table: str, name: str) -> str:
    return f"DELETE FROM {table} WHERE {name} IN (SELECT value FROM json_each(?))"  # noqa: S608  # names of ours


@cache
def _insertion(table: str, names: tuple[str, ...]) -> str:
    return f"INSERT INTO {table} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"  # noqa: S608  # names of ours


@cache
def _insertion_unless_taken(table: str, names: tuple[str, ...], places: tuple[tuple[str, str], ...]) -> str:
    absent = " AND ".join(f"NOT EXISTS (SELECT 1 FROM {where} WHERE {name} = ?)" for where, name in places)  # noqa: S608  # names of ours
    values = ", ".join("?" * len(names))
    return f"INSERT INTO {table} ({', '.join(names)}) SELECT {values} WHERE {absent}"


def _say(connection: Connection, pragma: str) -> None:
    """Outside of any transaction, without beginning one."""
    raw: Any = connection.connection.dbapi_connection
    raw.execute(pragma).close()


def _on_connect(connection: Any, _: Any) -> None:
    # the driver's own transaction control begins lazily and never IMMEDIATE; None leaves BEGIN to us
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_MS}")
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.execute(f"PRAGMA wal_autocheckpoint={MAX_LOG_PAGES}")
    cursor.execute(f"PRAGMA cache_size=-{CACHE_KB}")
    cursor.close()


def _on_begin(connection: Connection) -> None:
    writes = connection.get_execution_options().get("hitsend_writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
