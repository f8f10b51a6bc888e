"""Logs on stderr, for people or for machines.

Enters: the `log` settings. Leaves: a configured root logger. Always true: one line per message, also with a traceback
in JSON; line breaks in what is logged can't forge a second entry. Next: `app.py`.
"""

import json
import logging
import sys

from hitsend.settings import LogSettings


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """One JSON object."""
        entry = {
            "at": self.formatTime(record, "%Y-%m-%dT%H:%M:%S"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


class _Pretty(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """`12:00:01 warning hitsend.serve: message`, with a traceback below where there is one."""
        head = f"{self.formatTime(record, '%H:%M:%S')} {record.levelname.lower()} {record.name}: "
        text = head + record.getMessage().replace("\r", "\\r").replace("\n", "\\n")
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


def set_up_logs(settings: LogSettings) -> None:
    """Make the root logger write to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if settings.format == "json" else _Pretty())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(settings.level.upper())
    # Their own lines about starting and stopping say nothing that ours do not.
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    logging.getLogger("alembic").setLevel(logging.WARNING)
