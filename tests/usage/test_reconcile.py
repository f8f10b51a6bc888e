"""Books that agree, and each way in which they can be broken on purpose."""

import msgspec
import pytest
from sqlalchemy import delete, insert, update

from hitsend.core.request import Usage
from hitsend.serve.database.schema import HOLDS, LEDGER, RECORDS
from hitsend.serve.usage.books import Counters, open_books
from hitsend.serve.usage.figures import RequestFigures
from hitsend.serve.usage.ledger import Settlement
from hitsend.serve.usage.metrics import Metrics
from hitsend.serve.usage.pricing import Price
from hitsend.serve.usage.reconcile import EngineCounts, reconcile
from tests.usage.storage import QWEN, storage, wanted

NEURONS = Price("n", 11_000, 22_000, in_neurons=True)


class Steps:
    """A step's figures, and an engine's state."""

    def __init__(self, prefill, output):
        self.prefill_tokens, self.output_tokens, self.decode_tokens = prefill, output, output
        self.step_s = self.decode_s = 0.0
        self.drafts = ()
        self.sequences = self.running = self.waiting = self.cells_used = 0


class State:
    is_ready = True
    running = waiting = 0


class Server:
    """Ledger, metrics, engine counts and records of one process, fed as the real one feeds them."""

    def __init__(self, opened):
        self.opened = opened
        self.metrics, self.counts, self.state, self.num_open = Metrics(), EngineCounts("embedded"), State(), 0
        counters = Counters(
            opened.ledger,
            self.metrics,
            self.counts,
            lambda: self.state.running + self.state.waiting,
            lambda: self.num_open,
        )
        self.books = open_books(opened.database, opened.clock, counters)

    def step(self, prefill, output):
        self.metrics.observe_step(Steps(prefill, output))
        self.counts.observe_step(Steps(prefill, output))

    async def request(self, request_id, usage, *, discarded=0, price=QWEN, engine="embedded"):
        hold = await self.opened.ledger.reserve(wanted(request_id, price=price, engine=engine))
        if engine == "embedded":
            self.step(usage.prompt_tokens, usage.completion_tokens + discarded)
        row = await self.opened.ledger.settle(hold, Settlement(usage, "stop", discarded_tokens=discarded))
        self.count(row)
        record = {name: getattr(row, name) for name in ("request_id", "key_id", "key_name", "cost_microusd", "model")}
        record |= {"prompt_tokens": row.prompt_tokens, "completion_tokens": row.completion_tokens, "body": b""}
        record |= {"received_at": row.created_at, "wall_ms": 1.0, "state": "finished"}
        await self.opened.database.write(lambda c: c.execute(insert(RECORDS), record))
        return row

    def count(self, row):
        tokens = {name: getattr(row, name) for name in ("prompt_tokens", "completion_tokens", "cached_tokens")}
        self.metrics.observe_request(
            RequestFigures(
                model="m",
                wall_s=1.0,
                discarded_tokens=row.discarded_tokens,
                cost_microusd=row.cost_microusd,
                has_row=True,
                **tokens,
            )
        )

    async def change(self, statement):
        """What somebody does behind the program's back: the ledger's guards have to go first."""

        def work(connection):
            if connection.dialect.name == "sqlite":
                for guard in ("ledger_no_update", "ledger_no_delete"):
                    connection.exec_driver_sql(f"DROP TRIGGER IF EXISTS {guard}")
            else:
                connection.exec_driver_sql("ALTER TABLE ledger DISABLE TRIGGER USER")
            connection.execute(statement)

        await self.opened.database.write(work)


@pytest.fixture
async def server(url):
    async with storage(url) as opened:
        server = Server(opened)
        await server.request("a", Usage(100, 40, 0, 7), discarded=2)
        await server.request("b", Usage(10, 0), price=NEURONS)
        await server.request("c", Usage(33, 5))
        await server.request("e", Usage(9, 0), engine="embedder")
        server.metrics.observe_request(RequestFigures(model="m", wall_s=0.1, error_code="server_overloaded"))
        opened.clock.seconds += 60
        yield server


async def test_books_that_agree(server):
    found = await server.books.reconcile()
    assert found.drifted == ()
    assert found.is_at_rest
    assert [check.name for check in found.checks if check.relation != "="] == ["prompt_tokens_computed"]
    figures = {check.name: check.left for check in found.checks}
    assert (figures["metrics_requests"], figures["tokens_sampled"], figures["prompt_tokens_computed"]) == (4, 47, 143)
    assert msgspec.convert(msgspec.to_builtins(found), type(found)) == found


async def drifted(server):
    return set((await server.books.reconcile()).drifted)


