"""What only a database behind a socket can do: be away, hang, hold locks, and be opened from many places."""

import asyncio
import subprocess
import sys
from functools import partial

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import text

from hitsend.core.errors import ConfigError, StorageFailed
from hitsend.serve.database.connection import Database, DatabaseAway
from hitsend.serve.database.schema import METADATA
from hitsend.serve.database.watch import DatabaseWatch
from hitsend.serve.database.writer import Writer
from hitsend.settings import UsageSettings
from tests.postgres import PASSWORD, postgres

pytestmark = pytest.mark.slow

IMPATIENT = UsageSettings(connect_timeout_s=0.5, command_timeout_s=0.5, lock_timeout_s=0.3)
_OPEN = """
import asyncio, sys
from hitsend.serve.database.connection import Database
async def main():
    await (await Database.open(sys.argv[1])).close()
    print("alembic" in sys.modules)
asyncio.run(main())
"""


@pytest.fixture(scope="module")
def fragile(postgres_server):
    """A server of its own, for tests that stop it."""
    with postgres() as server:
        yield server


def one(connection):
    return connection.execute(text("SELECT 1")).scalar()


async def read(database, work=one):
    async with database.reading() as connection:
        return await connection.run_sync(work)


async def answers(database):
    """Until it does: a server that was let go again needs its time, and these settings have no patience."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await read(database)
            except DatabaseAway:
                await asyncio.sleep(0.05)


async def opened(url):
    """The same for the first time."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await Database.open(url, IMPATIENT)
            except (ConfigError, StorageFailed):
                await asyncio.sleep(0.05)


def cut_inside(connection):
    connection.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))
    one(connection)


def hang_inside(server, connection):
    one(connection)
    with server.frozen():
        one(connection)


async def opens(url):
    return await asyncio.create_subprocess_exec(sys.executable, "-c", _OPEN, url, stdout=subprocess.PIPE)


async def test_processes_that_fill_it_at_once_all_succeed_and_later_ones_skip_alembic(postgres_server):
    url = postgres_server.make()
    racing = [await opens(url) for _ in range(4)]
    async with asyncio.timeout(60):
        await asyncio.gather(*(process.communicate() for process in racing))
    assert [process.returncode for process in racing] == [0] * 4
    later = await opens(url)
    async with asyncio.timeout(60):
        assert (await later.communicate())[0] == b"False\n"


async def test_the_migrations_build_exactly_the_tables_of_the_schema(postgres_server):
    database = await Database.open(postgres_server.make())
    async with database.reading() as connection:
        found = await connection.run_sync(lambda sync: compare_metadata(MigrationContext.configure(sync), METADATA))
    await database.close()
    assert found == []


async def test_a_database_of_a_newer_version_is_left_alone(postgres_server):
    url = postgres_server.make("filled")
    postgres_server.sql("UPDATE alembic_version SET version_num = '9999'", url.rpartition("/")[2])
    with pytest.raises(ConfigError, match="another version of hitsend"):
        await Database.open(url)


async def test_a_commit_waits_for_the_disk_whatever_the_server_thinks(postgres_server):
    url = postgres_server.make("filled")
    name = url.rpartition("/")[2]
    postgres_server.sql(f"ALTER DATABASE {name} SET synchronous_commit = off")
    database = await Database.open(url)
    assert await database.write(lambda c: c.execute(text("SHOW synchronous_commit")).scalar()) == "on"
    await database.close()
    assert postgres_server.sql("SHOW synchronous_commit", name).strip() == "off"


async def test_a_reader_sees_one_moment_and_can_not_write(postgres_server):
    database = await Database.open(postgres_server.make("filled"))
    async with database.reading() as reading:
        assert (await reading.execute(text("SELECT count(*) FROM keys"))).scalar() == 0
        insert = "INSERT INTO keys (key_id, salt, digest, key_name, created_at) VALUES ('k', 's', 'd', 'n', 1)"
        await database.write(lambda c: c.execute(text(insert)))
        assert (await reading.execute(text("SELECT count(*) FROM keys"))).scalar() == 0
    with pytest.raises(Exception, match="read-only"):
        async with database.reading() as reading:
            await reading.execute(text("DELETE FROM keys"))
    await database.close()


