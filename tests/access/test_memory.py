"""Limits in memory under many tasks at once, and what they learn from a real ledger."""

import asyncio

import pytest

from hitsend.core.errors import InsufficientQuota, InvalidRequest, LimitError, StorageFailed
from hitsend.core.limits import Level, Limits
from hitsend.core.request import Principal, Usage
from hitsend.serve.access.memory import MemoryQuota
from hitsend.serve.access.quota import Used
from hitsend.serve.database.connection import database_url
from hitsend.serve.usage.ledger import Settlement
from hitsend.serve.usage.report import Spending
from hitsend.testing import FakeClock
from tests.access.books import asking, org
from tests.usage.storage import QWEN, storage, wanted


class SlowSpent:
    """Answers when it is told to, or fails when it is told to."""

    def __init__(self, spent: int = 0) -> None:
        self.spent = spent
        self.asked: list[tuple[str, str]] = []
        self.go = asyncio.Event()
        self.fails = False

    async def spent_microusd(self, level: Level, since_day: str) -> int:
        self.asked.append((level.title, since_day))
        await self.go.wait()
        if self.fails:
            raise StorageFailed("the database is away")
        return self.spent


async def passed(quota: MemoryQuota, num: int, *levels: Level, **asked: object) -> list[bool]:
    async def one(number: int) -> bool:
        await asyncio.sleep(0)
        try:
            await quota.reserve(asking(f"r{number}", *levels, **asked))
        except LimitError:
            return False
        return True

    return await asyncio.gather(*(one(number) for number in range(num)))


@pytest.mark.parametrize(
    ("limits", "admits"),
    [
        ({"requests_per_minute": 37}, 37),
        ({"parallel_requests": 12}, 12),
        ({"input_tokens_per_minute": 299}, 29),
        ({"output_tokens_per_minute": 400}, 20),
        ({"usd_per_day_microusd": 149}, 29),
        ({"usd_per_month_microusd": 150, "requests_per_minute": 31}, 30),
    ],
)
async def test_of_500_at_once_exactly_as_many_pass_as_fit(limits, admits):
    spent = SlowSpent()
    quota = MemoryQuota(FakeClock(), spent)
    levels = (Level("global", (), Limits(requests_per_minute=10_000)), org(**limits), org("b", parallel_requests=400))
    running = asyncio.create_task(passed(quota, 500, *levels, tokens=(10, 20), held=5))
    await asyncio.sleep(0.01)
    spent.go.set()
    assert sum(await running) == admits
    assert quota.num_open == admits
    for number in range(500):
        await quota.settle(f"r{number}", Used(requests=0))
    assert quota.num_open == 0
    assert sum(await passed(quota, 500, *levels, tokens=(10, 20), held=5)) == admits


async def test_spending_is_asked_for_once_per_level_by_day_and_month():
    spent = SlowSpent(spent=30)
    quota = MemoryQuota(FakeClock(), spent)
    level = org(usd_per_day_microusd=100)
    running = asyncio.create_task(passed(quota, 20, level, org("free", requests_per_minute=99), held=10))
    await asyncio.sleep(0.01)
    spent.go.set()
    assert sum(await running) == 7
    assert spent.asked == [("org acme", "2023-11-01"), ("org acme", "2023-11-14")]


async def test_who_leaves_while_spending_is_read_takes_nothing_and_stops_nobody():
    spent = SlowSpent()
    quota = MemoryQuota(FakeClock(), spent)
    level = org(usd_per_day_microusd=100, parallel_requests=1)
    leaving = asyncio.create_task(quota.reserve(asking("a", level, held=1)))
    staying = asyncio.create_task(quota.reserve(asking("b", level, held=1)))
    await asyncio.sleep(0.01)
    leaving.cancel()
    await asyncio.wait({leaving})
    spent.go.set()
    assert (await staying).checks[0].value == 1
    assert quota.num_open == 1