async def test_the_engine_s_counts_against_the_ledger(server):
    server.step(0, 1)
    assert await drifted(server) == {"tokens_sampled"}
    server.counts.prefill_tokens -= 1
    assert await drifted(server) == {"tokens_sampled", "prompt_tokens_computed", "metrics_prompt_computed"}


async def test_the_engine_s_counts_against_the_metrics(server):
    server.metrics.observe_step(Steps(1, 0))
    assert await drifted(server) == {"metrics_prompt_computed"}
    server.metrics.observe_step(Steps(0, 1))
    assert await drifted(server) == {"metrics_prompt_computed", "metrics_sampled"}


@pytest.mark.parametrize(
    "name", ["prompt_tokens", "completion_tokens", "cached_tokens", "discarded_tokens", "cost_microusd"]
)
async def test_the_metrics_against_the_ledger(server, name):
    server.metrics.observe_request(RequestFigures(model="x", wall_s=1.0, **{name: 1}))
    assert await drifted(server) == {f"metrics_{name}"}


async def test_a_request_counted_twice(server):
    server.metrics.observe_request(RequestFigures(model="m", wall_s=1.0, has_row=True))
    assert await drifted(server) == {"metrics_requests"}


async def test_a_row_that_was_changed_afterwards(server):
    await server.change(
        update(LEDGER).where(LEDGER.c.request_id == "a").values(cost_microusd=LEDGER.c.cost_microusd + 1)
    )
    assert await drifted(server) == {"rows_wrong_cost", "records_differ", "metrics_cost_microusd"}
    offline = await reconcile(server.opened.database, server.opened.clock.wall())
    assert set(offline.drifted) == {"rows_wrong_cost", "records_differ"}
    assert {check.examples for check in offline.checks if not check.is_good} == {("a",)}
    assert offline.owner is None


async def test_a_row_with_other_neurons(server):
    await server.change(update(LEDGER).where(LEDGER.c.request_id == "b").values(neurons_micro=1))
    assert await drifted(server) == {"rows_wrong_neurons"}


async def test_a_row_that_was_deleted(server):
    await server.change(delete(LEDGER).where(LEDGER.c.request_id == "e"))
    assert await drifted(server) == {
        "records_without_row",
        "metrics_requests",
        "metrics_prompt_tokens",
        "metrics_cost_microusd",
    }


async def test_a_record_that_was_deleted(server):
    await server.change(delete(RECORDS).where(RECORDS.c.request_id == "c"))
    assert await drifted(server) == {"rows_without_record"}


async def test_records_of_long_ago_and_rows_of_a_moment_ago_are_not_missed(server):
    server.opened.clock.seconds += 60
    await server.request("new", Usage(1, 0))
    await server.change(delete(RECORDS).where(RECORDS.c.request_id == "new"))
    assert await drifted(server) == set()
    server.opened.clock.seconds += 6
    assert await drifted(server) == {"rows_without_record"}
    await server.change(delete(RECORDS))
    await server.request("newer", Usage(1, 0))
    assert await drifted(server) == set()


async def test_a_hold_whose_process_is_gone(server):
    hold = await server.opened.ledger.reserve(wanted("left"))
    assert await drifted(server) == set()
    server.opened.ledger.release(hold, "done")
    await server.opened.ledger.tend()
    await server.opened.ledger.reserve(wanted("lost"))
    await server.change(update(HOLDS).values(owner="elsewhere", lease_until=server.opened.clock.wall() - 1))
    found = await server.books.reconcile()
    assert "holds_without_owner" in found.drifted
    assert next(check for check in found.checks if check.name == "holds_without_owner").examples == ("lost",)


async def test_while_requests_are_under_way_only_what_must_hold_is_asked(server):
    server.num_open = 1
    server.step(50, 3)
    found = await server.books.reconcile()
    assert found.drifted == ()
    assert not found.is_at_rest
    server.metrics.observe_request(RequestFigures(model="m", wall_s=1.0, cost_microusd=1))
    assert await drifted(server) == {"metrics_cost_microusd"}


async def test_prompts_that_were_computed_again_are_more_not_less(server):
    server.step(20, 0)
    assert await drifted(server) == set()


async def test_rows_of_other_processes_and_of_crashes_are_not_this_one_s(server, url):
    async with storage(url, server.opened.clock, owner="other") as other:
        hold = await other.ledger.reserve(wanted("theirs"))
        await other.ledger.settle(hold, Settlement(Usage(5, 5), "stop"))
        await other.ledger.reserve(wanted("crashed"))
        server.opened.clock.seconds += 100
        await server.opened.ledger.recover()
    assert await drifted(server) == {"rows_without_record"}
