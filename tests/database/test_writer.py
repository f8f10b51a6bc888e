import asyncio
import contextlib
import sqlite3
import threading

import pytest
from sqlalchemy import event, text
from sqlalchemy.exc import DBAPIError

from hitsend.core.errors import StorageFailed
from hitsend.serve.database.connection import FILE_NAME, Database, database_url
from hitsend.serve.database.refused import SAY_EVERY_S, Refusal, reason_of
from hitsend.serve.database.watch import ASK_S, DatabaseWatch
from hitsend.serve.database.writer import Writer
from hitsend.serve.usage.idempotency import Asked, Claim, IdempotencyStore
from hitsend.settings import UsageSettings
from tests.limited import no_file_may_grow
from tests.usage.storage import HandClock


@contextlib.asynccontextmanager
async def writing(url):
    database = await Database.open(url)
    await database.write(lambda c: c.execute(text("CREATE TABLE seen (n INTEGER PRIMARY KEY)")))
    writer = Writer(database)
    writer.start()
    try:
        yield writer, database
    finally:
        await writer.stop()
        await database.write(lambda c: c.execute(text("DROP TABLE seen")))
        await database.close()


def insert(number):
    def operation(connection):
        connection.execute(text("INSERT INTO seen VALUES (:n)"), {"n": number})
        return number

    return operation


async def seen(database):
    async with database.reading() as connection:
        return list((await connection.execute(text("SELECT n FROM seen ORDER BY n"))).scalars())


async def test_many_operations_share_a_commit(url):
    async with writing(url) as (writer, database):
        assert await asyncio.gather(*(writer.submit(insert(number)) for number in range(100))) == list(range(100))
        assert await seen(database) == list(range(100))
        assert writer.num_commits <= 2


async def test_a_bad_operation_ends_nobody_elses(url):
    def broken(connection):
        connection.execute(text("INSERT INTO seen VALUES (1000)"))
        raise TypeError("a bug")

    async with writing(url) as (writer, database):
        operations = [insert(0), insert(1), broken, insert(1), insert(2)]
        ends = await asyncio.gather(*(writer.submit(operation) for operation in operations), return_exceptions=True)
        assert [end if isinstance(end, int) else type(end) for end in ends] == [0, 1, StorageFailed, StorageFailed, 2]
        assert isinstance(ends[2].__cause__, TypeError)
        assert await writer.submit(insert(3)) == 3
        assert await seen(database) == [0, 1, 2, 3]


async def test_an_operation_nobody_waits_for_runs(url):
    async with writing(url) as (writer, database):
        writer.submit(insert(1)).cancel()
        writer.submit(insert(2))
        await writer.stop()
        assert await seen(database) == [1, 2]


async def test_after_the_end_nothing_is_taken(url):
    async with writing(url) as (writer, _):
        await writer.stop()
        with pytest.raises(StorageFailed):
            await writer.submit(insert(1))


async def test_a_group_waits_for_the_disk_unless_all_of_it_may_lag(tmp_path):
    database = await Database.open(f"sqlite+aiosqlite:///{tmp_path}/w.sqlite3")
    writer = Writer(database)
    writer.start()
    modes = []

    def look(connection, arguments):
        modes.append(connection.exec_driver_sql("PRAGMA synchronous").scalar())
        return list(arguments)

    try:
        for may_lag in (False, True, True, False, True):
            assert await writer.submit_bulk(look, 1, may_lag=may_lag) == 1
        assert modes == [2, 1, 1, 2, 1]  # 2: FULL, 1: NORMAL
        modes.clear()
        both = [writer.submit_bulk(look, number, may_lag=number == 1) for number in (1, 2)]
        assert [await each for each in both] == [1, 2]
        assert modes == [2]
    finally:
        await writer.stop()
        await database.close()


async def test_after_a_failure_the_next_write_waits_for_the_disk_again(tmp_path):
    database = await Database.open(f"sqlite+aiosqlite:///{tmp_path}/w.sqlite3")

    def broken(connection):
        raise ValueError

    try:
        with pytest.raises(ValueError):
            await database.write(broken, may_lag=True)
        mode = await database.write(lambda c: c.exec_driver_sql("PRAGMA synchronous").scalar())
        assert mode == 2
    finally:
        await database.close()


