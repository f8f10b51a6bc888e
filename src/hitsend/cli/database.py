"""The database, for commands that run beside a server or without one.

Enters: flags. Leaves: an open database, closed again after the command. Always true: it is the one the server uses with
the same flags; a failed request becomes one line for a person. Next: `keys.py`, `usage.py`.
"""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from hitsend.cli import CallFailed, options
from hitsend.core.errors import ServeError
from hitsend.serve.database.connection import Database, database_url

T = TypeVar("T")


def with_database(config: Path | None, data: Path | None, work: Callable[[Database], Awaitable[T]]) -> T:
    """Open the database that the settings name, do the work, close it. Raises CallFailed and ConfigError."""
    settings = options.settings_from(config, None, data=data).settings
    url = database_url(settings.usage.url, settings.server.data_dir)

    async def run() -> T:
        database = await Database.open(url, settings.usage)
        try:
            return await work(database)
        finally:
            await database.close()

    try:
        return asyncio.run(run())
    except ServeError as error:
        raise CallFailed(error.message) from error
