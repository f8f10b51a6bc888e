"""Opening the database, bringing its schema up to date, and handing out transactions.

Enters: a SQLAlchemy URL. Leaves: a `Database`. Always true: it is at the newest schema once `open` returned; what
SQLite is told, and how it writes, stands in `sqlite.py`; on PostgreSQL (`postgres.py`) every transaction has a bound,
and whatever comes of a server that is gone or hangs is a `DatabaseAway`. Next: `sqlite.py`.
"""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import URL, Connection, Engine, inspect, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from hitsend.core.errors import ConfigError
from hitsend.serve.database import sqlite
from hitsend.serve.database.refused import Refusal, reason_of
from hitsend.serve.database.sqlite import SqliteThread
from hitsend.settings import UsageSettings

logger = logging.getLogger(__name__)

T = TypeVar("T")

SCHEMA_HEAD = "0006"
"""The newest migration. A start-up that finds it in the database never loads alembic (a test keeps it true)."""

FILE_NAME = "hitsend.sqlite3"
_WAL_ATTEMPTS = 50
_WAL_PAUSE_S = 0.1


def database_url(url: str | None, data_dir: str | Path) -> str:
    """The URL from settings, or that of the SQLite file in the data folder."""
    return url or f"sqlite+aiosqlite:///{Path(data_dir).absolute() / FILE_NAME}"


class DatabaseAway(SQLAlchemyError):
    """The database can't be reached, or did not answer in time. Nothing is wrong with what was asked of it.

    `is_silent`: it took too long; asking again at once would take as long again.
    """

    def __init__(self, reason: str, *, is_silent: bool) -> None:
        super().__init__(reason)
        self.is_silent = is_silent


class Database:
    """An open database. Make one with `Database.open`; close it before the event loop ends."""

    def __init__(self, engine: AsyncEngine, settings: UsageSettings) -> None:
        self.engine = engine
        self.fault: str | None = None
        """Why the last transaction could not be had, until one succeeds."""
        self._refusal = Refusal()
        self._settings = settings
        self._is_remote = engine.dialect.name != "sqlite"
        self._limit_s = settings.connect_timeout_s + settings.command_timeout_s if self._is_remote else None
        reading = {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True} if self._is_remote else {}
        self._reading = engine.execution_options(**reading)
        # one hop to a thread per transaction; the asynchronous driver makes several per statement, and would keep the
        # write lock for as long as the event loop does other things between them
        self._thread = None if self._is_remote else SqliteThread(engine.url)

    @classmethod
    async def open(cls, url: str, settings: UsageSettings | None = None) -> "Database":
        """Connect, create what is missing (folder 0700, file 0600, tables). Raises ConfigError."""
        settings = settings or UsageSettings()
        engine = _create_engine(url, settings)
        database = cls(engine, settings)
        try:
            if engine.dialect.name == "sqlite":
                await _enter_wal(database)
            await database.bring_up_to_date()
        except (SQLAlchemyError, OSError) as error:
            await database.close()
            raise ConfigError(f"usage.url: can't open the database {engine.url!r}: {error}") from error
        except ConfigError:
            await database.close()
            raise
        return database

    @property
    def can_be_away(self) -> bool:
        """Whether it is a server, which may be gone; a file of this machine is there."""
        return self._is_remote

    @property
    def sync_engines(self) -> tuple[Engine, ...]:
        """Everything that statements go through, for who wants to watch them (tests make them fail)."""
        ours = self.engine.sync_engine
        return (ours,) if self._thread is None else (ours, self._thread.engine)

    @asynccontextmanager
    async def reading(self) -> AsyncGenerator[AsyncConnection]:
        """A transaction that only reads: one consistent view, never blocks the writer. Raises DatabaseAway."""
        async with self._watched(), self._reading.connect() as connection:
            yield connection

    async def write(self, work: Callable[[Connection], T], *, may_lag: bool = False) -> T:
        """Run it inside one transaction, which is durable when this returns, and leaves no trace when `work` raises.

        On SQLite it runs in a thread, from its BEGIN to its COMMIT without the event loop, also when nobody waits any
        more. With `may_lag` it need not survive a power cut before the next one that is durable, or `sync` (it does
        survive the death of this process, and of the database's). Raises what `work` raises, and DatabaseAway: then it
        is not known whether it was committed, if `work` had ended.
        """
        try:
            if self._thread is not None:
                return await self._thread.write(work, may_lag=may_lag)
            async with self._watched(), self.engine.begin() as connection:
                return await connection.run_sync(work)
        except DBAPIError as error:
            if (reason := reason_of(error)) is not None:
                self._refusal.met(reason, asyncio.get_running_loop().time())
            raise

    @property
    def refusal(self) -> str | None:
        """Why the last write was refused, though the database is there, until `try_again` finds that it takes some."""
        return self._refusal.reason

    async def try_again(self) -> None:
        """After a refusal: make a row and take it back. Raises as `write`."""
        await self.write(_make_and_take_back)
        self._refusal.ended()

    def write_at_once(self, statement: str, values: Sequence[Any]) -> bool | None:
        """One statement, made before this returns, without waiting: whether it wrote a row; it is as durable as what
        `may_lag`. None: it wasn't made, or isn't known to be, as ever on PostgreSQL; then `write` is the way."""
        return None if self._thread is None else self._thread.write_at_once(statement, values)

    async def read(self, work: Callable[[Connection], T]) -> T:
        """Run it inside one transaction that only reads. Raises as `reading`.

        For what is asked again and again: on SQLite it takes one hop to a thread, not several per statement.
        """
        if self._thread is None:
            async with self.reading() as connection:
                return await connection.run_sync(work)
        return await self._thread.read(work)

    async def sync(self) -> None:
        """Return when all that lagged is durable; on PostgreSQL nothing does. Raises OSError."""
        if self._thread is not None:
            await self._thread.sync()

    async def bring_up_to_date(self) -> None:
        """Run the migrations that are missing; of several processes one does, the others wait."""
        async with self.reading() as connection:
            version = await connection.run_sync(_version)
        if version == SCHEMA_HEAD:
            return
        # only a first start or an upgrade pays for the import
        from hitsend.serve.database import migrate  # noqa: PLC0415

        if not self._is_remote:
            await self.write(migrate.upgrade)
            return
        from hitsend.serve.database import postgres  # noqa: PLC0415

        engine = postgres.create_migrating_engine(self.engine.url, self._settings)
        async with self._watched(postgres.MIGRATION_S), engine.begin() as connection:
            await connection.run_sync(postgres.lock_migrations)
            await connection.run_sync(migrate.upgrade)

    async def close(self) -> None:
        """Give all connections back; a server that hangs is waited for as long as for a command. Safe to call twice."""
        closing = asyncio.ensure_future(self.engine.dispose())
        await asyncio.wait({closing}, timeout=self._limit_s)
        if not closing.done():
            closing.cancel()
            await asyncio.wait({closing}, timeout=self._limit_s)
        if closing.done() and not closing.cancelled() and closing.exception() is not None:
            logger.warning("the database's connections could not be closed: %s", closing.exception())
        if self._thread is not None:
            self._thread.close()

    @asynccontextmanager
    async def _watched(self, limit_s: float | None = None) -> AsyncGenerator[None]:
        """Bounds what happens inside (not on SQLite, which waits for its own disk only), and names what goes wrong."""
        if not self._is_remote:
            yield
            return
        from hitsend.serve.database import postgres  # noqa: PLC0415

        try:
            async with asyncio.timeout(limit_s or self._limit_s):
                yield
        except DBAPIError as error:
            if not postgres.is_away(error):
                raise
            raise self._away(error, is_silent=postgres.is_silent(error)) from error
        except postgres.AWAY as error:
            raise self._away(error, is_silent=postgres.is_silent(error)) from error
        self.fault = None

    def _away(self, error: Exception, *, is_silent: bool) -> DatabaseAway:
        cause = error.orig if isinstance(error, DBAPIError) else error
        self.fault = f"the database is away ({type(cause).__name__})"
        return DatabaseAway(f"{self.fault}: {cause}", is_silent=is_silent)


