"""Flight records that were closed: the newest in memory, all of them on disk for a while.

Enters: a record, packed (`core/shown.py`) or as JSON, and its summary. Leaves: its JSON. Always true: `put` never
waits and never fails (a record that can't be stored is counted and dropped, a request never ends badly because of its
record); memory is bounded by the ring's length and bytes, disk by age and number; a request id belongs to the key that
used it first, so that nobody can overwrite another caller's record, nor their own once it was billed.
Next: `metrics.py`.
"""

import asyncio
import contextlib
import logging
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial

import msgspec
from sqlalchemy import Connection, Table, delete, func, select
from sqlalchemy.exc import SQLAlchemyError

from hitsend.core.clock import Clock
from hitsend.core.errors import StorageFailed
from hitsend.core.shown import as_json
from hitsend.serve.database.connection import Database
from hitsend.serve.database.schema import RECORDS
from hitsend.serve.database.sqlite import insert_many, select_in
from hitsend.serve.database.writer import Writer
from hitsend.serve.usage.record_search import EVERY, Percentiles, RecordFilter, percentiles_of, place_of
from hitsend.settings import RecordSettings

logger = logging.getLogger(__name__)

RING_BYTES = 64 * 1024 * 1024
MAX_PENDING = 2000
"""Records waiting for the disk; beyond it they are dropped from disk (and counted), not from the ring."""
PACKED_FROM_BYTES = 8192
FLUSH_S = 0.2
FLUSH_FROM = 16
"""Records that are stored before that time is over: many at once would hold up the commit of a lone client's row."""
PRUNE_S = 60.0
PRUNE_ROWS = 1000
"""Rows deleted per transaction: a clean-up never holds up a settlement for long."""


class RecordSummary(msgspec.Struct, frozen=True):
    """What lists and filters need of a record. `received_at` is seconds since the epoch."""

    request_id: str
    received_at: float
    state: str
    finish_reason: str | None
    error_code: str | None
    model: str | None
    key_id: str | None
    key_name: str
    wall_ms: float
    prompt_tokens: int
    completion_tokens: int
    cost_microusd: int
    ttft_ms: float | None = None

    @property
    def is_billed(self) -> bool:
        """Whether tokens stand in the ledger for it."""
        return self.prompt_tokens > 0 or self.completion_tokens > 0


_COLUMNS = tuple(RECORDS.c[name] for name in RecordSummary.__struct_fields__)
_STORED = (*RecordSummary.__struct_fields__, "body")
_STANDING = tuple(RECORDS.c[name] for name in ("request_id", "key_id", "prompt_tokens", "completion_tokens"))


