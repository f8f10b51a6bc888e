"""Files that clients keep here: their bytes in a folder, what is known of them in a table.

Enters: bytes from uploads and from batches that ended. Leaves: the same bytes, to the key whose they are. Always true:
a file is on the disk before it is in the table, and out of the table before it leaves the disk, so a row always has its
bytes and what a crash left over is swept up later; a path is made from an id alone, never from what a client calls it;
another key's file looks exactly like one that never was. Next: `batches.py`.
"""

import asyncio
import contextlib
import logging
import os
import re
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import BinaryIO

import msgspec
from sqlalchemy import ColumnElement, Connection, and_, delete, func, insert, or_, select, true
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from hitsend.core.clock import Clock
from hitsend.core.errors import InsufficientQuota, InvalidRequest, NotFound, RateLimitExceeded, StorageFailed
from hitsend.core.ids import IDS
from hitsend.core.request import Principal
from hitsend.serve.database.connection import Database
from hitsend.serve.database.schema import BATCHES, FILES
from hitsend.serve.database.writer import Writer
from hitsend.settings import BatchSettings

logger = logging.getLogger(__name__)

PRUNE_S = 60.0
PRUNE_ROWS = 200
ORPHAN_S = 3600.0
"""A file that no row knows may still be on its way into the table for so long."""
MAX_FILES = 10_000
"""Of one key: files without a byte in them take room, too."""
MAX_UPLOADS = 8
"""Of one key at once, in one process: they are on the disk before they count as stored."""
OVER = ("completed", "failed", "expired", "cancelled")
"""How batches end."""
DAY_S = 86_400
_ID = re.compile(r"file-[0-9a-f]{24}")


class Whose(msgspec.Struct, frozen=True):
    """Which files and batches a caller may see: those of one key (None: the anonymous caller's), or all."""

    key_id: str | None
    sees_all: bool = False


class StoredFile(msgspec.Struct, frozen=True):
    """One row. Instants are seconds since the epoch."""

    file_id: str
    key_id: str | None
    purpose: str
    file_name: str
    num_bytes: int
    created_at: float
    expires_at: float


def whose(caller: Principal) -> Whose:
    """What this caller may see: admins, and the owner of the machine while no key exists, see everything."""
    return Whose(caller.key_id, caller.is_anonymous or caller.role == "admin")