async def test_a_connection_that_was_cut_is_replaced(postgres_server):
    database = await Database.open(postgres_server.make("filled"))
    for _ in range(3):
        async with database.reading() as connection:
            pid = (await connection.execute(text("SELECT pg_backend_pid()"))).scalar()
        postgres_server.sql(f"SELECT pg_terminate_backend({pid}, 5000)")
        assert await database.write(one) == 1
    with pytest.raises(DatabaseAway):
        await database.write(cut_inside)
    assert database.fault is not None
    assert await read(database) == 1
    assert database.fault is None
    await database.close()


async def test_a_server_that_hangs_is_waited_for_no_longer_than_set(fragile):
    """Requests, writes, a stop and the last good-bye all end by themselves; the limit here is only the test's own."""
    database = await opened(fragile.url())
    writer = Writer(database)
    writer.start()
    assert await answers(database) == 1
    async with asyncio.timeout(180):
        with fragile.frozen():
            with pytest.raises(DatabaseAway) as away:
                await read(database)
            assert away.value.is_silent
            assert database.fault is not None
            writes = [writer.submit(one) for _ in range(1000)]
            await writer.stop()
            assert all(isinstance(write.exception(), StorageFailed) for write in writes)
        assert await answers(database) == 1
        with fragile.frozen():
            await database.close()


async def test_a_server_that_hangs_inside_a_transaction_is_left(fragile):
    database = await opened(fragile.url())
    async with asyncio.timeout(180):
        for transact in (partial(read, database), database.write):
            with pytest.raises(DatabaseAway):
                await transact(partial(hang_inside, fragile))
            assert await answers(database) == 1
    await database.close()


async def test_a_lock_that_another_holds_costs_that_one_operation(postgres_server):
    database = await Database.open(postgres_server.make("filled"), IMPATIENT)
    writer = Writer(database)
    writer.start()

    def locked(connection):
        connection.execute(text("SELECT pg_advisory_xact_lock(1)"))

    async with database.reading() as connection:
        await connection.run_sync(locked)
        ends = await asyncio.gather(*map(writer.submit, (one, locked, one)), return_exceptions=True)
    assert [ends[0], type(ends[1]), ends[2]] == [1, StorageFailed, 1]
    assert await writer.submit(locked) is None
    await writer.stop()
    await database.close()


async def test_a_server_that_was_restarted_is_found_again_and_the_watch_knows(fragile):
    database = await Database.open(fragile.url(), IMPATIENT)
    watch = DatabaseWatch(database)
    watch.start()
    writer = Writer(database)
    writer.start()
    try:
        for end in (fragile.stop, fragile.immediate):
            end()
            with pytest.raises(StorageFailed):
                await writer.submit(one)
            assert database.fault is not None
            fragile.start()
            async with asyncio.timeout(60):
                while database.fault is not None:  # nobody asks but the watch
                    await asyncio.sleep(0.05)
            assert await writer.submit(one) == 1
    finally:
        await watch.stop()
        await writer.stop()
        await database.close()


async def test_what_can_not_be_opened_is_said_without_the_password(fragile):
    for url in (fragile.url("nowhere"), fragile.url().replace(f":{fragile.port}/", ":1/")):
        with pytest.raises(ConfigError, match=r"usage\.url: can't open") as said:
            await Database.open(url, IMPATIENT)
        assert PASSWORD not in str(said.value)
    with pytest.raises(ConfigError, match=r"usage\.url: can't open") as said:
        await Database.open(fragile.url().replace(PASSWORD, "wrong-one"), IMPATIENT)
    assert "wrong-one" not in str(said.value)


@pytest.mark.parametrize("url", ["postgresql://u:se-cret@h/d", "postgresql+psycopg://u:se-cret@h/d", "mysql://h/d"])
async def test_another_driver_is_refused(url):
    with pytest.raises(ConfigError, match=r"postgresql\+asyncpg://user:password@host/database") as said:
        await Database.open(url)
    assert PASSWORD not in str(said.value)


async def test_a_plain_install_says_what_is_missing():
    block = f"import sys; sys.modules['asyncpg'] = None{_OPEN}"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", block, "postgresql+asyncpg://u:se-cret@127.0.0.1:1/d"), stderr=subprocess.PIPE
    )
    async with asyncio.timeout(60):
        said = (await process.communicate())[1].decode()
    assert "needs asyncpg" in said.splitlines()[-1]
    assert PASSWORD not in said.splitlines()[-1]
