"""What every `Quota` must do, in memory and on a real server: many tasks at once, and what they learn from a ledger."""

import asyncio

import pytest

from hitsend.core.errors import InvalidRequest, LimitError, StorageFailed
from hitsend.core.limits import Level, Limits
from hitsend.serve.access.quota import Quota, Used
from tests.access.books import asking, org
from tests.access.quotas import opened


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


async def passed(quota: Quota, num: int, *levels: Level, **asked: object) -> list[bool]:
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
async def test_of_500_at_once_exactly_as_many_pass_as_fit(kind, server_of_kind, limits, admits):
    spent = SlowSpent()
    async with opened(kind, server_of_kind, spent) as (quota, _):
        everyone = Level("global", (), Limits(requests_per_minute=10_000))
        levels = (everyone, org(**limits), org("b", parallel_requests=400))
        running = asyncio.create_task(passed(quota, 500, *levels, tokens=(10, 20), held=5))
        await asyncio.sleep(0.01)
        spent.go.set()
        assert sum(await running) == admits
        assert quota.num_open == admits
        await asyncio.gather(*(quota.settle(f"r{number}", Used(requests=0)) for number in range(500)))
        assert quota.num_open == 0
        assert sum(await passed(quota, 500, *levels, tokens=(10, 20), held=5)) == admits


async def test_spending_is_asked_for_once_per_level_by_day_and_month(kind, server_of_kind):
    spent = SlowSpent(spent=30)
    async with opened(kind, server_of_kind, spent) as (quota, _):
        level = org(usd_per_day_microusd=100)
        running = asyncio.create_task(passed(quota, 20, level, org("free", requests_per_minute=99), held=10))
        while not spent.asked:
            await asyncio.sleep(0.01)
        spent.go.set()
        assert sum(await running) == 7
        assert spent.asked == [("org acme", "2027-01-01"), ("org acme", "2027-01-15")]


async def test_who_leaves_while_spending_is_read_takes_nothing_and_stops_nobody(kind, server_of_kind):
    spent = SlowSpent()
    async with opened(kind, server_of_kind, spent) as (quota, _):
        level = org(usd_per_day_microusd=100, parallel_requests=1)
        leaving = asyncio.create_task(quota.reserve(asking("a", level, held=1)))
        while not spent.asked:
            await asyncio.sleep(0.01)
        leaving.cancel()
        await asyncio.wait({leaving})
        spent.go.set()
        await _soon(quota, asking("b", level, held=1))
        assert quota.num_open == 1


async def _soon(quota: Quota, ask: object) -> None:
    """Take it as soon as what another one has let go is free."""
    for _ in range(200):
        try:
            await quota.reserve(ask)
        except LimitError:
            await asyncio.sleep(0.01)
        else:
            return
    raise AssertionError("what was let go is not free")


async def test_spending_that_cannot_be_read_closes_the_budget_until_it_can(kind, server_of_kind):
    spent = SlowSpent()
    spent.fails = True
    spent.go.set()
    async with opened(kind, server_of_kind, spent) as (quota, _):
        with pytest.raises(StorageFailed):
            await quota.reserve(asking("a", org(usd_per_day_microusd=100), held=1))
        assert quota.num_open == 0
        spent.fails = False
        await quota.reserve(asking("a", org(usd_per_day_microusd=100), held=1))


async def test_waiting_as_long_as_told_is_enough_by_the_real_arithmetic_of_seconds(kind, server_of_kind):
    async with opened(kind, server_of_kind, SlowSpent()) as (quota, clock):
        for step in range(50):
            level = org(f"o{step}", output_tokens_per_minute=7_001 + step)
            await quota.reserve(asking(f"a{step}", level, tokens=(0, 6_000)))
            clock.advance(0.1 + step / 1000)
            with pytest.raises(LimitError) as refused:
                await quota.reserve(asking(f"b{step}", level, tokens=(0, 3_333 + step)))
            clock.advance(refused.value.retry_after_s)
            await quota.reserve(asking(f"b{step}", level, tokens=(0, 3_333 + step)))


async def test_a_preview_takes_nothing_and_says_what_would_be_left(kind, server_of_kind):
    async with opened(kind, server_of_kind, SlowSpent()) as (quota, _):
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


async def test_a_refusal_on_one_level_changes_nothing_on_the_others(kind, server_of_kind):
    async with opened(kind, server_of_kind, SlowSpent()) as (quota, _):
        wide, narrow = org("wide", requests_per_minute=9, parallel_requests=9), org("narrow", parallel_requests=1)
        await quota.reserve(asking("a", wide, narrow))
        before = await quota.preview(asking("p", wide))
        for number in range(20):
            with pytest.raises(LimitError, match="parallel_requests of org narrow is 1"):
                await quota.reserve(asking(f"b{number}", wide, narrow))
        assert await quota.preview(asking("p", wide)) == before


async def test_what_was_not_used_comes_back_and_a_debt_is_paid(kind, server_of_kind):
    async with opened(kind, server_of_kind, SlowSpent()) as (quota, clock):
        level = org(input_tokens_per_minute=600, output_tokens_per_minute=600)
        await quota.reserve(asking("a", level, tokens=(500, 600)))
        await quota.settle("a", Used(100, 700))
        await quota.settle("a", Used(0, 0))  # it has ended
        left = await quota.preview(asking("b", level, tokens=(500, 0)))
        assert (left.input_tokens.remaining, left.output_tokens.remaining) == (0, 0)
        with pytest.raises(LimitError) as refused:
            await quota.reserve(asking("b", level, tokens=(0, 1)))
        assert refused.value.retry_after_s == 10.1
        clock.advance(10.1)
        await quota.reserve(asking("b", level, tokens=(0, 1)))


async def test_a_clock_that_is_wrong_by_five_seconds_or_steps_back_gives_no_token_twice(kind, server_of_kind):
    async with opened(kind, server_of_kind, SlowSpent()) as (quota, clock):
        start_us, level = clock.us, org(requests_per_minute=60)

        async def passed_at(seconds: float) -> int:
            clock.set(start_us + seconds * 1_000_000)
            count = 0
            while True:
                try:
                    await quota.reserve(asking(f"{seconds}-{count}-{quota.num_open}", level))
                except LimitError:
                    return count
                count += 1

        assert await passed_at(0) == 60
        assert [await passed_at(seconds) for seconds in (5, -5, 5, 0, 5, -5, 5)] == [5, 0, 0, 0, 0, 0, 0]
        assert [await passed_at(seconds) for seconds in (-25, -20, -1, 4, 5, 6)] == [0, 0, 0, 0, 0, 1]


async def test_a_wall_clock_that_steps_back_over_midnight_spends_no_day_twice(kind, server_of_kind):
    spent = SlowSpent()
    spent.go.set()
    async with opened(kind, server_of_kind, spent) as (quota, clock):
        midnight_us = (clock.us // 86_400_000_000 + 1) * 86_400_000_000
        level = org(usd_per_day_microusd=100)
        clock.set(midnight_us - 1)
        await quota.reserve(asking("a", level, held=100))
        await quota.settle("a", Used(cost_microusd=100))
        with pytest.raises(LimitError) as refused:
            await quota.reserve(asking("b", level, held=1))
        assert refused.value.retry_after_s == 0.000_001
        clock.set(midnight_us)
        await quota.reserve(asking("b", level, held=100))
        await quota.settle("b", Used(cost_microusd=100))
        for seconds in (-30, -1, 0, 29):
            clock.set(midnight_us + seconds * 1_000_000)
            with pytest.raises(LimitError):
                await quota.reserve(asking("c", level, held=1))
