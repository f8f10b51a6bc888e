"""Random lives of the limits, in memory and on a real server side by side: the same verdicts, word for word."""

import random

import pytest

from hitsend.core.errors import ServeError
from hitsend.core.limits import MAX_PER_MINUTE, Level, Limits, RateWindows
from hitsend.serve.access.limits import DAY_US, day_text
from hitsend.serve.access.memory import MemoryQuota
from hitsend.serve.access.quota import Used
from tests.access.books import MINUTE, SECOND, Life, asking
from tests.access.quotas import HandClock, in_valkey


class Ledger:
    """What was settled, by level and day: what both quotas are told."""

    def __init__(self) -> None:
        self.rows: list[tuple[Level, str, int]] = []

    async def spent_microusd(self, level: Level, since_day: str) -> int:
        return sum(cost for of, day, cost in self.rows if of.key == level.key and day >= since_day)


def _parts(said: object) -> list[object]:
    """So that a failure shows what is different."""
    return [*said.checks, said] if isinstance(said, RateWindows) else [said]


class Twins:
    """Each operation on both quotas."""

    def __init__(self, seed: int, clock: HandClock, quotas: tuple) -> None:
        self.random = random.Random(seed)
        self.clock = clock
        self.quotas = quotas
        self.ledger: Ledger = quotas[0]._spent
        self.levels = Life(seed, num_levels=10).levels
        self.open: dict[str, object] = {}
        self.num = self.passed = self.refused = 0

    async def both(self, method: str, *args: object) -> object:
        said = []
        for quota in self.quotas:
            try:
                said.append(await getattr(quota, method)(*args))
            except ServeError as error:
                said.append((type(error), error.message, error.retry_after_s, getattr(error, "windows", None)))
        assert _parts(said[0]) == _parts(said[1]), (method, args)
        return said[0]

    def pass_time(self) -> None:
        """Only on: after a step back, a level that a book forgot waits longer than one that a server still knows."""
        draw = self.random
        us = self.clock.us + draw.choice((0, 1, draw.randrange(SECOND), draw.randrange(10 * SECOND)))
        if draw.random() < 0.01:
            us += draw.randrange(2 * DAY_US)
        self.clock.set(us)

    async def step(self) -> None:
        draw = self.random
        self.pass_time()
        if self.open and draw.random() < 0.45:
            await self.settle(draw.choice(tuple(self.open)))
            return
        self.num += 1
        levels = tuple(draw.sample(self.levels, 4))
        tokens = (draw.randrange(900), draw.randrange(600))
        ask = asking(f"r{self.num}", *levels, tokens=tokens, held=draw.randrange(90))
        if draw.random() < 0.2:
            await self.both("preview", ask)
            return
        said = await self.both("reserve", ask)
        if isinstance(said, tuple):
            self.refused += 1
        else:
            self.passed += 1
            self.open[ask.request_id] = ask

    async def settle(self, request_id: str) -> None:
        draw, ask = self.random, self.open.pop(request_id)
        most = (ask.input_tokens + 50, ask.output_tokens + 50, ask.held_microusd + 5)  # a debt now and then
        used = Used(*(draw.randint(0, each) for each in most)) if draw.random() < 0.95 else Used(requests=0)
        self.ledger.rows += [(level, day_text(self.clock.us // DAY_US), used.cost_microusd) for level in ask.levels]
        await self.both("settle", request_id, used)


async def live_both(server, seed: int, num: int) -> None:
    clock, ledger = HandClock(server), Ledger()
    async with in_valkey(server, ledger, clock=clock, lease_s=100 * 86_400.0) as quota:
        twins = Twins(seed, clock, (MemoryQuota(clock, ledger), quota))
        for _ in range(num):
            await twins.step()
        while twins.open:
            await twins.settle(next(iter(twins.open)))
        for number, level in enumerate(twins.levels):
            await twins.both("preview", asking(f"end{number}", level, tokens=(1, 1), held=1))
        assert twins.passed > num / 50
        assert twins.refused > num / 50
        assert quota.num_open == 0
        for key in server.client.keys("{t}:level:*"):
            held = server.client.hgetall(key)
            assert (held["run"], held["held"]) == ("0", "0")
            assert not [name for name in held if name.startswith(("R:", "H:"))]


@pytest.mark.parametrize("seed", range(3))
async def test_random_operations_get_the_same_verdicts_in_memory_and_on_a_server(server, seed):
    await live_both(server, seed, 300)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 14))
async def test_ten_thousand_random_operations_get_the_same_verdicts(server, seed):
    await live_both(server, seed, 2_500)


async def test_the_largest_numbers_get_the_same_verdicts_and_stay_exact(server):
    clock, ledger = HandClock(server), Ledger()
    most, rich = MAX_PER_MINUTE, 10**15
    rates = ("requests_per_minute", "input_tokens_per_minute", "output_tokens_per_minute")
    levels = (
        Level("global", (), Limits(**dict.fromkeys(rates, most), usd_per_day_microusd=rich)),
        Level("org", ("o",), Limits(**dict.fromkeys(rates, most - 1), usd_per_month_microusd=rich - 1)),
        Level("key", ("k",), Limits(input_tokens_per_minute=most, tokens_per_request=most)),
        Level("user", ("", "", "slow"), Limits(output_tokens_per_minute=7)),
    )
    async with in_valkey(server, ledger, clock=clock, lease_s=3_000 * 86_400.0) as quota:
        twins = Twins(1, clock, (MemoryQuota(clock, ledger), quota))
        draw = twins.random
        sizes = (0, 1, 6, 7, most // 3, most - 2, most - 1, most, most + 1, 2**53)
        moneys = (0, 1, rich // 3, rich - 1, rich, rich + 1, 10**20)
        for number in range(250):
            clock.set(clock.us + draw.choice((0, 1, 599_999, MINUTE - 1, MINUTE, DAY_US, 400 * DAY_US)))
            chosen = tuple(draw.sample(levels, draw.randint(1, 4)))
            tokens = (draw.choice(sizes), draw.choice(sizes))
            ask = asking(f"r{number}", *chosen, tokens=tokens, held=draw.choice(moneys))
            if not isinstance(await twins.both("reserve", ask), tuple):
                twins.open[ask.request_id] = ask
                if draw.random() < 0.5:
                    await twins.settle(ask.request_id)
            for key in server.client.keys("{t}:level:*"):
                assert all(0 <= int(value) < 2**53 for value in server.client.hgetall(key).values())
