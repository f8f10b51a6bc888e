import asyncio
import contextlib
import random

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from hitsend.core.errors import InvalidRequest, StorageFailed
from hitsend.core.request import Usage
from hitsend.serve.usage import owner as owners
from hitsend.serve.usage.ledger import RECOVERED, Settlement
from hitsend.serve.usage.meter import WrongCounts
from tests.usage.storage import ALICE, QWEN, Faults, HandClock, storage, wanted

pytestmark = pytest.mark.slow  # waits for sockets or processes, or tries very many examples

DEAD = "?:?:1:?:dead"


async def test_a_hold_is_durable_before_work_starts_and_ends_in_one_row(url):
    async with storage(url) as opened:
        hold = await opened.ledger.reserve(wanted("r1", input_tokens=300, output_tokens=500))
        (held,) = await opened.holds()
        assert (held["request_id"], held["held_microusd"], held["key_id"]) == ("r1", 1_735, "a1")
        assert opened.ledger.holds_open == 1
        row = await opened.ledger.settle(hold, Settlement(Usage(300, 400, 0, 100), "stop", discarded_tokens=3))
        assert (row.cost_microusd, row.day, row.user_name) == (1_415, "2027-01-15", "u")
        assert row.usage == Usage(300, 400, 0, 100)
        assert await opened.ledger.row("r1") == row
        assert await opened.holds() == []
        assert opened.ledger.holds_open == 0
        assert [(r["price_id"], r["price_input_picousd"], r["discarded_tokens"]) for r in await opened.rows()] == [
            ("test", 450_000, 3)
        ]


async def test_settling_twice_keeps_the_first_row(url):
    async with storage(url) as opened:
        hold = await opened.ledger.reserve(wanted("r1"))
        first = await opened.ledger.settle(hold, Settlement(Usage(10, 5), "stop"))
        opened.clock.seconds += 10
        again = await opened.ledger.settle(hold, Settlement(Usage(10, 20), "length"))
        released = await opened.ledger.release(hold, "cancelled")
        assert first == again == released
        assert len(await opened.rows()) == 1


async def test_settling_at_once_from_many_places_makes_one_row(url):
    async with storage(url) as opened:
        hold = await opened.ledger.reserve(wanted("r1"))
        rows = await asyncio.gather(
            *(opened.ledger.settle(hold, Settlement(Usage(10, tokens), "stop")) for tokens in range(20))
        )
        assert {row.completion_tokens for row in rows} == {0}
        assert len(await opened.rows()) == 1


async def test_a_request_id_can_not_be_used_twice_to_run_free(url):
    async with storage(url) as opened:
        hold = await opened.ledger.reserve(wanted("r1"))
        with pytest.raises(InvalidRequest, match="r1"):
            await opened.ledger.reserve(wanted("r1"))
        await opened.ledger.release(hold, "stop")
        with pytest.raises(InvalidRequest, match="used before"):
            await opened.ledger.reserve(wanted("r1"))
        assert opened.ledger.holds_open == 0
        assert len(await opened.rows()) == 1


async def test_one_client_request_with_attempts_and_replays_makes_one_row(url):
    """Three tries of one request, one of them while the first still runs: one of them is billed."""
    async with storage(url) as opened:
        tries = await asyncio.gather(*(opened.ledger.reserve(wanted("r1")) for _ in range(3)), return_exceptions=True)
        (hold,) = [tried for tried in tries if not isinstance(tried, InvalidRequest)]
        await opened.ledger.settle(hold, Settlement(Usage(9, 5), "stop"))
        assert len(tries) == 3
        assert [row["completion_tokens"] for row in await opened.rows()] == [5]


async def test_the_database_itself_refuses_a_second_row_or_a_change(url):
    async with storage(url) as opened:
        await opened.ledger.release(await opened.ledger.reserve(wanted("r1")), "stop")
        columns = "hold_id, key_name, model, engine, price_id, price_input_picousd, price_output_picousd"
        counts = "prompt_tokens, cached_tokens, completion_tokens, reasoning_tokens, discarded_tokens, cost_microusd"
        rest = "reason, is_estimate, created_at, settled_at, day"
        copy = f"INSERT INTO ledger (request_id, {columns}, {counts}, {rest}) SELECT"
        for statement in (
            f"{copy} request_id, 'x' || {columns}, {counts}, {rest} FROM ledger",
            f"{copy} 'r2', {columns}, {counts}, {rest} FROM ledger",
            "UPDATE ledger SET cost_microusd = 1",
            "DELETE FROM ledger",
        ):
            with pytest.raises(DBAPIError):
                await opened.database.write(lambda c, statement=statement: c.execute(text(statement)))
        assert len(await opened.rows()) == 1


async def test_impossible_counts_are_refused_and_the_hold_stays(url):
    async with storage(url) as opened:
        hold = await opened.ledger.reserve(wanted("r1"))
        with pytest.raises(WrongCounts):
            opened.ledger.settle(hold, Settlement(Usage(1, 1, cached_tokens=2), "stop"))
        assert opened.ledger.holds_open == 1
        await opened.ledger.release(hold, "error")


