"""Batches: what is known of each, who runs it, and which of its lines are done.

Enters: wishes of clients, and what the process that runs a batch found out. Leaves: batches as they stand. Always true:
a line's answer and the counts change in one transaction, once per line, so the counts are right at any time; of several
processes one runs a batch, until its lease is over or it is certainly dead; a batch ends once, together with its files'
rows. Another key's batch looks exactly like one that never was. Next: `../batching/`.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Connection, and_, delete, func, insert, or_, select, true, update
from sqlalchemy.exc import SQLAlchemyError

from hitsend.core.clock import Clock
from hitsend.core.errors import InvalidRequest, NotFound, RateLimitExceeded, StorageFailed
from hitsend.serve.database.connection import Database
from hitsend.serve.database.schema import BATCH_LINES, BATCHES, FILES, HOLDS, LEDGER
from hitsend.serve.database.writer import Writer
from hitsend.serve.usage import owner as owners
from hitsend.serve.usage.files import DAY_S, OVER, StoredFile, Whose, reading
from hitsend.settings import BatchSettings

WINDOW_S = 86_400
"""The only completion window."""
PAGE_ROWS = 200

_UNFINISHED = select(BATCHES).where(BATCHES.c.status.not_in(OVER)).order_by(BATCHES.c.created_at).limit(PAGE_ROWS)


class Fault(msgspec.Struct, frozen=True):
    """Why a file can't be a batch. `line` counts from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Batch(msgspec.Struct, frozen=True):
    """One row; see `BATCHES`."""

    batch_id: str
    key_id: str | None
    caller: bytes
    endpoint: str
    input_file_id: str
    status: str
    created_at: float
    expires_at: float
    labels: str = "{}"
    faults: str = "[]"
    num_lines: int = 0
    num_completed: int = 0
    num_failed: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: float | None = None
    finalizing_at: float | None = None
    completed_at: float | None = None
    failed_at: float | None = None
    expired_at: float | None = None
    cancelling_at: float | None = None
    cancelled_at: float | None = None
    owner: str | None = None
    lease_until: float = 0.0


class Seen(msgspec.Struct, frozen=True):
    """What stands of one line just before it would begin. `used`: request ids with a row; `is_held`: one of them is
    still held; `is_billed`: one of the rows has tokens; `is_done`: its answer is kept; `paid_drafts`: engines of a
    cascade that its caller has paid for a rejected draft."""

    status: str
    used: frozenset[str]
    is_held: bool
    is_billed: bool
    is_done: bool
    paid_drafts: frozenset[str] = frozenset()


class Files(msgspec.Struct, frozen=True):
    """What a batch leaves. `num_written`: kept answers in the one and in the other; `num_failed`: lines in the error
    file, those that never began included."""

    output: StoredFile | None
    errors: StoredFile | None
    num_written: tuple[int, int]
    num_failed: int


