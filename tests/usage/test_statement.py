import asyncio
from datetime import date

import msgspec
import pytest

from hitsend.core.request import Principal, Usage
from hitsend.serve.usage.allowance import MICRONEURONS
from hitsend.serve.usage.ledger import Settlement
from hitsend.serve.usage.pricing import Price
from hitsend.serve.usage.reconcile import reconcile
from hitsend.serve.usage.report import Totals
from hitsend.serve.usage.statement import GROUPS, Statement, page_of_rows, statement, stream_rows
from tests.usage.storage import QWEN, storage, wanted

DAY_S = 86_400.0
NEURON = Price("n", 11 * MICRONEURONS, 11 * MICRONEURONS, in_neurons=True)
"""A neuron per token."""
ODD = Price("odd", 40_909 * 11, 290_909 * 11, in_neurons=True)


async def use(opened, request_id, usage, **changes):
    hold = await opened.ledger.reserve(wanted(request_id, input_tokens=1, output_tokens=1, **changes))
    return await opened.ledger.settle(hold, Settlement(usage, "stop"))


async def fill(opened, num_rows=30):
    """Rows of two organisations with applications of the same name, two prices and four days."""
    for number in range(num_rows):
        caller = Principal(key_id=f"k{number % 5}", name=f"n{number % 5}", app="a", org=("o", "p")[number % 2])
        usage = Usage(1_000 + number, 10 + number, number, 3)
        price = ODD if number % 3 == 0 else QWEN
        await use(opened, f"r{number}", usage, principal=caller, model=f"m{number % 4}", price=price)
        opened.clock.seconds += DAY_S / 8


@pytest.mark.parametrize("by", GROUPS)
async def test_parts_rows_and_totals_are_the_same_sum(url, by):
    async with storage(url) as opened:
        await fill(opened)
        found = await statement(opened.database, by)
        rows = [numbered.row async for numbered in stream_rows(opened.database)]
        assert len(rows) == 30
        for name in Totals.__struct_fields__[1:-1]:
            total = getattr(found.totals, name)
            assert total == sum(getattr(row, name) for row in rows)
            assert total == sum(getattr(part.totals, name) for part in found.parts)
        assert found.totals.requests == 30
        assert found.neurons_micro == sum(row.neurons_micro or 0 for row in rows)
        assert len({tuple(part.of.values()) for part in found.parts}) == len(found.parts)
        assert found.due_microusd == found.totals.cost_microusd + sum(line.amount_microusd for line in found.allowance)
        assert msgspec.json.decode(msgspec.json.encode(found), type=Statement) == found


async def test_applications_of_one_name_in_two_organisations_are_two(url):
    async with storage(url) as opened:
        await fill(opened)
        found = await statement(opened.database, "app")
        assert [part.of for part in found.parts] == [{"org": "o", "app": "a"}, {"org": "p", "app": "a"}]


async def test_4000_and_16000_neurons_on_two_days_are_due_as_6000(url):
    async with storage(url) as opened:
        await use(opened, "a", Usage(3_000, 1_000), price=NEURON)
        await use(opened, "local", Usage(5_000, 0))
        opened.clock.seconds += DAY_S
        await use(opened, "b", Usage(9_000, 1_000), price=NEURON)
        await use(opened, "c", Usage(0, 6_000), price=NEURON)
        found = await statement(opened.database, "org")
        assert found.neurons_micro == 20_000 * MICRONEURONS
        assert found.totals.cost_microusd == 220_000 + 2_250
        first, second = found.allowance
        assert (first.billed_neurons_micro, second.billed_neurons_micro) == (0, 6_000 * MICRONEURONS)
        assert (first.listed_microusd, second.listed_microusd) == (44_000, 176_000)
        assert (first.amount_microusd, second.amount_microusd) == (-44_000, -110_000)
        assert found.due_microusd == 66_000 + 2_250
        day = date.fromisoformat(second.day)
        assert (await statement(opened.database, "org", day, day)).due_microusd == 66_000


async def test_what_rounding_put_on_rows_the_day_s_line_takes_off(url):
    async with storage(url) as opened:
        await use(opened, "big", Usage(10_000, 0), price=NEURON)
        for number in range(9):
            await use(opened, f"s{number}", Usage(1, 0), price=Price("n", 600_006, 0, in_neurons=True))
        found = await statement(opened.database, "key")
        assert found.totals.cost_microusd == 110_000 + 9
        assert found.due_microusd == 5


async def test_rows_come_in_pages_that_join_without_a_gap(url):
    async with storage(url) as opened:
        await fill(opened, 10)
        every = [numbered async for numbered in stream_rows(opened.database)]
        paged, after = [], 0
        while page := await page_of_rows(opened.database, since=None, until=None, after=after, limit=3):
            paged += page
            after = page[-1].seq
        assert paged == every
        first = date.fromisoformat(every[0].row.day)
        one_day = await page_of_rows(opened.database, since=first, until=first, after=0, limit=100)
        assert [numbered.row.day for numbered in one_day] == [every[0].row.day] * len(one_day)
        assert 0 < len(one_day) < 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("price", "usage", "listed", "due"),
    [
        (QWEN, Usage(1_200, 400), 54_600_000, 54_600_000),
        (QWEN, Usage(1_200, 1_200, reasoning_tokens=800), 131_400_000, 131_400_000),
        # 165,454.4 neurons a day, of which 10,000 are free: 1.709998 USD on each of 30 days
        (ODD, Usage(1_200, 400), 54_600_000, 30 * 1_709_998),
    ],
)
async def test_a_month_of_30000_requests(url, price, usage, listed, due):
    async with storage(url) as opened:
        for day in range(30):
            for start in range(0, 1_000, 250):
                await asyncio.gather(*(use(opened, f"{day}-{start + n}", usage, price=price) for n in range(250)))
            opened.clock.seconds += DAY_S
        found = await statement(opened.database, "day")
        assert (found.totals.requests, found.totals.prompt_tokens) == (30_000, 36_000_000)
        assert (found.totals.cost_microusd, found.due_microusd) == (listed, due)
        assert len(found.parts) == 30
        costs = [numbered.row.cost_microusd async for numbered in stream_rows(opened.database)]
        assert (len(costs), sum(costs)) == (30_000, listed)
        assert (await reconcile(opened.database, opened.clock.wall())).drifted == ()
