"""What single scripts promise, called one by one: late calls, calls that come twice, and costs that the ledger has."""

import contextlib

import pytest

from hitsend.core.limits import Level
from hitsend.serve.access.quota import Used
from hitsend.serve.access.scripts import SCRIPTS
from hitsend.serve.access.valkey import _keys, _settle_args
from tests.access.books import SECOND, asking, org
from tests.access.quotas import HandClock, in_valkey

KEY = '{t}:level:["org","acme"]'
LEVEL = org(usd_per_day_microusd=1_000, parallel_requests=5, requests_per_minute=60)


class Spent:
    async def spent_microusd(self, level: Level, since_day: str) -> int:
        return 100


@contextlib.asynccontextmanager
async def gateway(server):
    clock = HandClock(server)
    async with in_valkey(server, Spent(), clock=clock, lease_s=1_000) as quota:
        yield quota, clock


def everything(server) -> dict[str, object]:
    keys = [key for key in server.client.keys("{t}:*") if key not in ("{t}:test-now", "{t}:latest")]
    return {key: server.client.hgetall(key) for key in keys}


@pytest.mark.parametrize("name", SCRIPTS)
async def test_a_call_that_comes_late_does_nothing(server, name):
    async with gateway(server) as (quota, clock):
        ask = asking("a", LEVEL, held=10)
        await quota.reserve(ask)
        before = everything(server)
        server.client.set("{t}:test-now", clock.us + 5 * SECOND + 1)  # one more than the call's time
        keys = _keys(quota._epoch, ask.levels)
        reply = await quota._scripts.call(name, quota._epoch, keys, ("a", 1, 1, 10, "1", 5, ""))
        assert (reply.word, everything(server)) == ("late", before)
        reply = await quota._scripts.call("renew", quota._epoch, keys[:1], (SECOND, "0"))
        assert reply.word == "ok"  # by now it knows the server's time
        await quota.reserve(asking("b", LEVEL, held=10))


async def test_each_cost_and_each_end_counts_once(server):
    async with gateway(server) as (quota, clock):
        ask = asking("a", LEVEL, held=10)
        await quota.reserve(ask)
        keys, epoch = _keys(quota._epoch, ask.levels), quota._epoch
        for number, spent in ((1, "105"), (1, "105"), (2, "110"), (1, "110"), (2, "110")):
            await quota._scripts.call("charge", epoch, keys, (number, 5, clock.us))
            assert server.client.hget(KEY, "sd") == spent
        words = []
        for _ in range(3):
            args = _settle_args(ask, Used(cost_microusd=7), None)
            words.append((await quota._scripts.call("settle", epoch, keys, args)).word)
            assert (server.client.hget(KEY, "sd"), server.client.hget(KEY, "run")) == ("117", "0")
        assert words == ["ok", "gone", "gone"]


async def test_what_the_ledger_was_read_for_later_is_not_added_again(server):
    async with gateway(server) as (quota, clock):
        before_us = clock.us
        clock.advance(1)
        first, second = asking("a", LEVEL, held=10), asking("b", LEVEL, held=10)
        await quota.reserve(first)  # now the ledger is read
        await quota.reserve(second)
        keys, epoch = _keys(quota._epoch, first.levels), quota._epoch
        await quota._scripts.call("charge", epoch, keys, (1, 5, before_us))
        await quota._scripts.call("settle", epoch, keys, _settle_args(first, Used(cost_microusd=5), before_us))
        assert server.client.hget(KEY, "sd") == "100"
        await quota._scripts.call("charge", epoch, keys, (2, 5, clock.us))
        await quota._scripts.call("settle", epoch, keys, _settle_args(second, Used(cost_microusd=5), clock.us))
        assert server.client.hget(KEY, "sd") == "110"


async def test_spending_is_taken_over_once_and_only_from_who_read_it_last(server):
    async with gateway(server) as (quota, clock):
        keys, day = _keys(quota._epoch, (LEVEL,)), clock.us // 86_400_000_000
        ask = ("a", 0, 0, 1, "1", 60, "", "", 5, "", 1_000, "")
        first = (await quota._scripts.call("reserve", quota._epoch, keys, ask)).rest[0]
        again = (await quota._scripts.call("reserve", quota._epoch, keys, ask)).rest[0]
        assert first == again == [0, day, clock.us]
        clock.advance(61)
        later = (await quota._scripts.call("reserve", quota._epoch, keys, ask)).rest[0]
        assert later == [0, day, clock.us]  # who was told first is given up
        words = []
        for mark in (first[2], later[2], later[2]):
            words.append((await quota._scripts.call("seed", quota._epoch, keys, (mark, day, 30, 40))).word)
        assert words == ["stale", "ok", "stale"]
        assert (server.client.hget(KEY, "sd"), server.client.hget(KEY, "sm")) == ("30", "40")


async def test_a_cost_that_comes_while_the_ledger_is_read_is_not_lost(server):
    async with gateway(server) as (quota, clock):
        ask = asking("a", org(parallel_requests=5), held=10)
        await quota.reserve(ask)
        keys, day = _keys(quota._epoch, ask.levels), clock.us // 86_400_000_000
        budget = ("b", 0, 0, 1, "0", "", "", "", 5, "", 1_000, "")
        reply = await quota._scripts.call("reserve", quota._epoch, keys, budget)
        await quota.settle("a", Used(cost_microusd=9))
        await quota._scripts.call("seed", quota._epoch, keys, (reply.rest[0][2], day, 30, 40))
        assert (server.client.hget(KEY, "sd"), server.client.hget(KEY, "sm")) == ("39", "49")