class FileStore:
    """The folder and its table."""

    def __init__(self, database: Database, writer: Writer, clock: Clock, settings: BatchSettings, folder: Path) -> None:
        self.settings = settings
        self._database = database
        self._writer = writer
        self._clock = clock
        self._folder = folder
        self._receiving: Counter[str | None] = Counter()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Make the folder, and delete in the background what is too old. The writer must run."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._task = asyncio.create_task(self._keep_pruning(), name="files")

    async def stop(self) -> None:
        """End the background task. Safe to call twice."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            self._task = None

    def path(self, file_id: str) -> Path:
        """Where its bytes are. Raises NotFound for what is no id."""
        if not _ID.fullmatch(file_id):
            raise _not_found(file_id)
        return self._folder / file_id

    def create(self) -> tuple[str, BinaryIO]:
        """A new id, and its file, open for writing, with mode 0600. Raises OSError."""
        file_id = f"file-{IDS.take(12)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return file_id, os.fdopen(os.open(self._folder / file_id, flags, 0o600), "wb")

    def discard(self, file_id: str) -> None:
        """Forget the bytes of one that isn't in the table."""
        with contextlib.suppress(OSError):
            (self._folder / file_id).unlink()

    def new_row(self, file_id: str, key_id: str | None, purpose: str, file_name: str, num_bytes: int) -> StoredFile:
        """What the table will say of it."""
        now = self._clock.wall()
        until = now + self.settings.retention_days * DAY_S
        return StoredFile(file_id, key_id, purpose, file_name, num_bytes, now, until)

    @asynccontextmanager
    async def receiving(self, key_id: str | None) -> AsyncGenerator[None]:
        """Room for one more upload of that key while it comes. Raises InsufficientQuota, RateLimitExceeded,
        StorageFailed."""
        if self._receiving[key_id] >= MAX_UPLOADS:
            text = f"file: {MAX_UPLOADS} uploads of this key are under way, which is the limit"
            raise RateLimitExceeded(text, retry_after_s=5.0)
        self._receiving[key_id] += 1
        try:
            async with reading(self._database) as connection:
                stored = await connection.run_sync(_stored, key_id)
                num_files = await connection.run_sync(_num_files, key_id)
            if stored >= self.settings.stored_bytes:
                raise self.too_much(stored, 1)
            if num_files >= MAX_FILES:
                text = f"file: this key stores {num_files} files, limit {MAX_FILES}: delete files first"
                raise InsufficientQuota(text, param="file")
            yield
        finally:
            self._receiving[key_id] -= 1
            self._receiving += Counter()  # forgets those with none

    async def add(self, row: StoredFile) -> None:
        """Into the table, durably. Raises InsufficientQuota where the key has too much already, StorageFailed."""
        stored = await self._writer.submit(partial(_add, row=row, most=self.settings.stored_bytes))
        if stored is not None:
            raise self.too_much(stored, row.num_bytes)

    def too_much(self, stored: int, more: int) -> InsufficientQuota:
        """The refusal of bytes beyond what a key may store."""
        return InsufficientQuota(
            f"file: this key stores {stored} bytes, {more} more would be beyond the limit "
            f"{self.settings.stored_bytes} (batches.stored_bytes): delete files first",
            param="file",
        )

    async def get(self, file_id: str, seen_by: Whose) -> StoredFile:
        """One. Raises NotFound, StorageFailed."""
        if not _ID.fullmatch(file_id):
            raise _not_found(file_id)
        query = select(FILES).where(FILES.c.file_id == file_id, _visible(seen_by), self._is_fresh)
        async with reading(self._database) as connection:
            row = (await connection.execute(query)).mappings().first()
        if row is None:
            raise _not_found(file_id)
        return StoredFile(**row)

    async def page(
        self, seen_by: Whose, *, limit: int, after: str | None = None, purpose: str | None = None, newest: bool = True
    ) -> tuple[StoredFile, ...]:
        """Some, in the order of their making. Raises InvalidRequest for an `after` that isn't there, StorageFailed."""
        query = select(FILES).where(_visible(seen_by), self._is_fresh)
        if purpose is not None:
            query = query.where(FILES.c.purpose == purpose)
        columns = (FILES.c.created_at, FILES.c.file_id)
        if after is not None:
            query = query.where(_beyond(columns, await self._place(after, seen_by), newest=newest))
        order = [column.desc() if newest else column for column in columns]
        async with reading(self._database) as connection:
            found = (await connection.execute(query.order_by(*order).limit(limit))).mappings()
            return tuple(StoredFile(**row) for row in found)

    async def delete(self, file_id: str, seen_by: Whose) -> None:
        """Row, then bytes. Raises NotFound, InvalidRequest while a batch reads it, StorageFailed."""
        found = await self._writer.submit(partial(_delete, file_id=file_id, seen_by=seen_by))
        if found is None:
            raise _not_found(file_id)
        if found:
            raise InvalidRequest(f"file_id: {file_id} is read by {found}, which isn't over: cancel that first")
        self.discard(file_id)

    async def prune(self) -> None:
        """Delete what is past its retention, and bytes without a row. Raises StorageFailed."""
        while gone := await self._writer.submit(partial(_prune, now=self._clock.wall())):
            for file_id in gone:
                self.discard(file_id)
        old = await asyncio.to_thread(self._old_ids)
        for start in range(0, len(old), PRUNE_ROWS):
            some = old[start : start + PRUNE_ROWS]
            async with reading(self._database) as connection:
                query = select(FILES.c.file_id).where(FILES.c.file_id.in_(some))
                known = set((await connection.execute(query)).scalars())
            for file_id in set(some) - known:
                self.discard(file_id)

    @property
    def _is_fresh(self) -> ColumnElement[bool]:
        return FILES.c.expires_at > self._clock.wall()

    async def _place(self, after: str, seen_by: Whose) -> tuple[float, str]:
        try:
            return (await self.get(after, seen_by)).created_at, after
        except NotFound as error:
            raise InvalidRequest("after: no file has that id", param="after") from error

    def _old_ids(self) -> list[str]:
        """Names in the folder that are old enough to be judged, by the disk's own clock."""
        found, now = [], time.time()
        for entry in self._folder.iterdir():
            with contextlib.suppress(OSError):
                if _ID.fullmatch(entry.name) and now - entry.stat().st_mtime > ORPHAN_S:
                    found.append(entry.name)
        return found

    async def _keep_pruning(self) -> None:
        while True:
            try:
                await self.prune()
            except (StorageFailed, OSError):
                logger.warning("files can't be tended now: will try again")
            await asyncio.sleep(PRUNE_S)


