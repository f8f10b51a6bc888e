"""PostgreSQL's own half of a database: its connections, with a bound on everything that waits.

Enters: a URL and the settings with the bounds. Leaves: an engine. Always true: nothing waits for the server without an
end: connecting, each statement (here and, a little earlier, in the server itself), each lock, an abandoned
transaction; an acknowledged commit is on the server's disk, whatever the server's own default is. Loaded only for a URL
that names PostgreSQL, because its driver is an extra. Next: `connection.py`.
"""

import asyncpg  # type: ignore[import-untyped]  # it ships no types
from sqlalchemy import URL, Connection, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool

from hitsend.settings import UsageSettings

AWAY: tuple[type[Exception], ...] = (OSError, PoolTimeout, asyncpg.PostgresError, asyncpg.InterfaceError)
"""What comes unwrapped when no connection could be had, or a statement got no answer (TimeoutError is an OSError)."""

MIGRATION_S = 300.0
"""For each statement of a migration, and for waiting until another process has finished its own."""

_AWAY_CLASSES = ("08", "53", "57")
"""SQLSTATE classes: connection lost, out of resources, ended or cancelled by the server's operator (or its timeout)."""
_CANCELLED = "57014"
_MIGRATING = 0x68697473_656E64
"""The advisory lock of whoever migrates: `hitsend` in ASCII."""


def create_engine(url: URL, settings: UsageSettings) -> AsyncEngine:
    """For all that the server does. Connects on first use; stale connections are noticed and replaced."""
    command_s = settings.command_timeout_s
    return create_async_engine(
        url,
        hide_parameters=True,
        pool_pre_ping=True,
        pool_size=settings.pool_size,
        max_overflow=settings.pool_size,
        pool_timeout=settings.connect_timeout_s,
        connect_args=_connect_args(settings, command_s, min(settings.lock_timeout_s, command_s)),
    )


def create_migrating_engine(url: URL, settings: UsageSettings) -> AsyncEngine:
    """For migrations only, which may take minutes."""
    connect_args = _connect_args(settings, MIGRATION_S, MIGRATION_S)
    return create_async_engine(url, poolclass=NullPool, connect_args=connect_args, hide_parameters=True)


def lock_migrations(connection: Connection) -> None:
    """Wait until nobody else migrates this database; nobody else does until this transaction ends."""
    connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _MIGRATING})


def is_away(error: DBAPIError) -> bool:
    """Whether the server or the way to it failed, and not the statement."""
    state = getattr(error.orig, "sqlstate", None)
    return error.connection_invalidated or (isinstance(state, str) and state.startswith(_AWAY_CLASSES))


def is_silent(error: Exception) -> bool:
    """Whether it took too long: asking again at once would take as long again."""
    state = getattr(error.orig, "sqlstate", None) if isinstance(error, DBAPIError) else None
    return isinstance(error, TimeoutError | PoolTimeout) or state == _CANCELLED


def _connect_args(settings: UsageSettings, command_s: float, lock_s: float) -> dict[str, object]:
    # the server gives up before the client does: then the connection stays good, and nothing runs for nobody
    statement_ms = int(command_s * 1000 * 0.9)
    return {
        "timeout": settings.connect_timeout_s,
        "command_timeout": command_s,
        "server_settings": {
            "application_name": "hitsend",
            "synchronous_commit": "on",
            "lock_timeout": str(max(1, int(lock_s * 1000 * 0.8))),
            "statement_timeout": str(max(1, statement_ms)),
            "idle_in_transaction_session_timeout": str(max(1, statement_ms * 2)),
        },
    }