class BatchStore:
    """The tables of batches and their lines."""

    def __init__(
        self, database: Database, writer: Writer, clock: Clock, settings: BatchSettings, lease_s: float
    ) -> None:
        self.settings = settings
        self.lease_s = lease_s
        self._database = database
        self._writer = writer
        self._clock = clock

    async def create(self, batch: Batch) -> Batch:
        """Durably. Raises RateLimitExceeded where the key has too many that aren't over, StorageFailed."""
        num_open = await self._writer.submit(partial(_create, batch=batch, most=self.settings.max_open))
        if num_open is not None:
            most = self.settings.max_open
            text = f"batches: this key has {num_open} that aren't over, limit {most} (batches.max_open)"
            raise RateLimitExceeded(text, retry_after_s=60.0)
        return batch

    async def get(self, batch_id: str, seen_by: Whose) -> Batch:
        """One. Raises NotFound, StorageFailed."""
        query = select(BATCHES).where(BATCHES.c.batch_id == batch_id, _visible(seen_by))
        async with reading(self._database) as connection:
            row = (await connection.execute(query)).mappings().first()
        if row is None:
            raise _not_found(batch_id)
        return Batch(**row)

    async def page(self, seen_by: Whose, *, limit: int, after: str | None = None) -> tuple[Batch, ...]:
        """Some, newest first. Raises InvalidRequest for an `after` that isn't there, StorageFailed."""
        query = select(BATCHES).where(_visible(seen_by))
        at, name = BATCHES.c.created_at, BATCHES.c.batch_id
        if after is not None:
            try:
                before = (await self.get(after, seen_by)).created_at
            except NotFound as error:
                raise InvalidRequest("after: no batch has that id", param="after") from error
            query = query.where(or_(at < before, and_(at == before, name < after)))
        async with reading(self._database) as connection:
            found = (await connection.execute(query.order_by(at.desc(), name.desc()).limit(limit))).mappings()
            return tuple(Batch(**row) for row in found)

    async def cancel(self, batch_id: str, seen_by: Whose) -> Batch:
        """Let no further line begin. Raises NotFound, InvalidRequest for one that is over, StorageFailed."""
        await self._writer.submit(partial(_cancel, batch_id=batch_id, seen_by=seen_by, now=self._clock.wall()))
        batch = await self.get(batch_id, seen_by)
        if batch.status not in ("cancelling", "cancelled"):
            raise InvalidRequest(f"batch_id: {batch_id} is {batch.status}: too late to cancel it", param="batch_id")
        return batch

    async def claim(self, owner: str, but: Sequence[str] = ()) -> Batch | None:
        """The oldest that nobody runs, if there is one; it is this owner's now. Raises StorageFailed."""
        query = _UNFINISHED.where(BATCHES.c.batch_id.not_in(but)) if but else _UNFINISHED
        try:
            rows = await self._database.read(lambda connection: connection.execute(query).mappings().all())
        except SQLAlchemyError as error:
            raise StorageFailed("batches can't be read now", retry_after_s=1.0) from error
        now = self._clock.wall()
        for row in rows:
            if row["owner"] is None or owners.is_dead(row["owner"]) or row["lease_until"] <= now:
                until = now + self.lease_s
                claim = partial(_claim, batch_id=row["batch_id"], before=row["owner"], owner=owner, until=until)
                if await self._writer.submit(claim):
                    return await self.get(row["batch_id"], Whose(None, sees_all=True))
        return None

    async def renew(self, owner: str) -> frozenset[str]:
        """The batches that are this owner's, for another lease. Raises StorageFailed."""
        return await self._writer.submit(partial(_renew, owner=owner, until=self._clock.wall() + self.lease_s))

    async def release(self, owner: str, batch_id: str) -> None:
        """Somebody else may run it. Raises StorageFailed."""
        await self._writer.submit(partial(_release, owner=owner, batch_id=batch_id))

    async def begin(self, batch_id: str, num_lines: int) -> None:
        """Its file is good. Raises StorageFailed."""
        values = {"status": "in_progress", "num_lines": num_lines, "in_progress_at": self._clock.wall()}
        await self._writer.submit(partial(_move, batch_id=batch_id, of=("validating",), values=values))

    async def refuse(self, batch_id: str, faults: Sequence[Fault], num_lines: int) -> None:
        """Its file is not. Raises StorageFailed."""
        said = msgspec.json.encode(faults).decode()
        values = {"status": "failed", "faults": said, "num_lines": num_lines, "failed_at": self._clock.wall()}
        await self._writer.submit(partial(_move, batch_id=batch_id, of=("validating", "in_progress"), values=values))

    async def look(self, batch_id: str, line: int, request_ids: Sequence[str], drafts: Sequence[str] = ()) -> Seen:
        """How it stands with a line, in one view of everything; `drafts`: engines whose drafts it may have paid for.

        Raises StorageFailed."""
        done = select(BATCH_LINES.c.line_number).where(_is_line(batch_id, line))
        rows = select(LEDGER.c.request_id, LEDGER.c.prompt_tokens + LEDGER.c.completion_tokens)
        async with reading(self._database) as connection:
            status = (await connection.execute(select(BATCHES.c.status).where(BATCHES.c.batch_id == batch_id))).scalar()
            is_done = (await connection.execute(done)).scalar() is not None
            held = select(HOLDS.c.hold_id).where(HOLDS.c.request_id.in_(request_ids)).limit(1)
            is_held = (await connection.execute(held)).scalar() is not None
            found = (await connection.execute(rows.where(LEDGER.c.request_id.in_(request_ids)))).all()
            used = frozenset(name for name, _ in found)
            named = {f"{name}/draft/{engine}": engine for name in used for engine in drafts}
            paid = (await connection.execute(rows.where(LEDGER.c.request_id.in_(named)))).all() if named else ()
        billed = any(tokens for _, tokens in found)
        return Seen(status or "gone", used, is_held, billed, is_done, frozenset(named[name] for name, _ in paid))

    async def put(self, batch_id: str, line: int, body: bytes, *, is_failed: bool) -> None:
        """A line is done; once. Raises StorageFailed."""
        row = {"batch_id": batch_id, "line_number": line, "is_failed": is_failed, "body": body}
        await self._writer.submit(partial(_put, row=row))

    async def done(self, batch_id: str) -> frozenset[int]:
        """Numbers of the lines that are done. Raises StorageFailed."""
        query = select(BATCH_LINES.c.line_number).where(BATCH_LINES.c.batch_id == batch_id)
        async with reading(self._database) as connection:
            return frozenset((await connection.execute(query)).scalars())

    async def answers(self, batch_id: str, after: int, *, is_failed: bool) -> Sequence[tuple[int, bytes]]:
        """The next page of what its output or error file will hold. Raises StorageFailed."""
        lines = BATCH_LINES.c
        query = select(lines.line_number, lines.body).where(
            lines.batch_id == batch_id, lines.is_failed.is_(is_failed), lines.line_number > after
        )
        async with reading(self._database) as connection:
            rows = (await connection.execute(query.order_by(lines.line_number).limit(PAGE_ROWS))).all()
        return [(row[0], row[1]) for row in rows]

    async def finalize(self, batch_id: str) -> None:
        """No line will begin any more; its files are being written. Raises StorageFailed."""
        values = {"status": "finalizing", "finalizing_at": self._clock.wall()}
        await self._writer.submit(partial(_move, batch_id=batch_id, of=("in_progress",), values=values))

    async def end(self, batch_id: str, status: str, files: "Files") -> bool:
        """The last word: output and error file, and the status. False where another process ended it, or added a line
        that isn't in these files. Raises StorageFailed."""
        values: dict[str, Any] = {"status": status, f"{status}_at": self._clock.wall(), "num_failed": files.num_failed}
        both = (files.output, files.errors)
        values["output_file_id"], values["error_file_id"] = (None if one is None else one.file_id for one in both)
        made = [msgspec.structs.asdict(one) for one in both if one is not None]
        written = and_(BATCHES.c.num_completed == files.num_written[0], BATCHES.c.num_failed == files.num_written[1])
        return await self._writer.submit(partial(_end, batch_id=batch_id, values=values, made=made, written=written))

    async def prune(self) -> None:
        """Delete batches that are over for longer than the retention. Raises StorageFailed."""
        oldest = self._clock.wall() - self.settings.retention_days * DAY_S
        while await self._writer.submit(partial(_prune, oldest=oldest)):
            pass