@asynccontextmanager
async def reading(database: Database) -> AsyncGenerator[AsyncConnection]:
    """A transaction that reads. Raises StorageFailed."""
    try:
        async with database.reading() as connection:
            yield connection
    except SQLAlchemyError as error:
        raise StorageFailed("files and batches can't be read now", retry_after_s=1.0) from error


def _not_found(file_id: str) -> NotFound:
    return NotFound(f"no file {file_id[:64]!r}: unknown, deleted or too old", param="file_id")


def _visible(seen_by: Whose) -> ColumnElement[bool]:
    if seen_by.sees_all:
        return true()
    return FILES.c.key_id.is_(None) if seen_by.key_id is None else FILES.c.key_id == seen_by.key_id


def _beyond(
    columns: tuple[ColumnElement[float], ColumnElement[str]], place: tuple[float, str], *, newest: bool
) -> ColumnElement[bool]:
    at, name = columns
    if newest:
        return or_(at < place[0], and_(at == place[0], name < place[1]))
    return or_(at > place[0], and_(at == place[0], name > place[1]))


def _stored(connection: Connection, key_id: str | None) -> int:
    query = select(func.coalesce(func.sum(FILES.c.num_bytes), 0)).where(_visible(Whose(key_id)))
    return int(connection.execute(query).scalar_one())


def _num_files(connection: Connection, key_id: str | None) -> int:
    query = select(func.count()).select_from(FILES).where(_visible(Whose(key_id)))
    return int(connection.execute(query).scalar_one())


def _add(connection: Connection, row: StoredFile, most: int) -> int | None:
    """None when it is in the table; else what the key has already."""
    taken = select(FILES.c.file_id).where(FILES.c.file_id == row.file_id)
    if connection.execute(taken).scalar() is not None:
        return None
    stored = _stored(connection, row.key_id)
    if stored + row.num_bytes > most:
        return stored
    connection.execute(insert(FILES), msgspec.structs.asdict(row))
    return None


def _delete(connection: Connection, file_id: str, seen_by: Whose) -> str | None:
    """None where there is no such file, the batch that reads it, or "" when it is gone."""
    this = and_(FILES.c.file_id == file_id, _visible(seen_by))
    if connection.execute(select(FILES.c.file_id).where(this)).scalar() is None:
        return None
    reader = select(BATCHES.c.batch_id).where(BATCHES.c.input_file_id == file_id, BATCHES.c.status.not_in(OVER))
    if (batch_id := connection.execute(reader.limit(1)).scalar()) is not None:
        return str(batch_id)
    connection.execute(delete(FILES).where(this))
    return ""


def _prune(connection: Connection, now: float) -> list[str]:
    read = select(BATCHES.c.input_file_id).where(BATCHES.c.status.not_in(OVER))
    old = select(FILES.c.file_id).where(FILES.c.expires_at <= now, FILES.c.file_id.not_in(read)).limit(PRUNE_ROWS)
    gone = list(connection.execute(old).scalars())
    if gone:
        connection.execute(delete(FILES).where(FILES.c.file_id.in_(gone)))
    return gone