async def test_a_with_block_that_ends_early_releases_its_hold(url):
    async with storage(url) as opened:
        with pytest.raises(KeyError):
            async with opened.ledger.holding(wanted("r1")):
                raise KeyError
        async with opened.ledger.holding(wanted("r2")) as hold:
            opened.ledger.settle(hold, Settlement(Usage(1, 1), "stop"))
        await opened.writer.stop()
        assert [(row["request_id"], row["reason"]) for row in await opened.rows()] == [
            ("r1", "unsettled"),
            ("r2", "stop"),
        ]
        assert opened.ledger.holds_open == 0


async def test_a_caller_who_leaves_while_reserving_leaves_no_hold(url):
    async with storage(url) as opened:
        leaving = asyncio.create_task(opened.ledger.reserve(wanted("r1")))
        await asyncio.sleep(0)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        await opened.ledger.release(await opened.ledger.reserve(wanted("r2")), "stop")
        assert opened.ledger.holds_open == 0
        assert await opened.holds() == []
        assert [row["reason"] for row in await opened.rows()] == ["unconfirmed", "stop"]


async def test_a_caller_who_leaves_while_settling_is_settled(url):
    async with storage(url) as opened:
        hold = await opened.ledger.reserve(wanted("r1"))
        waiting = opened.ledger.settle(hold, Settlement(Usage(10, 5), "stop"))
        waiting.cancel()
        await opened.ledger.release(await opened.ledger.reserve(wanted("r2")), "stop")
        assert [row["completion_tokens"] for row in await opened.rows()] == [5, 0]


async def test_streamed_or_not_the_same_tokens_make_the_same_row(url):
    """The row comes from counts alone: nothing in it knows how the answer was delivered; no cost is ever missing."""
    async with storage(url) as opened:
        for number in range(3):
            hold = await opened.ledger.reserve(wanted(f"r{number}"))
            await opened.ledger.settle(hold, Settlement(Usage(9, 7), "stop"))
        ids = {"seq": 0, "request_id": "", "hold_id": ""}
        rows = [row | ids for row in await opened.rows()]
        assert rows[0] == rows[1] == rows[2]
        assert rows[0]["cost_microusd"] > 0


async def test_many_requests_at_once_share_commits_and_lose_nothing(url):
    async with storage(url) as opened:
        draw = random.Random(1)

        async def live(number: int) -> int:
            hold = await opened.ledger.reserve(wanted(f"r{number}"))
            if draw.random() < 0.2:
                return (await opened.ledger.release(hold, "cancelled")).cost_microusd
            await asyncio.sleep(0)
            return (await opened.ledger.settle(hold, Settlement(Usage(number, number), "stop"))).cost_microusd

        costs = await asyncio.gather(*(live(number) for number in range(300)))
        rows = await opened.rows()
        assert {row["request_id"] for row in rows} == {f"r{number}" for number in range(300)}
        assert sum(row["cost_microusd"] for row in rows) == sum(costs)
        assert await opened.holds() == []
        assert opened.ledger.holds_open == 0
        assert opened.writer.num_operations == 600
        assert opened.writer.num_commits < 60


async def _leave_hold(url, clock, owner, request_id):
    async with storage(url, clock, owner) as opened:
        await opened.ledger.reserve(wanted(request_id))


async def test_holds_of_an_unknown_owner_are_closed_when_their_lease_ran_out(url):
    clock = HandClock()
    await _leave_hold(url, clock, DEAD, "r1")
    clock.seconds += 29
    async with storage(url, clock) as opened:
        assert len(await opened.holds()) == 1
        clock.seconds += 2
        assert await opened.ledger.recover() == 1
        assert await opened.ledger.recover() == 0
        (row,) = await opened.rows()
        assert (row["reason"], row["is_estimate"], row["cost_microusd"], row["key_id"]) == (RECOVERED, True, 0, "a1")
        assert await opened.holds() == []


async def test_holds_of_a_dead_process_are_closed_at_start(url):
    clock = HandClock()
    boot, namespace, _, started, _ = owners.this_process().split(":")
    await _leave_hold(url, clock, f"{boot}:{namespace}:999999999:{started}:x", "r1")
    async with storage(url, clock) as opened:
        assert [row["reason"] for row in await opened.rows()] == [RECOVERED]


async def test_holds_of_a_living_process_are_left_alone(url):
    clock = HandClock()
    boot, namespace, *_ = owners.this_process().split(":")
    sleeper = await asyncio.create_subprocess_exec("sleep", "60")
    try:
        started = owners._started(sleeper.pid)
        await _leave_hold(url, clock, f"{boot}:{namespace}:{sleeper.pid}:{started}:x", "r1")
        clock.seconds += 1000
        async with storage(url, clock) as opened:
            assert await opened.rows() == []
            sleeper.kill()
            await sleeper.wait()
            assert await opened.ledger.recover() == 1
    finally:
        if sleeper.returncode is None:
            sleeper.kill()
            await sleeper.wait()


