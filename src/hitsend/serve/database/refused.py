"""Why a database that is there takes no writes: a full disk, a file system that became read-only, an error of the disk.

Enters: what a driver raised. Leaves: the reason in its words, or None where the write itself was at fault. Always true:
it is said once, not with every write that fails of it, and said again when it is over. Next: `watch.py`.
"""

import logging
import sqlite3

from sqlalchemy.exc import DBAPIError

SAY_EVERY_S = 60.0
"""A disk that is full to the last page takes one write and refuses the next: that isn't said each time."""

_SQLITE = frozenset(
    {
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_NOTADB,
    }
)
_POSTGRES = ("53", "58", "25006")
"""Of SQLSTATE: out of disk or memory, an error of the system, a server that is read-only."""

_log = logging.getLogger(__name__)


def reason_of(error: BaseException) -> str | None:
    """What refused, if that wasn't the statement."""
    cause = error.orig if isinstance(error, DBAPIError) else error
    code, state = getattr(cause, "sqlite_errorcode", None), getattr(cause, "sqlstate", None)
    is_refusal = (isinstance(code, int) and code & 0xFF in _SQLITE) or str(state).startswith(_POSTGRES)
    return str(cause) if is_refusal else None


class Refusal:
    """Whether writes are refused at the moment, and why."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._said_at: float | None = None
        self._is_said = False

    def met(self, reason: str, now: float) -> None:
        """A write failed of it."""
        is_new, self.reason = self.reason is None, reason
        if is_new and (self._said_at is None or now >= self._said_at + SAY_EVERY_S):
            self._said_at, self._is_said = now, True
            _log.error("the database takes no writes: %s; requests are refused until it does", reason)

    def ended(self) -> None:
        """A write was taken again."""
        self.reason = None
        if self._is_said:
            self._is_said = False
            _log.warning("the database takes writes again")
