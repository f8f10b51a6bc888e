"""The table of keys: one claim at a time, whoever asks and however the first one ends."""

import asyncio

import pytest
from sqlalchemy import select, update

from hitsend.core.errors import IdempotencyConflict, IdempotencyMismatch
from hitsend.serve.database.schema import IDEMPOTENCY
from hitsend.serve.usage.idempotency import Asked, Claim, IdempotencyStore, Kept
from hitsend.settings import UsageSettings
from tests.usage.storage import storage

DEAD = "elsewhere"
"""An owner of which nothing is known: its lease decides."""


def asked(request_id="r", *, scope="k", key="key", body_hash="h"):
    return Asked(scope, key, body_hash, request_id)


def store_of(opened, *, owner="me", **settings):
    return IdempotencyStore(opened.writer, opened.clock, UsageSettings(**settings), owner)


@pytest.fixture
async def opened(url):
    async with storage(url) as opened:
        yield opened


async def rows(opened):
    async with opened.database.reading() as connection:
        return [dict(row) for row in (await connection.execute(select(IDEMPOTENCY))).mappings()]


async def test_first_works_then_everybody_gets_its_answer(opened):
    store = store_of(opened)
    claim = await store.claim(asked("first"))
    assert isinstance(claim, Claim)
    with pytest.raises(IdempotencyConflict, match="still running, as first") as refused:
        await store.claim(asked("second"))
    assert refused.value.retry_after_s == 1
    with pytest.raises(IdempotencyMismatch):
        await store.claim(asked("other", body_hash="x"))
    answer = Kept("first", 200, "application/json", b'{"a": 1}' * 1000)
    await store.keep(claim, answer)
    assert await store.claim(asked("third")) == answer
    with pytest.raises(IdempotencyMismatch):
        await store.claim(asked("other", body_hash="x"))
    for free in (asked(scope="another caller", body_hash="x"), asked(key="another key", body_hash="x")):
        assert isinstance(await store.claim(free), Claim)


async def test_a_freed_key_can_be_claimed_again(opened):
    store = store_of(opened)
    claim = await store.claim(asked())
    await store.release(claim)
    assert await rows(opened) == []
    again = await store.claim(asked(body_hash="x"))
    await store.release(claim)
    await store.keep(claim, Kept("late", 200, "t", b""))
    with pytest.raises(IdempotencyMismatch):
        await store.claim(asked())
    assert isinstance(again, Claim)


async def test_a_kept_answer_is_not_freed(opened):
    store = store_of(opened)
    claim = await store.claim(asked())
    await store.keep(claim, Kept("r", 200, "t", b"x"))
    await store.release(claim)
    assert (await store.claim(asked())).body == b"x"


async def test_of_many_at_once_on_two_gateways_one_works(opened, url):
    async with storage(url, opened.clock) as other:
        stores = [store_of(opened, owner="one"), store_of(other, owner="two")]
        for key in ("a", "b", "c"):
            asking = (stores[n % 2].claim(asked(f"r{n}", key=key)) for n in range(50))
            got = await asyncio.gather(*asking, return_exceptions=True)
            assert sum(isinstance(one, Claim) for one in got) == 1
            assert sum(isinstance(one, IdempotencyConflict) for one in got) == 49


async def test_a_claim_of_a_dead_gateway_is_free_after_its_lease_and_a_living_one_s_is_not(opened):
    lost, living, store = store_of(opened, owner=DEAD), store_of(opened), store_of(opened, owner="third")
    await lost.claim(asked(key="lost"))
    await living.claim(asked(key="living"))
    for _ in range(10):
        opened.clock.seconds += 10.1
        await living.tend()
    with pytest.raises(IdempotencyConflict):
        await store.claim(asked(key="living"))
    assert isinstance(await store.claim(asked(key="lost")), Claim)


async def test_a_claim_of_a_process_that_is_surely_dead_is_free_at_once(opened):
    store = store_of(opened)
    await store.claim(asked())
    gone = opened.ledger.owner.split(":")
    gone[2:4] = ["4194999", "1"]
    await opened.database.write(lambda c: c.execute(update(IDEMPOTENCY).values(owner=":".join(gone))))
    assert isinstance(await store.claim(asked()), Claim)


async def test_somebody_who_stops_waiting_leaves_no_claim(opened):
    store = store_of(opened)
    waiting = asyncio.create_task(store.claim(asked()))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert isinstance(await store.claim(asked(body_hash="x")), Claim)


async def test_an_answer_is_kept_though_nobody_waits_for_it(opened):
    store = store_of(opened)
    claim = await store.claim(asked())
    store.keep(claim, Kept("r", 200, "t", b"x" * 100_000))
    await store.stop()
    assert (await store.claim(asked())).body == b"x" * 100_000


async def test_answers_end_with_their_day(opened):
    store = store_of(opened, idempotency_s=100.0)
    claim = await store.claim(asked())
    await store.keep(claim, Kept("r", 200, "t", b"x"))
    await store.tend()
    opened.clock.seconds += 99
    assert isinstance(await store.claim(asked()), Kept)
    opened.clock.seconds += 2
    assert isinstance(await store.claim(asked(body_hash="x")), Claim)
    await store.claim(asked(key="running"))
    opened.clock.seconds += 20
    await store.tend()
    opened.clock.seconds += 90
    await store.tend()
    assert len(await rows(opened)) == 2, "running requests keep their keys however old they are"


@pytest.mark.slow
async def test_old_keys_are_deleted_in_steps(opened):
    store = store_of(opened, idempotency_s=100.0)
    for number in range(1005):
        opened.clock.seconds += 0.01
        claim = await store.claim(asked(key=f"k{number}"))
        store.keep(claim, Kept("r", 200, "t", b"x"))
    opened.clock.seconds += 95
    await store.claim(asked(key="new"))
    opened.clock.seconds += 20
    await store.tend()
    assert [row["idempotency_key"] for row in await rows(opened)] == ["new"]


async def test_what_is_too_large_is_remembered_without_its_answer(opened):
    store = store_of(opened)
    await store.keep(await store.claim(asked("big")), None)
    with pytest.raises(IdempotencyConflict, match="billed once, as big, but its answer was too large"):
        await store.claim(asked())
    with pytest.raises(IdempotencyMismatch):
        await store.claim(asked(body_hash="x"))


async def test_all_answers_together_have_a_bound(opened):
    store = store_of(opened, idempotency_total_bytes=100)
    kept = 0
    for number in range(20):
        claim = await store.claim(asked(key=f"k{number}"))
        await store.keep(claim, Kept("r", 200, "t", bytes([number, *range(8)])))
    for row in await rows(opened):
        kept += row["body"] is not None
        assert row["num_bytes"] == len(row["body"] or b"")
    assert 2 <= kept <= 6
    assert sum(row["num_bytes"] for row in await rows(opened)) <= 100
    opened.clock.seconds += 86_401
    await store.tend()
    await store.keep(await store.claim(asked(key="k19")), Kept("r", 200, "t", b"x"))
    assert (await store.claim(asked(key="k19"))).body == b"x"
