"""Asking the database, once a second, whether it is there, and whether it takes writes again where it did not.

Enters: a database. Leaves: nothing; whoever wants to know reads `Database.fault`, which every transaction keeps true.
Always true: a server on which nothing happens learns within seconds that its database went away, and that it is back;
a file of this machine is only asked after it refused a write.
Next: `writer.py`.
"""

import asyncio
import contextlib
import logging

from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

from hitsend.serve.database.connection import Database

logger = logging.getLogger(__name__)

ASK_S = 1.0


class DatabaseWatch:
    """The task that asks."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to ask."""
        self._task = asyncio.create_task(self._ask_forever(), name="database watch")

    async def stop(self) -> None:
        """End it. Safe to call twice."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            self._task = None

    async def _ask_forever(self) -> None:
        before: str | None = None
        while True:
            if self._database.can_be_away:
                with contextlib.suppress(SQLAlchemyError):
                    async with self._database.reading() as connection:
                        await connection.execute(text("SELECT 1"))
            now = self._database.fault
            if now is not None and before is None:
                logger.error("%s: requests are refused until it is back", now)
            elif now is None and before is not None:
                logger.warning("the database is back")
            before = now
            if self._database.refusal is not None:
                with contextlib.suppress(SQLAlchemyError):
                    await self._database.try_again()
            await asyncio.sleep(ASK_S)
