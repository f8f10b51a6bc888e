import asyncio

import pytest

from hitsend.core.errors import InsufficientQuota, PermissionDenied
from hitsend.core.request import Usage
from hitsend.serve.usage.allowance import (
    FREE_NEURONS_MICRO,
    MICRONEURONS,
    DayNeurons,
    billed_microusd,
    billed_neurons_micro,
    check_model,
    fits,
    refusal,
)
from hitsend.serve.usage.ledger import Settlement
from hitsend.serve.usage.pricing import Price, PriceBook, Unbilled, cost_microusd, neurons_micro
from hitsend.serve.usage.reconcile import reconcile
from tests.usage.storage import storage, wanted

ONE = Price("n", 11 * MICRONEURONS, 11 * MICRONEURONS, in_neurons=True)
"""A neuron per token."""


def test_4000_and_16000_neurons_on_two_days_bill_6000():
    days = [4_000 * MICRONEURONS, 16_000 * MICRONEURONS]
    assert [billed_neurons_micro(day) for day in days] == [0, 6_000 * MICRONEURONS]
    assert sum(map(billed_microusd, days)) == 66_000


def test_only_the_free_plan_ends_at_the_limit():
    today = DayNeurons(used_micro=9_000 * MICRONEURONS, held_micro=999 * MICRONEURONS)
    assert fits("free", MICRONEURONS, today)
    assert not fits("free", MICRONEURONS + 1, today)
    assert fits("paid", 10**15, today)


def test_a_model_of_the_paid_plan_is_refused_on_the_free_one():
    price = Price("p", 1, 1, is_paid_only=True)
    check_model("paid", price, "m")
    check_model("free", ONE, "m")
    with pytest.raises(PermissionDenied, match="m needs Workers AI's paid plan"):
        check_model("free", price, "m")


async def test_holds_and_rows_of_the_day_count_against_the_free_plan_and_a_refusal_leaves_nothing(url):
    async with storage(url) as opened:
        opened.clock.seconds = 1_800_000_000 // 86_400 * 86_400 + 3_600.0
        free = {"price": ONE, "neurons_limit_micro": FREE_NEURONS_MICRO}
        first = await opened.ledger.reserve(wanted("a", input_tokens=5_000, output_tokens=1_000, **free))
        with pytest.raises(InsufficientQuota, match="4001 neurons; of 10000 today 0 are used and 6000 held") as refused:
            await opened.ledger.reserve(wanted("b", input_tokens=4_000, output_tokens=1, **free))
        assert refused.value.retry_after_s == 5.0, "what is held comes back"
        assert opened.ledger.holds_open == len(await opened.holds()) == 1
        await opened.ledger.settle(first, Settlement(Usage(5_000, 500), "stop"))
        await opened.ledger.reserve(wanted("c", input_tokens=4_500, output_tokens=0, **free))
        with pytest.raises(InsufficientQuota) as refused:
            await opened.ledger.reserve(wanted("d", input_tokens=4_501, output_tokens=0, **free))
        assert refused.value.retry_after_s == 82_800
        await opened.ledger.reserve(wanted("paid", input_tokens=10**6, output_tokens=0, price=ONE))
        assert [row["neurons_micro"] for row in await opened.rows()] == [5_500 * MICRONEURONS]


async def test_of_many_holds_at_once_only_those_that_fit_are_taken(url):
    async with storage(url) as opened:
        asked = (
            wanted(f"r{n}", input_tokens=3_000, output_tokens=0, price=ONE, neurons_limit_micro=FREE_NEURONS_MICRO)
            for n in range(40)
        )
        got = await asyncio.gather(*map(opened.ledger.reserve, asked), return_exceptions=True)
        assert sum(isinstance(one, InsufficientQuota) for one in got) == 37
        assert sum(hold["neurons_micro"] for hold in await opened.holds()) == 9_000 * MICRONEURONS


async def test_a_row_names_who_settled_it(url):
    async with storage(url, owner="me") as opened:
        hold = await opened.ledger.reserve(wanted("a"))
        await opened.ledger.settle(hold, Settlement(Usage(1, 1), "stop"))
        assert [(row["settled_by"], row["neurons_micro"]) for row in await opened.rows()] == [("me", None)]


async def test_what_was_paid_for_before_costs_nothing_and_uses_neurons_all_the_same(url):
    """The provider counts it once more, whoever pays: a free day that it would overrun refuses it."""
    book = Unbilled(PriceBook(elsewhere={"m": ("workers_ai", "@cf/qwen/qwen3.8-27b")}))
    price, usage = book.find("m", is_local=False), Usage(1000, 500)
    assert (cost_microusd(price, usage), neurons_micro(price, usage)) == (0, 186_363_500)
    async with storage(url) as opened:
        limited = {"price": price, "neurons_limit_micro": FREE_NEURONS_MICRO}
        with pytest.raises(InsufficientQuota):
            await opened.ledger.reserve(wanted("large", input_tokens=0, output_tokens=40_000, **limited))
        hold = await opened.ledger.reserve(wanted("r", input_tokens=1000, output_tokens=500, **limited))
        assert [one["neurons_micro"] for one in await opened.holds()] == [186_363_500]
        row = await opened.ledger.settle(hold, Settlement(usage, "stop"))
        assert (row.cost_microusd, row.neurons_micro, row.price_id) == (0, 186_363_500, "batch-repeat")
        assert "rows_wrong_neurons" not in (await reconcile(opened.database, 0.0)).drifted
    assert not Unbilled(PriceBook()).find("m", is_local=True).in_neurons


@pytest.mark.parametrize(
    ("wanted", "used", "held", "wait_s", "says"),
    [
        (1_000, 9_500, 0, 6_400.0, "00:00 UTC"),
        (1_000, 9_500, 400, 6_400.0, "00:00 UTC"),
        (1_000, 100, 9_500, 5.0, "comes back"),
        (1_000, 9_000, 1, 5.0, "comes back"),
        (10_001, 0, 0, None, "max_tokens"),
    ],
)
def test_a_refusal_says_when_to_come_back(wanted, used, held, wait_s, says):
    today = DayNeurons(used * 1_000_000, held * 1_000_000)
    assert not fits("free", wanted * 1_000_000, today)
    error = refusal(wanted * 1_000_000, today, 20_000 * 86_400.0 + 80_000.0)
    assert (error.retry_after_s, says in error.message) == (wait_s, True)
