"""Opening the database, bringing its schema up to date, and handing out transactions.

Enters: a SQLAlchemy URL. Leaves: a `Database`. Always true: it is at the newest schema once `open` returned; writers on
SQLite take the write lock when their transaction begins (no upgrade deadlocks); SQLite runs in WAL mode with
`synchronous=FULL`, so that a commit survives a power cut, not only a kill: the cost (one fsync per commit) is shared by
all requests of a group, see `writer.py`. Next: `writer.py`.
"""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, event, inspect, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from hitsend.core.errors import ConfigError

logger = logging.getLogger(__name__)

SCHEMA_HEAD = "0003"
"""The newest migration. A start-up that finds it in the database never loads alembic (a test keeps it true)."""

FILE_NAME = "hitsend.sqlite3"
BUSY_TIMEOUT_MS = 5000
_WAL_ATTEMPTS = 50
_WAL_PAUSE_S = 0.1


def database_url(url: str | None, data_dir: str | Path) -> str:
    """The URL from settings, or that of the SQLite file in the data folder."""
    return url or f"sqlite+aiosqlite:///{Path(data_dir).absolute() / FILE_NAME}"


class Database:
    """An open database. Make one with `Database.open`; close it before the event loop ends."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine
        self._writing = engine.execution_options(hitsend_writes=True)

    @classmethod
    async def open(cls, url: str) -> "Database":
        """Connect, create what is missing (folder 0700, file 0600, tables). Raises ConfigError."""
        engine = _create_engine(url)
        database = cls(engine)
        try:
            if engine.dialect.name == "sqlite":
                await _enter_wal(database)
            await _bring_up_to_date(database)
        except (SQLAlchemyError, OSError) as error:
            await engine.dispose()
            raise ConfigError(f"usage.url: can't open the database {engine.url!r}: {error}") from error
        except ConfigError:
            await engine.dispose()
            raise
        return database

    @asynccontextmanager
    async def reading(self) -> AsyncGenerator[AsyncConnection]:
        """A transaction that only reads: one consistent view, never blocks the writer."""
        async with self.engine.connect() as connection:
            yield connection

    @asynccontextmanager
    async def writing(self) -> AsyncGenerator[AsyncConnection]:
        """A transaction that commits when the block ends well, else leaves no trace."""
        async with self._writing.begin() as connection:
            yield connection

    async def close(self) -> None:
        """Give all connections back. Safe to call twice."""
        await self.engine.dispose()


def _create_engine(url: str) -> AsyncEngine:
    try:
        parsed = make_url(url)
        if parsed.get_backend_name() != "sqlite":
            return create_async_engine(parsed, pool_pre_ping=True, hide_parameters=True)
        if parsed.database in {None, "", ":memory:"}:
            raise ConfigError("usage.url: an SQLite database must be a file, a ledger in memory would be lost")
        _create_file(Path(str(parsed.database)))
        engine = create_async_engine(parsed, hide_parameters=True)
    except (ArgumentError, NoSuchModuleError, ModuleNotFoundError) as error:
        raise ConfigError(f"usage.url: {error}; expected for example sqlite+aiosqlite:////data/{FILE_NAME}") from error
    except OSError as error:
        raise ConfigError(f"server.data_dir: can't create {parsed.database}: {error.strerror}") from error
    event.listen(engine.sync_engine, "connect", _on_sqlite_connect)
    event.listen(engine.sync_engine, "begin", _on_sqlite_begin)
    return engine


def _create_file(path: Path) -> None:
    """Private before SQLite creates it with the umask's rights; its -wal and -shm inherit the mode."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))


def _on_sqlite_connect(connection: Any, _: Any) -> None:
    # the driver's own transaction control begins lazily and never IMMEDIATE; None leaves BEGIN to us
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_MS}")
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.close()


def _on_sqlite_begin(connection: Connection) -> None:
    writes = connection.get_execution_options().get("hitsend_writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


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


async def _bring_up_to_date(database: Database) -> None:
    async with database.reading() as connection:
        version = await connection.run_sync(_version)
    if version == SCHEMA_HEAD:
        return
    # only a first start or an upgrade pays for the import
    from hitsend.serve.database import migrate  # noqa: PLC0415

    async with database.writing() as connection:
        await connection.run_sync(migrate.upgrade)


def _version(connection: Connection) -> str | None:
    if not inspect(connection).has_table("alembic_version"):
        return None
    version: str | None = connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
    return version
