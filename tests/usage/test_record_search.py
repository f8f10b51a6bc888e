"""Searching records: memory and disk agree, pages follow each other, percentiles name real requests."""

import itertools
import random

import pytest
from sqlalchemy import text

from hitsend.serve.usage.record_search import RecordFilter, place_of
from hitsend.serve.usage.records import RecordStore
from hitsend.settings import RecordSettings
from tests.usage.storage import storage
from tests.usage.test_records import summary

FILTERS = (
    RecordFilter(),
    RecordFilter(name="alice"),
    RecordFilter(model="m1", finish_reason="length"),
    RecordFilter(finish_reason="stop", min_wall_ms=500.0),
    RecordFilter(min_cost_microusd=90),
    RecordFilter(name="nobody"),
)


@pytest.fixture
def url(new_url):
    return new_url()


def made(count):
    draw = random.Random(7)
    for number in range(count):
        yield summary(
            f"r{number:04}",
            received_at=float(number // 3),  # three at the same instant
            key_id=f"k{number % 2}",
            key_name=draw.choice(("alice", "bob")),
            model=draw.choice(("m1", "m2", None)),
            finish_reason=draw.choice(("stop", "length", "error", None)),
            wall_ms=draw.uniform(0.0, 1000.0),
            ttft_ms=draw.choice((None, draw.uniform(0.0, 100.0))),
            cost_microusd=draw.randrange(100),
        )


@pytest.mark.parametrize("ring", [1, 40, 500])
async def test_a_search_finds_the_same_wherever_records_are(url, ring):
    async with storage(url) as opened:
        store = RecordStore(opened.database, opened.writer, opened.clock, RecordSettings(ring=ring))
        known = list(made(200))
        for one in known:
            store.put(one, b"{}")
        await store.flush()
        for wanted, key_id in itertools.product(FILTERS, (None, "k1")):
            meant = [one for one in known if wanted.has(one) and key_id in (None, one.key_id)]
            meant.sort(key=place_of, reverse=True)
            found, before = [], None
            while True:
                page = await store.list(7, key_id=key_id, wanted=RecordFilter(**asked(wanted), before=before))
                found += page
                if len(page) < 7:
                    break
                before = place_of(page[-1])
            assert [one.request_id for one in found] == [one.request_id for one in meant]


def asked(wanted):
    return {name: getattr(wanted, name) for name in wanted.__struct_fields__ if name != "before"}


async def test_percentiles_are_the_nearest_ranks_with_their_requests(url):
    async with storage(url) as opened:
        store = RecordStore(opened.database, opened.writer, opened.clock, RecordSettings())
        for number in range(100):
            kept = {"wall_ms": float(number + 1), "ttft_ms": None if number % 2 else float(number)}
            store.put(summary(f"r{number}", received_at=float(number), **kept), b"{}")
        await store.flush()
        found = await store.percentiles()
        assert found.num_requests == 100
        assert [(one.share, one.ms, one.request_id) for one in found.wall] == [
            *((50, 50.0, "r49"), (75, 75.0, "r74"), (90, 90.0, "r89"), (95, 95.0, "r94"), (99, 99.0, "r98"))
        ]
        assert [one.ms for one in found.ttft] == [48.0, 74.0, 88.0, 94.0, 98.0]
        assert (await store.percentiles(wanted=RecordFilter(name="nobody"))).wall == ()
        assert (await store.percentiles(key_id="another")).num_requests == 0


async def test_a_search_walks_the_index_and_sorts_nothing(tmp_path):
    async with storage(f"sqlite+aiosqlite:///{tmp_path}/h.sqlite3") as opened:
        query = "SELECT request_id, state FROM records WHERE model = 'm' AND wall_ms >= 5"
        query += " ORDER BY received_at DESC, request_id DESC LIMIT 50"
        async with opened.database.reading() as connection:
            plan = [row[3] for row in await connection.execute(text(f"EXPLAIN QUERY PLAN {query}"))]
        assert plan == ["SCAN records USING INDEX ix_records_search"]