def _not_found(batch_id: str) -> NotFound:
    return NotFound(f"no batch {batch_id[:64]!r}: unknown or too old", param="batch_id")


def _visible(seen_by: Whose) -> ColumnElement[bool]:
    if seen_by.sees_all:
        return true()
    return BATCHES.c.key_id.is_(None) if seen_by.key_id is None else BATCHES.c.key_id == seen_by.key_id


def _is_line(batch_id: str, line: int) -> ColumnElement[bool]:
    return and_(BATCH_LINES.c.batch_id == batch_id, BATCH_LINES.c.line_number == line)


def _create(connection: Connection, batch: Batch, most: int) -> int | None:
    taken = select(BATCHES.c.batch_id).where(BATCHES.c.batch_id == batch.batch_id)
    if connection.execute(taken).scalar() is not None:
        return None
    counted = select(func.count()).where(_visible(Whose(batch.key_id)), BATCHES.c.status.not_in(OVER))
    num_open = int(connection.execute(counted.select_from(BATCHES)).scalar_one())
    if num_open >= most:
        return num_open
    connection.execute(insert(BATCHES), msgspec.structs.asdict(batch))
    return None


def _cancel(connection: Connection, batch_id: str, seen_by: Whose, now: float) -> None:
    this = and_(BATCHES.c.batch_id == batch_id, _visible(seen_by), BATCHES.c.status.in_(("validating", "in_progress")))
    connection.execute(update(BATCHES).where(this).values(status="cancelling", cancelling_at=now))


