import json
from datetime import date

import msgspec
import pytest

from hitsend.core.request import Usage
from hitsend.serve.database.connection import database_url
from hitsend.serve.usage.books import Counters, open_books
from hitsend.serve.usage.ledger import Settlement
from hitsend.serve.usage.metrics import Metrics
from hitsend.serve.usage.reconcile import EngineCounts
from tests.edge import Edge
from tests.usage.storage import storage, wanted


@pytest.fixture
async def edge(tmp_path):
    async with storage(database_url(None, tmp_path)) as opened:
        for number in range(5):
            hold = await opened.ledger.reserve(wanted(f"r{number}", model=f"m{number % 2}"))
            await opened.ledger.settle(hold, Settlement(Usage(10, number), "stop"))
        edge = Edge()
        counters = Counters(opened.ledger, Metrics(), EngineCounts("embedded"), lambda: 0, lambda: 0)
        services = msgspec.structs.replace(edge.services, books=open_books(opened.database, opened.clock, counters))
        edge.app._services = services
        yield edge


async def test_a_statement_over_http(edge):
    found = (await edge.ask("/admin/usage?by=model&from=2027-01-01&to=2027-12-31")).json()
    assert [part["of"] for part in found["parts"]] == [{"model": "m0"}, {"model": "m1"}]
    assert sum(part["totals"]["cost_microusd"] for part in found["parts"]) == found["due_microusd"] > 0
    assert (await edge.ask("/admin/usage?to=2020-01-01")).json()["parts"] == []


async def test_rows_page_by_page(edge):
    seen, after = [], 0
    while after is not None:
        page = (await edge.ask(f"/admin/ledger?limit=2&after={after}")).json()
        seen += [one["row"]["request_id"] for one in page["data"]]
        after = page["next_after"]
    assert seen == ["r0", "r1", "r2", "r3", "r4"]


async def test_what_the_metrics_never_saw_has_drifted(edge):
    found = (await edge.ask("/admin/reconcile")).json()
    assert {"metrics_requests", "metrics_cost_microusd", "tokens_sampled"} <= set(found["drifted"])


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("usage?by=cat", "by"),
        ("usage?from=yesterday", "from"),
        ("usage?to=2026-02-30", "to"),
        ("usage?by=app&by=app", "by"),
        ("usage?limit=5", "limit"),
        ("usage?from=2027-01-02&to=2027-01-01", "from"),
        ("ledger?from=2027-01-02&to=2027-01-01", "from"),
        ("ledger?limit=0", "limit"),
        ("ledger?limit=1001", "limit"),
        ("ledger?limit=-1", "limit"),
        ("ledger?after=1e3", "after"),
        ("ledger?after=9223372036854775808", "after"),
        ("ledger?after=%C2%B2", "after"),
        ("reconcile?x=1", "x"),
        ("ledger?" + "a=1&" * 1000, None),
    ],
)
async def test_a_field_that_means_nothing_is_named(edge, query, field):
    answer = await edge.ask(f"/admin/{query}")
    assert (answer.status, answer.error["param"]) == (400, field)


async def test_a_server_without_books_has_no_such_routes():
    for path in ("usage", "ledger", "reconcile"):
        assert (await Edge().ask(f"/admin/{path}")).status == 404


async def test_a_ledger_that_cannot_be_read_is_said(edge):
    database = edge.app._services.books.statement.args[0]
    await database.write(lambda c: c.exec_driver_sql("ALTER TABLE ledger RENAME TO elsewhere"))
    answer = await edge.ask(f"/admin/usage?from={date(2026, 1, 1)}")
    assert (answer.status, json.loads(answer.body)["error"]["code"]) == (503, "storage_failed")
