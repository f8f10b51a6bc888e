import asyncio
import os
import stat
import subprocess
import sys
import threading
from contextlib import asynccontextmanager
from importlib.resources import files

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import func, select
from sqlalchemy.exc import OperationalError

from hitsend.core.errors import ConfigError
from hitsend.serve.database import migrate
from hitsend.serve.database.connection import FILE_NAME, SCHEMA_HEAD, Database, database_url
from hitsend.serve.database.schema import HOLDS, KEYS, METADATA


async def test_a_new_database_is_private_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        folder = tmp_path / "with space and %"
        database = await Database.open(database_url(None, folder))
        await database.write(lambda c: c.exec_driver_sql("DELETE FROM holds"))
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
        await database.close()
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert modes.keys() >= {FILE_NAME, f"{FILE_NAME}-wal"}
    assert set(modes.values()) == {0o600}


@asynccontextmanager
async def a_writer_in_its_transaction(database):
    """It has changed something, and commits only after the block."""
    is_writing, may_end = threading.Event(), threading.Event()

    def write(connection):
        connection.exec_driver_sql("DELETE FROM holds")
        is_writing.set()
        return may_end.wait(60)

    writing = asyncio.create_task(database.write(write))
    assert await asyncio.to_thread(is_writing.wait, 60)
    try:
        yield
        assert not writing.done()
    finally:
        may_end.set()
    assert await writing


async def test_commits_are_on_disk_and_writers_do_not_block_readers(tmp_path):
    database = await Database.open(database_url(None, tmp_path))
    async with database.reading() as connection:
        assert (await connection.exec_driver_sql("PRAGMA journal_mode")).scalar() == "wal"
        assert (await connection.exec_driver_sql("PRAGMA synchronous")).scalar() == 2
    async with a_writer_in_its_transaction(database), database.reading() as reading:
        assert (await reading.execute(select(KEYS))).all() == []
    await database.close()


async def test_what_is_asked_often_waits_for_no_writer_and_leaves_no_transaction_open(tmp_path):
    database = await Database.open(database_url(None, tmp_path))

    def holds(connection):
        return connection.execute(select(func.count()).select_from(HOLDS)).scalar_one()

    async with a_writer_in_its_transaction(database):
        assert await database.read(holds) == 0
    with pytest.raises(OperationalError):
        await database.read(lambda connection: connection.exec_driver_sql("SELECT nothing"))
    assert await database.read(holds) == 0
    assert await database.write(lambda connection: connection.exec_driver_sql("DELETE FROM holds").rowcount) == 0
    await database.close()


async def test_the_migrations_build_exactly_the_tables_of_the_schema(tmp_path):
    database = await Database.open(database_url(None, tmp_path))
    async with database.reading() as connection:
        found = await connection.run_sync(lambda sync: compare_metadata(MigrationContext.configure(sync), METADATA))
    await database.close()
    assert found == []
    assert migrate.newest() == SCHEMA_HEAD


async def test_a_failed_write_leaves_no_trace(tmp_path):
    database = await Database.open(database_url(None, tmp_path))

    def fail(connection):
        connection.exec_driver_sql(
            "INSERT INTO keys (key_id, salt, digest, key_name, created_at) VALUES ('k', 's', 'd', 'n', 1.0)"
        )
        raise KeyError

    with pytest.raises(KeyError):
        await database.write(fail)
    async with database.reading() as connection:
        assert (await connection.execute(select(KEYS))).all() == []
    await database.close()


async def test_a_database_of_a_newer_version_is_left_alone(tmp_path):
    database = await Database.open(database_url(None, tmp_path))
    await database.write(lambda c: c.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'"))
    await database.close()
    with pytest.raises(ConfigError, match="another version of hitsend"):
        await Database.open(database_url(None, tmp_path))


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("sqlite+aiosqlite://", "would be lost"),
        ("nonsense", "expected for example"),
        ("oracle+nothing://x", "expected for example"),
    ],
)
async def test_an_unusable_url_is_said_plainly(url, said):
    with pytest.raises(ConfigError, match=said):
        await Database.open(url)


async def test_a_file_that_is_no_database_is_said_plainly(tmp_path):
    (tmp_path / FILE_NAME).write_bytes(b"not a database, but long enough to be read as one" * 100)
    with pytest.raises(ConfigError, match="can't open the database"):
        await Database.open(database_url(None, tmp_path))


async def test_a_folder_that_can_not_be_made_is_said_plainly(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match=r"server\.data_dir"):
        await Database.open(database_url(None, tmp_path / "file" / "below"))


_OPEN = """
import asyncio, sys
from hitsend.serve.database.connection import Database, database_url
async def main():
    await (await Database.open(database_url(None, sys.argv[1]))).close()
    print("alembic" in sys.modules)
asyncio.run(main())
"""


@pytest.mark.slow  # a Python started for each process
async def test_processes_that_create_it_at_once_all_succeed_and_later_ones_skip_alembic(tmp_path):
    racing = [
        await asyncio.create_subprocess_exec(sys.executable, "-c", _OPEN, str(tmp_path), stdout=subprocess.PIPE)
        for _ in range(4)
    ]
    async with asyncio.timeout(60):
        await asyncio.gather(*(process.communicate() for process in racing))
    assert [process.returncode for process in racing] == [0] * 4
    later = await asyncio.create_subprocess_exec(sys.executable, "-c", _OPEN, str(tmp_path), stdout=subprocess.PIPE)
    async with asyncio.timeout(60):
        assert (await later.communicate())[0] == b"False\n"


def _downgrade(connection, revision):
    config = migrate._config(str(files("hitsend.serve.database") / "migrations"))
    config.attributes["connection"] = connection
    command.downgrade(config, revision)


async def test_keys_of_the_schema_before_stay_good_as_callers_without_limits(tmp_path):
    database = await Database.open(database_url(None, tmp_path))
    insert = "INSERT INTO keys (key_id, salt, digest, key_name, created_at) VALUES ('k', 's', 'd', 'n', 1.0)"

    def write(connection):
        _downgrade(connection, "0002")
        connection.exec_driver_sql(insert)

    await database.write(write)
    await database.close()
    database = await Database.open(database_url(None, tmp_path))
    async with database.reading() as connection:
        row = (await connection.execute(select(KEYS))).mappings().one()
        found = await connection.run_sync(lambda sync: compare_metadata(MigrationContext.configure(sync), METADATA))
    await database.close()
    assert (row["key_id"], row["role"], row["limits"], row["expires_at"]) == ("k", "caller", "{}", None)
    assert found == []
