"""Responses that clients asked to be stored, until they are deleted, too old or too many.

Enters: a response's id and JSON, and the key that made it. Leaves: the same JSON, to that key alone. Always true: what
is past its retention is never given out, also before it is deleted; a key has a bounded number of them, the oldest make
room; another key's response looks exactly like one that never was. Next: `metrics.py`.
"""

import asyncio
import contextlib
import logging
import zlib
from functools import partial
from typing import Any

from sqlalchemy import ColumnElement, Connection, delete, insert, select
from sqlalchemy.exc import SQLAlchemyError

from hitsend.core.clock import Clock
from hitsend.core.errors import StorageFailed
from hitsend.serve.database.connection import Database
from hitsend.serve.database.schema import RESPONSES
from hitsend.serve.database.writer import Writer
from hitsend.settings import ResponsesSettings

logger = logging.getLogger(__name__)

PRUNE_S = 60.0
PRUNE_ROWS = 1000
"""Rows deleted per transaction: a clean-up never holds up a settlement for long."""


class ResponseStore:
    """The table of stored responses."""

    def __init__(self, database: Database, writer: Writer, clock: Clock, settings: ResponsesSettings) -> None:
        self._database = database
        self._writer = writer
        self._clock = clock
        self._settings = settings
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to delete what is too old, in the background. The writer must run."""
        self._task = asyncio.create_task(self._keep_pruning(), name="stored responses")

    async def stop(self) -> None:
        """End the background task. Safe to call twice."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            self._task = None

    async def get(self, response_id: str, *, key_id: str | None) -> bytes | None:
        """The JSON that was stored. Raises StorageFailed."""
        if "\0" in response_id:  # PostgreSQL takes it for a fault of its caller's, not for an id that isn't there
            return None
        query = select(RESPONSES.c.body).where(
            RESPONSES.c.response_id == response_id, _is_of(key_id), RESPONSES.c.created_at >= self._oldest()
        )
        try:
            async with self._database.reading() as connection:
                packed = (await connection.execute(query)).scalar()
        except SQLAlchemyError as error:
            raise StorageFailed("stored responses can't be read now", retry_after_s=1.0) from error
        return None if packed is None else await asyncio.to_thread(zlib.decompress, packed)

    async def put(self, response_id: str, body: bytes, *, key_id: str | None) -> None:
        """Store it; an id that is taken stays as it is. Raises StorageFailed."""
        packed = await asyncio.to_thread(zlib.compress, body, 1)
        row = {"response_id": response_id, "key_id": key_id, "created_at": self._clock.wall(), "body": packed}
        await self._writer.submit(partial(_put, row=row, most=self._settings.max_stored))

    async def delete(self, response_id: str, *, key_id: str | None) -> bool:
        """Whether it was there. Raises StorageFailed."""
        return await self._writer.submit(partial(_delete, response_id=response_id, key_id=key_id))

    async def prune(self) -> int:
        """Delete what is too old, in small steps; returns how many. Raises StorageFailed."""
        total = 0
        while deleted := await self._writer.submit(partial(_prune, oldest=self._oldest())):
            total += deleted
        return total

    def _oldest(self) -> float:
        return self._clock.wall() - self._settings.retention_days * 86_400

    async def _keep_pruning(self) -> None:
        while True:
            with contextlib.suppress(StorageFailed):  # the writer has logged it, and the next round tries again
                await self.prune()
            await asyncio.sleep(PRUNE_S)


def _is_of(key_id: str | None) -> ColumnElement[bool]:
    return RESPONSES.c.key_id.is_(None) if key_id is None else RESPONSES.c.key_id == key_id


def _put(connection: Connection, row: dict[str, Any], most: int) -> None:
    taken = select(RESPONSES.c.response_id).where(RESPONSES.c.response_id == row["response_id"])
    if connection.execute(taken).scalar() is not None:
        return
    connection.execute(insert(RESPONSES), row)
    newest_first = (RESPONSES.c.created_at.desc(), RESPONSES.c.response_id)
    surplus = select(RESPONSES.c.response_id).where(_is_of(row["key_id"])).order_by(*newest_first)
    ids = list(connection.execute(surplus.limit(PRUNE_ROWS).offset(most)).scalars())
    _drop(connection, ids)


def _delete(connection: Connection, response_id: str, key_id: str | None) -> bool:
    this = delete(RESPONSES).where(RESPONSES.c.response_id == response_id, _is_of(key_id))
    return bool(connection.execute(this).rowcount)


def _prune(connection: Connection, oldest: float) -> int:
    expired = select(RESPONSES.c.response_id).where(RESPONSES.c.created_at < oldest).limit(PRUNE_ROWS)
    return _drop(connection, list(connection.execute(expired).scalars()))


def _drop(connection: Connection, ids: list[str]) -> int:
    if ids:
        connection.execute(delete(RESPONSES).where(RESPONSES.c.response_id.in_(ids)))
    return len(ids)
