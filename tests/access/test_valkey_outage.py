"""A server of limits that is paused, killed, emptied and restarted, and gateways that die: real ones, by signals."""

import asyncio
import time
from collections.abc import Callable

import pytest

from hitsend.core.errors import LimitError, StorageFailed
from hitsend.core.limits import Level
from hitsend.serve.access.outage import UnreachablePolicy
from hitsend.serve.access.quota import Used
from hitsend.serve.access.valkey import ValkeyQuota
from tests.access.books import asking, org
from tests.access.quotas import HandClock, in_valkey
from tests.access.valkey_server import Server

pytestmark = pytest.mark.slow  # waits for sockets or processes, or tries very many examples

OPEN = UnreachablePolicy("open", "open")
CLOSED = UnreachablePolicy("closed", "closed")
KEY = '{t}:level:["org","acme"]'


class Ledger:
    """Every cost, from the moment at which a request ended."""

    def __init__(self) -> None:
        self.total = 0
        self.num_read = 0

    async def spent_microusd(self, level: Level, since_day: str) -> int:
        self.num_read += 1
        return self.total

    async def settle(self, quota: ValkeyQuota, request_id: str, cost: int) -> None:
        """As an account does it: first the row, then the limits."""
        self.total += cost
        await quota.settle(request_id, Used(cost_microusd=cost))