class RecordStore:
    """The ring, and the way to the disk."""

    def __init__(self, database: Database, writer: Writer, clock: Clock, settings: RecordSettings) -> None:
        self._database = database
        self._writer = writer
        self._clock = clock
        self._settings = settings
        self._ring: OrderedDict[str, tuple[RecordSummary, bytes]] = OrderedDict()
        self._ring_bytes = 0
        self._pending: list[tuple[RecordSummary, bytes]] = []
        self._task: asyncio.Task[None] | None = None
        self._is_stopping = False
        self._hurry = asyncio.Event()
        self._pruned_at: float | None = None
        self.num_dropped = 0

    def start(self) -> None:
        """Begin to store in the background. The writer must run."""
        self._task = asyncio.create_task(self._keep_storing(), name="record store")

    async def stop(self) -> None:
        """Store what is pending, then end. Call before the writer stops. Safe to call twice."""
        if self._task is not None:
            self._is_stopping = True
            self._hurry.set()
            await self._task
            self._task = None
        await self.flush()

    def put(self, summary: RecordSummary, body: bytes) -> None:
        """Take a closed record, without waiting."""
        kept = self._ring.get(summary.request_id)
        if kept is not None and (kept[0].key_id != summary.key_id or kept[0].is_billed):
            self.num_dropped += 1
            return
        if kept is not None:
            self._ring_bytes -= len(kept[1])
            del self._ring[summary.request_id]
        self._ring[summary.request_id] = (summary, body)
        self._ring_bytes += len(body)
        while len(self._ring) > self._settings.ring or (self._ring_bytes > RING_BYTES and len(self._ring) > 1):
            _, (_, dropped) = self._ring.popitem(last=False)
            self._ring_bytes -= len(dropped)
        if len(self._pending) < MAX_PENDING:
            self._pending.append((summary, body))
            if len(self._pending) == FLUSH_FROM:
                self._hurry.set()
        else:
            self.num_dropped += 1

    async def get(self, request_id: str) -> bytes | None:
        """A record's JSON. Raises StorageFailed when the disk must be asked and can't be read."""
        kept = self._ring.get(request_id)
        if kept is not None:
            return as_json(kept[1])
        for summary, body in reversed(self._pending):
            if summary.request_id == request_id:
                return as_json(body)
        try:
            async with self._database.reading() as connection:
                query = select(RECORDS.c.body).where(RECORDS.c.request_id == request_id)
                packed = (await connection.execute(query)).scalar()
        except SQLAlchemyError as error:
            raise StorageFailed("stored records can't be read now", retry_after_s=1.0) from error
        return None if packed is None else await asyncio.to_thread(_unpack, packed)

    async def list(
        self, limit: int, *, key_id: str | None = None, wanted: RecordFilter = EVERY
    ) -> tuple[RecordSummary, ...]:
        """The newest summaries that are wanted, newest first; only that key's, if given. Raises StorageFailed."""
        kept_now = (kept for kept, _ in self._ring.values() if key_id is None or kept.key_id == key_id)
        newest = [kept for kept in kept_now if wanted.has(kept)]
        if len(newest) < limit:
            seen = {kept.request_id for kept in newest}
            newest += [kept for kept in await self._stored(limit, key_id, wanted) if kept.request_id not in seen]
        return tuple(sorted(newest, key=place_of, reverse=True)[:limit])

    async def percentiles(self, *, key_id: str | None = None, wanted: RecordFilter = EVERY) -> Percentiles:
        """Of what is on disk: requests that ended less than a moment ago aren't in it. Raises StorageFailed."""
        return await percentiles_of(self._database, key_id, wanted)

    async def flush(self) -> None:
        """Write pending records in one transaction."""
        pending, self._pending = self._pending, []
        if not pending:
            return
        if any(len(body) >= PACKED_FROM_BYTES for _, body in pending):
            pending = await asyncio.to_thread(_pack, pending)
        try:
            await self._writer.submit_bulk(_store, pending, may_lag=True, is_aside=True)
        except StorageFailed:
            self.num_dropped += len(pending)
            logger.warning("%d flight records could not be stored", len(pending))

    async def prune(self) -> int:
        """Delete records that are too old or too many, in small steps; returns how many. Raises StorageFailed."""
        oldest = self._clock.wall() - self._settings.retention_days * 86_400
        total = 0
        while deleted := await self._writer.submit(partial(_prune, oldest=oldest, most=self._settings.max_stored)):
            total += deleted
        return total

    async def _stored(self, limit: int, key_id: str | None, wanted: RecordFilter) -> tuple[RecordSummary, ...]:
        newest_first = (RECORDS.c.received_at.desc(), RECORDS.c.request_id.desc())
        query = select(*_COLUMNS).where(*wanted.conditions(key_id)).order_by(*newest_first)
        query = query.limit(limit + len(self._ring))
        try:
            async with self._database.reading() as connection:
                return tuple(RecordSummary(*row) for row in await connection.execute(query))
        except SQLAlchemyError as error:
            raise StorageFailed("stored records can't be read now", retry_after_s=1.0) from error

    async def _keep_storing(self) -> None:
        while not self._is_stopping:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FLUSH_S):
                    await self._hurry.wait()
            self._hurry.clear()
            await self.flush()
            now = self._clock.now()
            if self._pruned_at is None or now - self._pruned_at >= PRUNE_S:
                self._pruned_at = now
                try:
                    await self.prune()
                except StorageFailed:
                    logger.warning("old flight records could not be deleted: will try again")


def _pack(records: list[tuple[RecordSummary, bytes]]) -> list[tuple[RecordSummary, bytes]]:
    # level 1: a record of 60 KB shrinks about tenfold in a millisecond, higher levels gain little; short ones stay as
    # they are: packing them would cost more than all the rest of storing them
    return [(summary, body if len(body) < PACKED_FROM_BYTES else zlib.compress(body, 1)) for summary, body in records]


def _unpack(body: bytes) -> bytes:
    """Its JSON. zlib's first byte begins no JSON document and no packed facts."""
    return as_json(zlib.decompress(body) if body.startswith(b"\x78") else body)


def _store(connection: Connection, several: Sequence[list[tuple[RecordSummary, bytes]]]) -> list[None]:
    """A bulk: one list of records per flush."""
    newest = {summary.request_id: (summary, body) for records in several for summary, body in records}
    standing = select_in(connection, RECORDS.c.request_id, tuple(newest), _STANDING)
    kept = set()
    for request_id, key_id, prompt_tokens, completion_tokens in standing:
        if key_id == newest[request_id][0].key_id and not (prompt_tokens or completion_tokens):
            connection.execute(delete(RECORDS).where(RECORDS.c.request_id == request_id))
        else:
            kept.add(request_id)
    fresh = [
        (*msgspec.structs.astuple(summary), body) for summary, body in newest.values() if summary.request_id not in kept
    ]
    if fresh:
        insert_many(connection, RECORDS, _STORED, fresh)
    return [None] * len(several)


def _prune(connection: Connection, oldest: float, most: int) -> int:
    """One small step; 0 when nothing is left to delete."""
    count = connection.execute(select(func.count()).select_from(RECORDS)).scalar_one()
    expired = select(RECORDS.c.request_id).where(RECORDS.c.received_at < oldest).limit(PRUNE_ROWS)
    deleted = _delete(connection, RECORDS, list(connection.execute(expired).scalars()))
    surplus = min(count - deleted - most, PRUNE_ROWS - deleted)
    if surplus > 0:
        first = select(RECORDS.c.request_id).order_by(RECORDS.c.received_at).limit(surplus)
        deleted += _delete(connection, RECORDS, list(connection.execute(first).scalars()))
    return deleted


def _delete(connection: Connection, table: Table, request_ids: list[str]) -> int:
    if request_ids:
        connection.execute(delete(table).where(table.c.request_id.in_(request_ids)))
    return len(request_ids)
