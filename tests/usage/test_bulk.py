"""Holds and rows that come in one group: the same answers as one by one."""

import asyncio

from hitsend.core.request import Usage
from hitsend.serve.usage.bulk import end_holds, insert_holds
from hitsend.serve.usage.ledger import Settlement
from hitsend.serve.usage.rows import Hold, hold_values, ledger_row
from tests.usage.storage import storage, wanted


def hold(number, request_id):
    return Hold(f"{number:032}", wanted(request_id), 1, 1000.0)


def row(one, tokens):
    usage, found = Usage(tokens, tokens), {"discarded_tokens": 0, "reason": "stop", "is_estimate": False}
    return ledger_row(hold_values(one), usage, 2000.0, cost_microusd=tokens, **found)


async def test_of_two_with_one_request_id_the_first_gets_it_also_when_tried_again(url):
    async with storage(url) as opened:
        holds = [(hold(number, name), "me", 9.0) for number, name in enumerate(["a", "a", "b"])]
        for _ in range(2):  # the writer tries a group again
            assert await opened.database.write(lambda c: insert_holds(c, holds)) == ["taken", "used before", "taken"]
        assert len(await opened.holds()) == 2


async def test_a_request_that_has_a_row_gets_no_hold(url):
    async with storage(url) as opened:
        first = hold(1, "a")
        await opened.database.write(lambda c: insert_holds(c, [(first, "me", 9.0)]))
        await opened.database.write(lambda c: end_holds(c, [(row(first, 5), "me")]))
        again = [(hold(2, "a"), "me", 9.0), (hold(3, "b"), "me", 9.0)]
        assert await opened.database.write(lambda c: insert_holds(c, again)) == ["used before", "taken"]


async def test_rows_that_stand_stay_as_they_are(url):
    async with storage(url) as opened:
        one, two = hold(1, "a"), hold(2, "b")
        await opened.database.write(lambda c: insert_holds(c, [(one, "me", 9.0), (two, "me", 9.0)]))
        await opened.database.write(lambda c: end_holds(c, [(row(one, 5), "me")]))
        ended = await opened.database.write(
            lambda c: end_holds(c, [(row(one, 7), "me"), (row(two, 8), "me"), (row(two, 9), "me")])
        )
        assert [done.prompt_tokens for done in ended] == [5, 8, 8]
        assert [found["prompt_tokens"] for found in await opened.rows()] == [5, 8]
        assert await opened.holds() == []


async def test_operations_and_bulks_share_a_transaction(url):
    async with storage(url) as opened:
        ledger = opened.ledger

        async def live(number):
            taken = await ledger.reserve(wanted(f"r{number}"))
            return await ledger.settle(taken, Settlement(Usage(number, 0), "stop"))

        rows = await asyncio.gather(opened.writer.submit(nothing), *(live(number) for number in range(20)))
        assert [one.prompt_tokens for one in rows[1:]] == list(range(20))
        assert opened.writer.num_commits < 10


def nothing(connection):
    connection.exec_driver_sql("SELECT 1")