async def until(is_so: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "it never came to that"
        await asyncio.sleep(0.01)


def level_of(server: Server) -> dict[str, str]:
    return server.client.hgetall(KEY)


@pytest.mark.parametrize("policy", [OPEN, CLOSED, UnreachablePolicy()])
async def test_each_kind_of_limit_is_open_or_closed_while_the_server_hangs(own_server, policy):
    async with in_valkey(own_server, Ledger(), timeout_s=0.3, policy=policy) as quota:
        rated, budgeted = org("rated", requests_per_minute=5), org("budgeted", usd_per_day_microusd=100)
        await quota.reserve(asking("before", rated, budgeted, held=1))
        own_server.pause()
        passed = {}
        for name, level in (("rates", rated), ("budgets", budgeted), ("neither", org("x", tokens_per_request=50))):
            passed[name] = 0
            for number in range(8):
                try:
                    await quota.reserve(asking(f"{name}{number}", level, tokens=(1, 1), held=1))
                    passed[name] += 1
                except StorageFailed as error:
                    assert error.retry_after_s >= 1
                    assert f"limits of org {'rated' if name == 'rates' else 'budgeted'}" in error.message
                except LimitError as error:
                    assert "requests_per_minute of org rated is 5" in error.message
        is_open = {"rates": policy.rates == "open", "budgets": policy.budgets == "open"}
        assert passed == {"rates": 5 * is_open["rates"], "budgets": 8 * is_open["budgets"], "neither": 8}
        health = quota.health()
        assert (health.is_up, health.num_outages) == (False, 1)
        assert health.num_unchecked == sum(passed.values())
        assert health.num_refused == 8 * (not is_open["rates"]) + 8 * (not is_open["budgets"])
        own_server.resume()
        await until(lambda: quota.health().is_up)
        await quota.reserve(asking("after", rated, budgeted, held=1))


async def test_what_ended_while_the_server_hung_is_told_once_and_nothing_stays_held(own_server):
    ledger, level = Ledger(), org(usd_per_day_microusd=10_000, parallel_requests=50, output_tokens_per_minute=1_000)
    async with in_valkey(own_server, ledger, timeout_s=0.3, policy=OPEN) as quota:
        for number in range(20):
            await quota.reserve(asking(f"r{number}", level, tokens=(0, 10), held=100))
        own_server.pause()
        trying = [
            asyncio.create_task(quota.reserve(asking(f"lost{n}", level, tokens=(0, 10), held=7))) for n in range(5)
        ]
        for number in range(10):
            await ledger.settle(quota, f"r{number}", 11)
        await asyncio.gather(*trying)  # counted here
        for number in range(3):
            await ledger.settle(quota, f"lost{number}", 11)
        own_server.resume()  # it now finds what was sent before: too late
        await until(lambda: quota.health().is_up)
        held = level_of(own_server)
        assert (held["run"], held["held"], held["sd"], held["sm"]) == ("10", "1000", "143", "143")
        for number in range(10, 20):
            await ledger.settle(quota, f"r{number}", 11)
        for number in (3, 4):
            await ledger.settle(quota, f"lost{number}", 11)
        await until(lambda: level_of(own_server)["sd"] == "275")
        assert quota.num_open == 0
        assert (level_of(own_server)["run"], level_of(own_server)["held"]) == ("0", "0")
        assert ledger.total == 275
        assert ledger.num_read == 2


async def test_a_server_that_was_killed_and_comes_back_empty_learns_spending_and_what_runs(own_server):
    ledger, level = Ledger(), org(usd_per_day_microusd=10_000, parallel_requests=12)
    async with in_valkey(own_server, ledger, timeout_s=0.3, policy=OPEN) as quota:
        for number in range(10):
            await quota.reserve(asking(f"r{number}", level, held=100))
        await ledger.settle(quota, "r0", 50)
        own_server.kill()
        await ledger.settle(quota, "r1", 50)
        await quota.reserve(asking("meanwhile", level, held=100))
        await ledger.settle(quota, "meanwhile", 50)
        own_server.start()
        await until(lambda: quota.health().is_up)
        assert level_of(own_server)["run"] == "8"
        await quota.reserve(asking("s0", level, held=100))
        assert {name: level_of(own_server)[name] for name in ("sd", "sm", "run", "held")} == {
            "sd": "150",
            "sm": "150",
            "run": "9",
            "held": "900",
        }
        for number in range(1, 4):
            await quota.reserve(asking(f"s{number}", level, held=100))
        with pytest.raises(LimitError, match="parallel_requests of org acme is 12"):
            await quota.reserve(asking("s4", level, held=100))
        for number in range(2, 10):
            await ledger.settle(quota, f"r{number}", 50)
        for number in range(4):
            await ledger.settle(quota, f"s{number}", 50)
        assert int(level_of(own_server)["sd"]) == ledger.total == 750
        assert (level_of(own_server)["run"], level_of(own_server)["held"]) == ("0", "0")


@pytest.mark.parametrize("is_killed", [False, True])
async def test_a_server_that_goes_away_under_load_lets_one_more_window_pass_at_most(own_server, is_killed):
    ledger, level = Ledger(), org(requests_per_minute=60, usd_per_day_microusd=10**9)
    started, passed = time.monotonic(), 0
    async with in_valkey(own_server, ledger, timeout_s=0.3, policy=OPEN) as quota:

        async def client(name: int) -> None:
            nonlocal passed
            for number in range(60):
                request_id = f"{name}-{number}"
                try:
                    await quota.reserve(asking(request_id, level, held=3))
                except LimitError:
                    await asyncio.sleep(0.02)
                    continue
                passed += 1
                await asyncio.sleep(0.01)
                await ledger.settle(quota, request_id, 3)

        running = [asyncio.create_task(client(name)) for name in range(20)]
        await until(lambda: passed >= 20)
        if is_killed:
            own_server.kill()
        else:
            own_server.pause()
        await until(lambda: quota.health().num_unchecked > 0)
        await asyncio.sleep(0.3)
        if is_killed:
            own_server.start()
        else:
            own_server.resume()
        await asyncio.gather(*running)
        await until(lambda: quota.health().is_up)
        windows = 3 if is_killed else 2  # the server's, this gateway's own, and the emptied server's
        assert 60 < passed <= 60 * windows + (time.monotonic() - started) * windows
        await quota.preview(asking("look", org(usd_per_day_microusd=10**9), held=1))
        # never less than the ledger; what was settled in the moment in which it was read may be counted twice
        assert ledger.total <= int(level_of(own_server)["sd"]) <= ledger.total + (60 if is_killed else 0)
        assert (level_of(own_server)["run"], level_of(own_server)["held"], quota.num_open) == ("0", "0", 0)


async def test_what_a_dead_gateway_held_comes_back_with_its_lease_but_its_tokens_only_by_refill(server):
    clock = HandClock(server)
    level = org(parallel_requests=2, usd_per_day_microusd=100, output_tokens_per_minute=60)
    async with in_valkey(server, Ledger(), clock=clock, lease_s=30) as living:
        async with in_valkey(server, Ledger(), clock=clock, lease_s=30) as dying:
            await dying.reserve(asking("a", level, tokens=(0, 20), held=50))
            await dying.reserve(asking("b", level, tokens=(0, 20), held=50))
        clock.advance(10)
        await living._look()
        clock.advance(19)
        await living._look()
        with pytest.raises(LimitError):
            await living.reserve(asking("c", level, held=50))
        clock.advance(1)
        left = await living.reserve(asking("c", level, tokens=(0, 20), held=50))
        assert left.output_tokens.remaining == 60 - (40 - 30) - 20
        await living.reserve(asking("d", level, held=50))
        assert living.num_open == 2


async def test_a_gateway_whose_lease_ended_while_it_slept_holds_again_what_it_runs(server):
    clock, ledger, level = HandClock(server), Ledger(), org(parallel_requests=2, usd_per_day_microusd=100)
    async with (
        in_valkey(server, ledger, clock=clock, lease_s=30) as sleeping,
        in_valkey(server, ledger, clock=clock, lease_s=30) as other,
    ):
        await sleeping.reserve(asking("a", level, held=10))
        clock.advance(20)
        await other._look()
        clock.advance(20)
        await other.reserve(asking("b", level, held=10))
        assert level_of(server)["run"] == "1"
        await sleeping._look()
        assert (level_of(server)["run"], level_of(server)["held"]) == ("2", "20")
        await ledger.settle(sleeping, "a", 5)
        await ledger.settle(other, "b", 5)
        assert {name: level_of(server)[name] for name in ("run", "held", "sd")} == {"run": "0", "held": "0", "sd": "10"}


async def test_an_emptied_server_gets_no_tokens_back_that_it_never_gave(server):
    ledger, level = Ledger(), org(output_tokens_per_minute=60)
    async with in_valkey(server, ledger, clock=HandClock(server)) as quota:
        await quota.reserve(asking("a", level, tokens=(0, 50)))
        now = server.client.get("{t}:test-now")
        server.client.flushall()
        server.client.set("{t}:test-now", now)
        await quota.reserve(asking("b", level, tokens=(0, 50)))
        await quota.settle("a", Used(0, 0))
        assert (await quota.preview(asking("p", level))).output_tokens.remaining == 10
        await quota.settle("b", Used(0, 0))
        assert (await quota.preview(asking("p", level))).output_tokens.remaining == 60


async def test_who_leaves_while_it_is_reserved_holds_nothing(server):
    level = org(parallel_requests=500, requests_per_minute=500)
    async with in_valkey(server, Ledger(), clock=HandClock(server)) as quota:
        for turn in range(30):
            task = asyncio.create_task(quota.reserve(asking(f"r{turn}", level)))
            for _ in range(turn % 10):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait({task})
            if not task.cancelled():
                await quota.settle(f"r{turn}", Used(requests=0))
        await until(lambda: quota.num_open == 0 and level_of(server).get("run", "0") == "0")
        assert (await quota.preview(asking("p", level))).requests.remaining == 499


async def test_levels_vanish_when_nobody_uses_them(server):
    async with in_valkey(server, Ledger()) as quota:
        await quota.reserve(asking("a", org(requests_per_minute=5)))
        assert server.client.pttl(KEY) > 86_400_000  # as long as it runs
        await quota.settle("a", Used())
        assert 0 < server.client.pttl(KEY) <= 86_400_000 + 12_000


async def test_a_gateway_starts_without_its_server_and_finds_it_later(own_server):
    own_server.kill()
    level = org(usd_per_day_microusd=100)
    async with in_valkey(own_server, Ledger(), timeout_s=0.3) as quota:
        with pytest.raises(StorageFailed):
            await quota.reserve(asking("a", level, held=1))
        own_server.start()
        await until(lambda: quota.health().is_up)
        await quota.reserve(asking("a", level, held=1))
        assert quota.health().num_outages == 1