async def test_leases_are_renewed_while_requests_run(url):
    clock = HandClock()
    async with storage(url, clock) as opened:
        hold = await opened.ledger.reserve(wanted("r1"))
        for _ in range(10):
            clock.seconds += 11
            await opened.ledger.tend()
        (held,) = await opened.holds()
        assert held["lease_until"] > clock.seconds
        await opened.ledger.release(hold, "stop")


async def _one_life(opened, request_id):
    hold = await opened.ledger.reserve(wanted(request_id))
    await asyncio.sleep(0)
    return await opened.ledger.settle(hold, Settlement(Usage(10, 5), "stop"))


@pytest.mark.parametrize("length", [1, 2, 3, 5])
async def test_fault_sweep(new_url, length):
    """Fail `length` database calls from the k-th on, for each k until a run has no failure: nothing lost or doubled."""
    number = 1
    while True:
        clock = HandClock()
        url = new_url()
        async with storage(url, clock, DEAD) as opened:
            faults = Faults(opened.database, number, length)
            ends = await asyncio.gather(*(_one_life(opened, f"r{i}") for i in range(3)), return_exceptions=True)
            faults.detach()
        assert all(not isinstance(end, Exception) or isinstance(end, StorageFailed) for end in ends)
        clock.seconds += 31
        async with storage(url, clock) as again:
            assert await again.holds() == []
            rows = {row["request_id"]: row for row in await again.rows()}
            assert len(rows) == len(await again.rows())
        for i, end in enumerate(ends):
            if isinstance(end, Exception):
                # refused before it ran (no row, or an empty one), or settled all the same once the database came back
                row = rows.get(f"r{i}")
                assert row is None or (row["reason"], row["cost_microusd"]) in {("stop", 21), ("unconfirmed", 0)}
            else:
                assert rows[f"r{i}"]["cost_microusd"] == end.cost_microusd == 21
        if not faults.failed:
            break
        number += 1
    assert number > 3


async def test_a_settlement_the_database_refused_is_written_later(url):
    async with storage(url) as opened:
        hold = await opened.ledger.reserve(wanted("r1"))
        faults = Faults(opened.database, 1, 1000)
        with pytest.raises(StorageFailed):
            await opened.ledger.settle(hold, Settlement(Usage(10, 5), "stop"))
        await opened.ledger.tend()
        assert opened.ledger.holds_open == 1
        faults.detach()
        await opened.ledger.tend()
        assert opened.ledger.holds_open == 0
        assert [row["completion_tokens"] for row in await opened.rows()] == [5]


async def test_a_row_without_a_hold_is_written_once_and_also_later(url):
    """What a given-up engine had computed is known: a database that fails then doesn't make nothing of it."""
    async with storage(url) as opened:
        faults = Faults(opened.database, 1, 1000)
        for _ in range(2):
            with pytest.raises(StorageFailed):
                await opened.ledger.enter(wanted("r1/tried/a"), Settlement(Usage(10, 5), "engine_failed"))
        faults.detach()
        await opened.ledger.tend()
        await opened.ledger.enter(wanted("r1/tried/a"), Settlement(Usage(99, 99), "engine_failed"))
        assert (opened.ledger.holds_open, await opened.holds()) == (0, [])
        found = [(row["completion_tokens"], row["cost_microusd"], row["reason"]) for row in await opened.rows()]
        assert found == [(5, 21, "engine_failed")]


async def test_one_request_that_can_not_be_written_ends_no_other(url):
    async with storage(url) as opened:
        nobody = wanted("bad", principal=ALICE.__class__(name=None))
        ends = await asyncio.gather(
            *(_one_life(opened, f"r{number}") for number in range(5)),
            opened.ledger.reserve(nobody),
            return_exceptions=True,
        )
        assert isinstance(ends.pop(), StorageFailed)
        assert [end.cost_microusd for end in ends] == [21] * 5
        assert {row["request_id"] for row in await opened.rows()} == {f"r{number}" for number in range(5)}
        assert QWEN.id == "test"


async def test_fault_sweep_over_the_recovery(new_url):
    """A start that fails at its k-th database call closes nothing twice; the next one closes the rest."""
    number = 1
    while True:
        clock = HandClock()
        url = new_url()
        async with storage(url, clock, DEAD) as opened:
            for i in range(3):
                await opened.ledger.reserve(wanted(f"r{i}"))
        clock.seconds += 31
        async with storage(url, clock, DEAD) as opened:
            opened.ledger.owner = "somebody else"
            faults = Faults(opened.database, number, 4)
            with contextlib.suppress(StorageFailed, SQLAlchemyError):
                await opened.ledger.recover()
            faults.detach()
        async with storage(url, clock) as again:
            assert await again.holds() == []
            assert sorted(row["request_id"] for row in await again.rows()) == ["r0", "r1", "r2"]
        if not faults.failed:
            break
        number += 1
    assert number > 3