async def test_spending_that_cannot_be_read_closes_the_budget_until_it_can():
    spent = SlowSpent()
    spent.fails = True
    spent.go.set()
    quota = MemoryQuota(FakeClock(), spent)
    with pytest.raises(StorageFailed):
        await quota.reserve(asking("a", org(usd_per_day_microusd=100), held=1))
    assert quota.num_open == 0
    spent.fails = False
    await quota.reserve(asking("a", org(usd_per_day_microusd=100), held=1))


async def test_waiting_as_long_as_told_is_enough_by_the_real_arithmetic_of_seconds():
    for step in range(200):
        clock = FakeClock(now=12_345.678_9 + step / 7)
        quota = MemoryQuota(clock, SlowSpent())
        level = org(output_tokens_per_minute=7_001 + step)
        await quota.reserve(asking("a", level, tokens=(0, 6_000)))
        clock.advance(0.1 + step / 1000)
        with pytest.raises(LimitError) as refused:
            await quota.reserve(asking("b", level, tokens=(0, 3_333 + step)))
        clock.advance(refused.value.retry_after_s)
        await quota.reserve(asking("b", level, tokens=(0, 3_333 + step)))


async def test_a_preview_takes_nothing_and_says_what_would_be_left():
    quota = MemoryQuota(FakeClock(), SlowSpent())
    level = org(requests_per_minute=5, parallel_requests=1)
    for _ in range(3):
        left = await quota.preview(asking("a", level))
        assert left.requests.remaining == 4
        assert [(check.name, check.value, check.limit) for check in left.checks] == [
            ("requests_per_minute", 1, 5),
            ("parallel_requests", 1, 1),
        ]
    await quota.reserve(asking("a", level))
    with pytest.raises(InvalidRequest):
        await quota.preview(asking("a", level))
    assert quota.num_open == 1


async def test_a_restart_forgets_no_spending_of_any_level(url):
    callers = {
        "ann": Principal("k1", "n", user="ann", app="bot", org="acme"),
        "bob": Principal("k2", "n", user="bob", app="bot", org="acme"),
        "eve": Principal("k3", "n", app="bot", org="evil"),
        "app-less": Principal("k4", "n", user="ann", org="acme"),
    }
    async with storage(url) as opened:
        cost = {}
        for number, (name, caller) in enumerate(callers.items()):
            hold = await opened.ledger.reserve(wanted(name, principal=caller, price=QWEN))
            cost[name] = (
                await opened.ledger.settle(hold, Settlement(Usage(1000 * (number + 1)), "stop"))
            ).cost_microusd
        await opened.ledger.reserve(wanted("still open", principal=callers["ann"]))
        spending = Spending(opened.database)
        expected = {
            Level("global", ()): sum(cost.values()),
            Level("org", ("acme",)): cost["ann"] + cost["bob"] + cost["app-less"],
            Level("app", ("acme", "bot")): cost["ann"] + cost["bob"],
            Level("app", ("evil", "bot")): cost["eve"],
            Level("user", ("acme", "bot", "ann")): cost["ann"],
            Level("user", ("acme", "", "ann")): cost["app-less"],
            Level("key", ("k2",)): cost["bob"],
            Level("key", ("unused",)): 0,
        }
        today = "2027-01-15"
        for level, spent in expected.items():
            assert await spending.spent_microusd(level, today) == spent
            assert await spending.spent_microusd(level, "2027-01-16") == 0
        quota = MemoryQuota(opened.clock, spending)
        ann = Level("user", ("acme", "bot", "ann"), Limits(usd_per_day_microusd=cost["ann"] + 10))
        await quota.reserve(asking("a", ann, held=10))
        with pytest.raises(InsufficientQuota):
            await quota.reserve(asking("b", ann, held=1))
        opened.clock.seconds += 86_400
        await quota.reserve(asking("b", ann, held=1))


async def test_a_ledger_that_is_away_is_said_so(tmp_path):
    async with storage(database_url(None, tmp_path)) as opened:
        async with opened.database.writing() as connection:
            await connection.exec_driver_sql("ALTER TABLE ledger RENAME TO elsewhere")
        with pytest.raises(StorageFailed, match="org acme"):
            await Spending(opened.database).spent_microusd(org(), "2027-01-15")