async def test_what_lagged_can_be_taken_to_the_disk_by_all_who_wait_together(tmp_path):
    database = await Database.open(f"sqlite+aiosqlite:///{tmp_path}/w.sqlite3")
    try:
        await database.write(lambda c: c.exec_driver_sql("CREATE TABLE t (x)"), may_lag=True)
        await asyncio.gather(*(database.sync() for _ in range(20)))
        log = tmp_path / "w.sqlite3-wal"
        away = log.rename(tmp_path / "away")
        await database.sync()  # a file system without a log has nothing to sync
        log.mkdir()
        with pytest.raises(IsADirectoryError):
            await database.sync()
        log.rmdir()
        away.rename(log)
    finally:
        await database.close()


async def test_a_closed_database_takes_no_write(tmp_path):
    database = await Database.open(f"sqlite+aiosqlite:///{tmp_path}/w.sqlite3")
    await database.close()
    await database.close()
    with pytest.raises(RuntimeError, match="closed"):
        await database.write(lambda c: c.exec_driver_sql("SELECT 1").scalar())


@pytest.mark.parametrize("error", [asyncio.CancelledError, StopIteration])
async def test_an_operation_that_raises_what_futures_take_amiss_does_not_end_the_writer(url, error):
    def raises(_connection):
        raise error

    async with writing(url) as (writer, database):
        with pytest.raises(StorageFailed):
            await writer.submit(raises)
        await writer.submit(insert(1))
        assert await seen(database) == [1]


async def test_the_write_lock_is_given_back_though_the_event_loop_stands_still(tmp_path):
    """An operation of several statements has begun, and the loop waits for another connection to have its turn."""
    database = await Database.open(database_url(None, tmp_path))
    writer = Writer(database)
    writer.start()
    begun = threading.Event()

    def look(_connection, _cursor, statement, *_):
        if statement.startswith("SELECT idempotency"):
            begun.set()

    for engine in database.sync_engines:
        event.listen(engine, "after_cursor_execute", look)
    try:
        store = IdempotencyStore(writer, HandClock(), UsageSettings(), "me")
        claiming = asyncio.create_task(store.claim(Asked("scope", "key", "hash", "r1")))
        async with asyncio.timeout(60):
            while not begun.is_set():
                await asyncio.sleep(0)
        with contextlib.closing(sqlite3.connect(tmp_path / FILE_NAME, timeout=10, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            assert other.execute("SELECT request_id FROM idempotency").fetchall() == [("r1",)]
            other.execute("ROLLBACK")
        assert isinstance(await claiming, Claim)
    finally:
        await writer.stop()
        await database.close()


async def test_a_disk_that_takes_nothing_is_said_once_and_found_again(tmp_path, caplog):
    async with writing(database_url(None, tmp_path)) as (writer, database):
        watch = DatabaseWatch(database)
        watch.start()
        with no_file_may_grow(4096):
            for number in range(3):
                with pytest.raises(StorageFailed):
                    await writer.submit(insert(number))
            assert database.refusal == "disk I/O error"
            await asyncio.sleep(1.2 * ASK_S)  # the watch asks in vain
            assert database.refusal is not None
        async with asyncio.timeout(30):
            while database.refusal is not None:
                await asyncio.sleep(0.05)
        assert await writer.submit(insert(7)) == 7
        assert await seen(database) == [7]
        await watch.stop()
    lines = [record for record in caplog.records if record.name.startswith("hitsend.serve.database")]
    assert [(record.levelname, record.getMessage()) for record in lines] == [
        ("ERROR", "the database takes no writes: disk I/O error; requests are refused until it does"),
        ("WARNING", "the database takes writes again"),
    ]
    assert all(record.exc_info is None for record in lines)


async def test_a_write_that_is_itself_at_fault_says_nothing_of_the_disk(tmp_path, caplog):
    async with writing(database_url(None, tmp_path)) as (writer, database):
        with pytest.raises(StorageFailed):
            await writer.submit(lambda connection: connection.execute(text("INSERT INTO nowhere VALUES (1)")))
        assert database.refusal is None
    assert [record.getMessage() for record in caplog.records if record.exc_info] == [
        "a write to the database failed twice"
    ]


def test_what_postgresql_says_of_its_disk_is_a_refusal():
    class Said(Exception):
        def __init__(self, sqlstate):
            super().__init__("could not extend file")
            self.sqlstate = sqlstate

    found = {
        state: reason_of(DBAPIError("", None, Said(state))) for state in ("53100", "58030", "25006", "23505", "57014")
    }
    assert found == dict.fromkeys(("53100", "58030", "25006"), "could not extend file") | {"23505": None, "57014": None}


def test_a_disk_at_its_last_page_is_not_said_with_each_write(caplog):
    refusal = Refusal()
    for now in range(50):
        refusal.met("full", float(now))
        refusal.ended()
    refusal.met("full", SAY_EVERY_S + 1)
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING", "ERROR"]
    assert refusal.reason == "full"