def _claim(connection: Connection, batch_id: str, before: str | None, owner: str, until: float) -> bool:
    """Only where it is still the one's whose it was: of two that try, one succeeds."""
    was = BATCHES.c.owner.is_(None) if before is None else or_(BATCHES.c.owner == before, BATCHES.c.owner == owner)
    this = and_(BATCHES.c.batch_id == batch_id, was, BATCHES.c.status.not_in(OVER))
    claimed = connection.execute(update(BATCHES).where(this).values(owner=owner, lease_until=until))
    return claimed.rowcount > 0


def _renew(connection: Connection, owner: str, until: float) -> frozenset[str]:
    own = and_(BATCHES.c.owner == owner, BATCHES.c.status.not_in(OVER))
    connection.execute(update(BATCHES).where(own).values(lease_until=until))
    return frozenset(connection.execute(select(BATCHES.c.batch_id).where(own)).scalars())


def _release(connection: Connection, owner: str, batch_id: str) -> None:
    own = and_(BATCHES.c.batch_id == batch_id, BATCHES.c.owner == owner)
    connection.execute(update(BATCHES).where(own).values(owner=None, lease_until=0.0))


def _move(connection: Connection, batch_id: str, of: Sequence[str], values: dict[str, Any]) -> None:
    this = and_(BATCHES.c.batch_id == batch_id, BATCHES.c.status.in_(of))
    connection.execute(update(BATCHES).where(this).values(**values))


def _put(connection: Connection, row: dict[str, Any]) -> None:
    """The answer and the count together; what is there already stays, and what is over takes nothing more."""
    is_open = select(BATCHES.c.batch_id).where(BATCHES.c.batch_id == row["batch_id"], BATCHES.c.status.not_in(OVER))
    if connection.execute(is_open.with_for_update()).scalar() is None:
        return
    there = select(BATCH_LINES.c.line_number).where(_is_line(row["batch_id"], row["line_number"]))
    if connection.execute(there).scalar() is not None:
        return
    connection.execute(insert(BATCH_LINES), row)
    count = BATCHES.c.num_failed if row["is_failed"] else BATCHES.c.num_completed
    counting = update(BATCHES).where(BATCHES.c.batch_id == row["batch_id"]).values({count: count + 1})
    connection.execute(counting)


def _end(
    connection: Connection,
    batch_id: str,
    values: dict[str, Any],
    made: Sequence[dict[str, Any]],
    written: ColumnElement[bool],
) -> bool:
    """Run twice, it finds its own end."""
    this = and_(BATCHES.c.batch_id == batch_id, BATCHES.c.status.not_in(OVER), written)
    ended = connection.execute(update(BATCHES).where(this).values(**values, owner=None))
    if not ended.rowcount:
        row = connection.execute(select(BATCHES).where(BATCHES.c.batch_id == batch_id)).mappings().first()
        names = ("status", "output_file_id", "error_file_id")
        return row is not None and all(row[name] == values[name] for name in names)
    if made:
        connection.execute(insert(FILES), made)
    connection.execute(delete(BATCH_LINES).where(BATCH_LINES.c.batch_id == batch_id))
    return True


def _prune(connection: Connection, oldest: float) -> int:
    old = select(BATCHES.c.batch_id).where(BATCHES.c.status.in_(OVER), BATCHES.c.created_at < oldest).limit(PAGE_ROWS)
    gone = list(connection.execute(old).scalars())
    if gone:
        connection.execute(delete(BATCHES).where(BATCHES.c.batch_id.in_(gone)))
        connection.execute(delete(BATCH_LINES).where(BATCH_LINES.c.batch_id.in_(gone)))
    return len(gone)
