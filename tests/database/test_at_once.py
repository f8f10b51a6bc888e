import asyncio
import contextlib
import sqlite3
import threading

import pytest
from sqlalchemy import text

from hitsend.core.errors import InvalidRequest
from hitsend.serve.database.connection import FILE_NAME, Database, database_url
from hitsend.serve.database.sqlite import MOVE_EVERY_COMMITS
from hitsend.serve.database.writer import PATIENCE, Writer
from tests.usage.storage import storage, wanted

INSERT = "INSERT INTO seen VALUES (?)"


@contextlib.asynccontextmanager
async def opened(tmp_path):
    database = await Database.open(database_url(None, tmp_path))
    writer = Writer(database)
    writer.start()
    await database.write(lambda c: c.execute(text("CREATE TABLE seen (n INTEGER PRIMARY KEY)")))
    await quiet(database)
    try:
        yield writer, database
    finally:
        await writer.stop()
        await database.close()


async def quiet(database):
    """The log was moved, and begun anew."""
    await database._thread._move
    await database.write(lambda c: c.execute(text("DELETE FROM alembic_version WHERE FALSE")))


def numbers(tmp_path):
    """As another process sees them."""
    with contextlib.closing(sqlite3.connect(tmp_path / FILE_NAME)) as other:
        return [n for (n,) in other.execute("SELECT n FROM seen ORDER BY n")]


def is_unlocked(tmp_path):
    with contextlib.closing(sqlite3.connect(tmp_path / FILE_NAME, timeout=0, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        other.execute("ROLLBACK")
    return True


async def test_it_is_committed_when_it_returns(tmp_path):
    async with opened(tmp_path) as (writer, database):
        commits = writer.num_commits
        assert writer.write_at_once(INSERT, (1,)) is True
        assert numbers(tmp_path) == [1]
        unless = "INSERT INTO seen SELECT ? WHERE NOT EXISTS (SELECT 1 FROM seen)"
        assert writer.write_at_once(unless, (2,)) is False
        assert numbers(tmp_path) == [1]
        assert writer.num_commits == commits + 2
        await database.sync()
        assert writer.write_at_once(INSERT, (2,)) is True


async def test_it_waits_for_no_lock(tmp_path):
    async with opened(tmp_path) as (writer, _):
        with contextlib.closing(sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            assert writer.write_at_once(INSERT, (1,)) is None
            other.execute("ROLLBACK")
        assert writer.write_at_once(INSERT, (1,)) is True
        assert numbers(tmp_path) == [1]


@pytest.mark.parametrize("values", [(1, 2), (2**64,), ("\ud800",), (object(),), (None, None)])
async def test_a_statement_that_fails_leaves_nothing_behind(tmp_path, values):
    async with opened(tmp_path) as (writer, _):
        assert writer.write_at_once(INSERT, values) is None
        assert is_unlocked(tmp_path)
        assert writer.write_at_once(INSERT, (7,)) is True
        assert numbers(tmp_path) == [7]


async def test_a_full_disk_leaves_nothing_behind(tmp_path):
    async with opened(tmp_path) as (writer, database):
        await database.write(lambda c: c.execute(text("CREATE TABLE large (t TEXT)")))
        assert writer.write_at_once(INSERT, (1,)) is True
        # SQLite's own limit on the file's size fails as a full disk does
        database._thread._at_once._opened().execute("PRAGMA max_page_count=1")
        assert writer.write_at_once("INSERT INTO large VALUES (?)", ("x" * 100_000,)) is None
        assert is_unlocked(tmp_path)
        database._thread._at_once._opened().execute("PRAGMA max_page_count=100000")
        assert writer.write_at_once("INSERT INTO large VALUES (?)", ("x" * 100_000,)) is True


async def test_who_writes_already_goes_first(tmp_path):
    may_end = threading.Event()

    def slow(connection):
        connection.execute(text("INSERT INTO seen VALUES (1)"))
        assert may_end.wait(60)

    async with opened(tmp_path) as (writer, _):
        writing = writer.submit(slow)
        assert writer.write_at_once(INSERT, (2,)) is None, "one waits in the queue"
        await asyncio.sleep(0.05)
        assert writer.write_at_once(INSERT, (2,)) is None, "one is being written"
        may_end.set()
        await writing
        assert writer.write_at_once(INSERT, (2,)) is True
        assert numbers(tmp_path) == [1, 2]


async def test_several_clients_share_transactions(tmp_path):
    may_end = threading.Event()

    async with opened(tmp_path) as (writer, _):
        first = writer.submit(lambda _: may_end.wait(60))
        await asyncio.sleep(0.05)
        more = [writer.submit(lambda c: c.execute(text("DELETE FROM seen"))) for _ in range(2)]
        may_end.set()
        await asyncio.gather(first, *more)
        assert writer.write_at_once(INSERT, (1,)) is None, "they came while another one was at it"
        for _ in range(PATIENCE + 1):
            await writer.submit(lambda c: c.execute(text("DELETE FROM seen")))
        assert writer.write_at_once(INSERT, (1,)) is True, "one after the other: that is one client"


async def test_a_log_that_was_moved_is_begun_anew_by_the_thread(tmp_path):
    """SQLite waits for the disk then, whatever it was told."""
    async with opened(tmp_path) as (writer, database):
        thread = database._thread
        for number in range(MOVE_EVERY_COMMITS + 1):
            assert writer.write_at_once(INSERT, (number,)) in (True, None)
        await writer.submit(lambda c: c.execute(text("INSERT INTO seen VALUES (1000000)")))
        assert thread._move is not None
        await thread._move
        assert writer.write_at_once(INSERT, (2_000_000,)) is None
        await writer.submit(lambda c: c.execute(text("INSERT INTO seen VALUES (3000000)")))
        assert writer.write_at_once(INSERT, (4_000_000,)) is True


async def test_it_never_moves_the_log_itself(tmp_path):
    async with opened(tmp_path) as (writer, database):
        assert writer.write_at_once(INSERT, (1,)) is True
        told = database._thread._at_once._opened().execute("PRAGMA wal_autocheckpoint").fetchone()
        assert told == (0,)


async def test_nothing_is_written_once_the_writer_has_stopped(tmp_path):
    async with opened(tmp_path) as (writer, _):
        await writer.stop()
        assert writer.write_at_once(INSERT, (1,)) is None


async def test_a_lone_hold_is_taken_at_once_and_once(tmp_path):
    async with storage(database_url(None, tmp_path)) as at:
        await quiet(at.database)
        operations = []
        at.writer.submit_bulk = lambda *rest, **_: operations.append(rest)
        hold = await at.ledger.reserve(wanted("r1"))
        assert operations == []
        del at.writer.submit_bulk
        assert [one["hold_id"] for one in await at.holds()] == [hold.hold_id]
        with pytest.raises(InvalidRequest, match="used before"):
            await at.ledger.reserve(wanted("r1"))
        assert [one["hold_id"] for one in await at.holds()] == [hold.hold_id]


async def test_a_hold_whose_commit_nobody_heard_of_is_taken_once(tmp_path):
    async with storage(database_url(None, tmp_path)) as at:
        await quiet(at.database)
        write = at.database.write_at_once

        def unheard(statement, values):
            assert write(statement, values) is True

        at.database.write_at_once = unheard
        hold = await at.ledger.reserve(wanted("r1"))
        assert [one["hold_id"] for one in await at.holds()] == [hold.hold_id]
