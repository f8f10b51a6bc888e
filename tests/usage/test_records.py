from hitsend.serve.usage import records
from hitsend.serve.usage.records import RecordStore, RecordSummary
from hitsend.settings import RecordSettings
from tests.usage.storage import Faults, storage


def summary(request_id, **changes):
    values = {
        "received_at": 1_800_000_000.0,
        "state": "finished",
        "finish_reason": "stop",
        "error_code": None,
        "model": "m",
        "key_id": "a1",
        "key_name": "alice",
        "wall_ms": 12.5,
        "prompt_tokens": 0,
        "completion_tokens": 0,
        "cost_microusd": 0,
    }
    return RecordSummary(request_id=request_id, **(values | changes))


def store_on(opened, **settings):
    return RecordStore(opened.database, opened.writer, opened.clock, RecordSettings(**settings))


async def test_a_record_is_there_at_once_and_after_a_restart(url):
    async with storage(url) as opened:
        store = store_on(opened)
        store.put(summary("r1"), b'{"a":1}')
        assert await store.get("r1") == b'{"a":1}'
        assert await store.get("r2") is None
        store.start()
        await store.stop()
        after = store_on(opened)
        assert await after.get("r1") == b'{"a":1}'
        assert await after.list(10) == (summary("r1"),)


async def test_lists_are_newest_first_across_ring_and_disk(url):
    async with storage(url) as opened:
        store = store_on(opened, ring=3)
        for number in range(10):
            store.put(summary(f"r{number}", received_at=float(number), key_id="ab"[number % 2]), b"{}")
        await store.flush()
        assert [kept.request_id for kept in await store.list(5)] == ["r9", "r8", "r7", "r6", "r5"]
        assert [kept.request_id for kept in await store.list(3, key_id="a")] == ["r8", "r6", "r4"]
        assert await store.get("r0") == b"{}"


async def test_nobody_overwrites_another_callers_record_nor_a_billed_one(url):
    async with storage(url) as opened:
        store = store_on(opened)
        for ring in (10, 1):
            store = store_on(opened, ring=ring)
            store.put(summary("mine", prompt_tokens=5), b"first")
            store.put(summary("mine"), b"same key, but the first was billed")
            store.put(summary("other", key_id="a1"), b"refused")
            store.put(summary("other", key_id="b2"), b"another key")
            store.put(summary("other", key_id="a1"), b"second try")
            await store.flush()
        after = store_on(opened)
        assert await after.get("mine") == b"first"
        assert await after.get("other") == b"second try"


async def test_old_and_surplus_records_are_deleted(url):
    async with storage(url) as opened:
        store = store_on(opened, retention_days=1, max_stored=25)
        now = opened.clock.wall()
        for number in range(2500):
            age = 90_000.0 if number < 2400 else 0.0
            store.put(summary(f"r{number}", received_at=now - age + number / 1000), b"{}")
            if number % 1000 == 0:
                await store.flush()
        await store.flush()
        assert await store.prune() == 2475
        after = store_on(opened)
        assert [kept.request_id for kept in await after.list(100)] == [f"r{number}" for number in range(2499, 2474, -1)]


async def test_the_ring_is_bounded_by_bytes_too(url):
    async with storage(url) as opened:
        store = store_on(opened)
        big = bytes(records.RING_BYTES // 3)
        for number in range(6):
            store.put(summary(f"r{number}"), big)
        assert store._ring_bytes <= records.RING_BYTES
        assert len(store._ring) == 3


async def test_a_disk_that_fails_costs_a_record_not_a_request(url):
    async with storage(url) as opened:
        store = store_on(opened)
        faults = Faults(opened.database, 1, 1000)
        store.put(summary("r1"), b"{}")
        await store.flush()
        faults.detach()
        assert store.num_dropped == 1
        assert await store.get("r1") == b"{}"


async def test_records_waiting_for_the_disk_are_bounded(url):
    async with storage(url) as opened:
        store = store_on(opened, ring=10)
        for number in range(records.MAX_PENDING + 5):
            store.put(summary(f"r{number}"), b"{}")
        assert store.num_dropped == 5
