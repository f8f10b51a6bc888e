"""Logs on stderr, for people or for machines.

Enters: the `log` settings. Leaves: a configured root logger. Always true: one line per message, also with a traceback
in JSON; one message per request (`flights.py`), which in JSON has its parts as fields of `request`; what is logged
can't forge a second entry, nor command a terminal: control characters are written as escapes. Next: `app.py`.
"""

import json
import logging
import re
import sys

from hitsend.settings import LogSettings

_COMMANDING = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, what breaks lines, what turns the direction of writing, and what can't be written at all."""


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """One JSON object."""
        entry = {
            "at": self.formatTime(record, "%Y-%m-%dT%H:%M:%S"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (request := getattr(record, "request", None)) is not None:
            entry["request"] = request()  # made here only: most logs are for people
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry)


class _Pretty(logging.Formatter):
    _told: tuple[int, str] = (0, "")
    """The last second that was told, and how: most lines have their predecessor's."""

    def format(self, record: logging.LogRecord) -> str:
        """`12:00:01 warning hitsend.serve: message`, with a traceback below where there is one."""
        second = int(record.created)
        if second != self._told[0]:
            self._told = (second, self.formatTime(record, "%H:%M:%S"))
        message = record.getMessage()
        if not (message.isascii() and message.isprintable()):
            message = _COMMANDING.sub(_escaped, message)
        text = f"{self._told[1]} {record.levelname.lower()} {record.name}: {message}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()


def set_up_logs(settings: LogSettings) -> None:
    """Make the root logger write to stderr."""
    # no format here shows them, and each is asked for on every line
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if settings.format == "json" else _Pretty())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(settings.level.upper())
    logging.getLogger("hitsend.request").setLevel(logging.INFO if settings.requests else logging.WARNING)
    # Its own lines about starting and stopping say nothing that ours do not, and a warning for each stranger who sends
    # bytes that are no HTTP would let strangers fill the disk.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    # These tell every statement with its values, digests and texts included, to whoever asks for `debug`.
    for name in ("aiosqlite", "asyncpg", "sqlalchemy"):
        logging.getLogger(name).setLevel(logging.WARNING)
