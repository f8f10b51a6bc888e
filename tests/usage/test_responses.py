import asyncio

import pytest

from hitsend.core.errors import NotFound, StorageFailed
from hitsend.serve.usage.files import FileStore, Whose
from hitsend.serve.usage.responses import ResponseStore
from hitsend.settings import BatchSettings, ResponsesSettings
from tests.usage.storage import Faults, storage


def store_on(opened, **settings):
    return ResponseStore(opened.database, opened.writer, opened.clock, ResponsesSettings(**settings))


async def test_a_response_is_there_for_its_key_alone_until_it_is_deleted(url):
    async with storage(url) as opened:
        store = store_on(opened)
        await store.put("r1", b'{"a":1}', key_id="k")
        await store.put("r2", b"{}", key_id=None)
        assert await store_on(opened).get("r1", key_id="k") == b'{"a":1}'
        assert await store.get("r2", key_id=None) == b"{}"
        for stranger in ("other", None):
            assert await store.get("r1", key_id=stranger) is None
            assert not await store.delete("r1", key_id=stranger)
        assert await store.get("r2", key_id="k") is None
        assert await store.delete("r1", key_id="k")
        assert await store.get("r1", key_id="k") is None
        assert not await store.delete("r1", key_id="k")


async def test_an_id_with_a_zero_byte_is_nobody_s(url, tmp_path):
    async with storage(url) as opened:
        assert await store_on(opened).get("a\0b", key_id="k") is None
        files = FileStore(opened.database, opened.writer, opened.clock, BatchSettings(), tmp_path)
        with pytest.raises(NotFound):
            await files.get("a\0b", Whose("k", sees_all=False))


async def test_an_id_that_is_taken_stays_as_it_is(url):
    async with storage(url) as opened:
        store = store_on(opened)
        await store.put("r1", b"first", key_id="k")
        await store.put("r1", b"second", key_id="k")
        await store.put("r1", b"third", key_id="other")
        assert await store.get("r1", key_id="k") == b"first"
        assert await store.get("r1", key_id="other") is None


async def test_what_is_too_old_is_never_given_out_and_then_deleted(url):
    async with storage(url) as opened:
        store = store_on(opened, retention_days=2)
        await store.put("old", b"{}", key_id="k")
        opened.clock.seconds += 1.5 * 86_400
        await store.put("new", b"{}", key_id="k")
        opened.clock.seconds += 86_400
        assert await store.get("old", key_id="k") is None
        assert await store.get("new", key_id="k") == b"{}"
        assert await store.prune() == 1
        assert await store.prune() == 0
        opened.clock.seconds -= 86_400
        assert await store.get("old", key_id="k") is None


async def test_a_key_s_oldest_make_room_and_no_other_key_s(url):
    async with storage(url) as opened:
        store = store_on(opened, max_stored=3)
        await store.put("other", b"{}", key_id=None)
        for number in range(6):
            opened.clock.seconds += 1
            await store.put(f"r{number}", b"{}", key_id="k")
        left = [number for number in range(6) if await store.get(f"r{number}", key_id="k") is not None]
        assert left == [3, 4, 5]
        assert await store.get("other", key_id=None) is not None


async def test_a_disk_that_fails_is_told(url):
    async with storage(url) as opened:
        store = store_on(opened)
        faults = Faults(opened.database, 1, 1000)
        with pytest.raises(StorageFailed):
            await store.put("r1", b"{}", key_id="k")
        with pytest.raises(StorageFailed):
            await store.get("r1", key_id="k")
        faults.detach()


async def test_the_background_task_deletes_and_ends(url):
    async with storage(url) as opened:
        store = store_on(opened, retention_days=1)
        await store.put("old", b"{}", key_id="k")
        opened.clock.seconds += 2 * 86_400
        store.start()
        for _ in range(200):
            async with opened.database.reading() as connection:
                rows = (await connection.exec_driver_sql("SELECT count(*) FROM responses")).scalar()
            if rows == 0:
                break
            await asyncio.sleep(0.02)
        await store.stop()
        await store.stop()
        assert rows == 0