def _create_engine(url: str, settings: UsageSettings) -> AsyncEngine:
    try:
        parsed = make_url(url)
        if parsed.get_backend_name() == "postgresql":
            return _create_remote(parsed, settings)
        if parsed.get_backend_name() != "sqlite":
            raise ArgumentError(f"hitsend keeps no ledger in {parsed.get_backend_name()}")  # noqa: TRY301  # said below
        if parsed.database in {None, "", ":memory:"}:
            raise ConfigError("usage.url: an SQLite database must be a file, a ledger in memory would be lost")
        _create_file(Path(str(parsed.database)))
        engine = create_async_engine(parsed, hide_parameters=True)
    except (ArgumentError, NoSuchModuleError, ModuleNotFoundError) as error:
        raise ConfigError(
            f"usage.url: {error}; expected for example sqlite+aiosqlite:////data/{FILE_NAME} or "
            "postgresql+asyncpg://user:password@host/database"
        ) from error
    except OSError as error:
        raise ConfigError(f"server.data_dir: can't create {parsed.database}: {error.strerror}") from error
    sqlite.listening(engine.sync_engine)
    return engine


def _create_remote(url: URL, settings: UsageSettings) -> AsyncEngine:
    if url.drivername != "postgresql+asyncpg":
        raise ArgumentError(f"no driver {url.drivername}")
    try:
        # the driver is an extra: a plain install must work without it
        from hitsend.serve.database import postgres  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"usage.url: {url!r} needs asyncpg: install hitsend[postgres], or run `make postgres`"
        ) from error
    return postgres.create_engine(url, settings)


def _create_file(path: Path) -> None:
    """Private before SQLite creates it with the umask's rights; its -wal and -shm inherit the mode."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))


async def _enter_wal(database: Database) -> None:
    """Two processes that create the file at once can be told "locked" despite the busy timeout: try again."""
    for attempt in range(_WAL_ATTEMPTS):
        try:
            async with database.reading() as connection:
                mode = (await connection.exec_driver_sql("PRAGMA journal_mode")).scalar()
        except DBAPIError as error:
            if "locked" not in str(error) or attempt == _WAL_ATTEMPTS - 1:
                raise
            await asyncio.sleep(_WAL_PAUSE_S)
            continue
        if mode != "wal":
            logger.warning("SQLite has no WAL on this file system (journal_mode=%s): readers wait for writers", mode)
        return


def _make_and_take_back(connection: Connection) -> None:
    """An update to what is there would write nothing at all."""
    connection.execute(text("INSERT INTO alembic_version (version_num) VALUES ('tried')"))
    connection.execute(text("DELETE FROM alembic_version WHERE version_num = 'tried'"))


def _version(connection: Connection) -> str | None:
    if not inspect(connection).has_table("alembic_version"):
        return None
    version: str | None = connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
    return version
