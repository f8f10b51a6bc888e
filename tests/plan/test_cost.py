"""plan/cost.py and plan/prices.py: two streams, days, and the amounts that are known."""

import json
import tomllib
from decimal import Decimal
from fractions import Fraction
from importlib.resources import files

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hitsend.core.errors import ConfigError
from hitsend.core.request import Usage
from hitsend.plan.cost import Day, Traffic, billed_neurons, day_pattern, microusd, neurons_of, plan_cost, spread
from hitsend.plan.prices import cost_document, explain_cost, find_rate
from hitsend.serve.usage.pricing import PriceBook, cost_microusd
from tests.plan.asked import FACTS, answer

QWEN = find_rate("workers-ai:qwen3.8-27b", FACTS)
FLAT = find_rate("0.45/3.20", FACTS)


def month(requests=30_000, *, reasoning=0, cached=Fraction(0), days="30"):
    return spread(
        requests, input_tokens=1200, output_tokens=400, reasoning=reasoning, cached=cached, pattern=day_pattern(days)
    )


def one_day(entry, leave, cached=0, reasoning=0):
    return Traffic(1, (Day(*map(Fraction, (entry, leave, cached, reasoning))),))


@pytest.mark.parametrize("rate", [QWEN, FLAT], ids=["by name", "typed"])
def test_the_example_of_the_issue(rate):
    assert cost_document(plan_cost(month(), rate))["gross_usd"] == 54.6
    thinking = cost_document(plan_cost(month(reasoning=800), rate))
    assert thinking["gross_usd"] == 131.4
    assert round(thinking["reasoning_factor"], 1) == 2.4
    assert cost_document(plan_cost(month(3_000_000), rate))["gross_usd"] == 5460
    plain = cost_document(plan_cost(month(), rate))
    assert (plain["input_usd"], plain["output_usd"], plain["blended_usd"]) == (16.2, 38.4, 21.6)
    assert plain["blended_verdict"] == "2.5 \u00d7 too low"
    assert any("2.5 \u00d7 too low" in line for line in plain["explain"])
    assert any("(2.4 \u00d7)" in line for line in thinking["explain"])


def test_what_is_free_depends_on_how_traffic_falls_on_days():
    even, burst = (plan_cost(month(days=days), QWEN) for days in ("30", "burst:30"))
    assert even.neurons == burst.neurons == Fraction(4_963_632)
    assert microusd(even.net_usd) == 51_299_952
    assert microusd(burst.net_usd) == microusd(even.one_day_usd) == 54_489_952
    assert microusd(burst.pooled_usd) == 51_299_952


def test_worked_examples_of_neurons():
    assert FACTS.prices
    assert billed_neurons([Fraction(4000), Fraction(16_000)]) == answer("wai-uneven")["billable"]
    told = answer("wai-month-even-vs-burst")
    rate = find_rate("workers-ai:gpt-oss-120b", FACTS)
    even = Traffic(30, tuple(Day(Fraction(2_000_000), Fraction(500_000)) for _ in range(30)))
    plan = plan_cost(even, rate)
    assert neurons_of(even.days[0], rate) == told["neurons_per_day_even"]
    assert float(plan.net_usd) == pytest.approx(told["usd_even"], abs=1e-4)
    assert float(plan.one_day_usd) == pytest.approx(told["usd_one_day"], abs=1e-4)
    assert float(plan.pooled_usd) == pytest.approx(told["usd_wrong_monthly_pool"], abs=1e-4)
    for model, free in answer("wai-free-output").items():
        per_million = find_rate(f"workers-ai:{model}", FACTS).output_neurons
        assert int(Fraction(10_000) / per_million * 1_000_000) == free


def test_cached_tokens_are_a_part_of_the_input_and_reasoning_of_the_output():
    told = plan_cost(one_day(27_147, 351, cached=27_146), find_rate("1.4/0.26/4.4", FACTS))
    assert float(told.gross_usd) == pytest.approx(answer("litellm-31714")["usd"], abs=1e-12)
    told = plan_cost(one_day(538 + 2208, 197, cached=2208, reasoning=64), find_rate("openai:gpt-5-mini", FACTS))
    assert microusd(told.gross_usd) == round(answer("logfire-1316")["usd"] * 1e6)
    told = plan_cost(one_day(608 * 10**9, 168 * 10**9, cached=342 * 10**9), find_rate("0.55/0.14/2.19", FACTS))
    assert float(told.gross_usd) == pytest.approx(answer("deepseek-day")["usd_revenue"], rel=0.001)


def test_a_cache_without_a_price_is_no_discount():
    assert plan_cost(month(cached=Fraction(1, 2)), QWEN).gross_usd == plan_cost(month(), QWEN).gross_usd
    assert any("no price of their own" in line for line in explain_cost(plan_cost(month(cached=Fraction(1)), QWEN)))


def test_batch_halves_where_a_batch_price_is_known():
    rate = find_rate("openai:gpt-5-mini", FACTS)
    assert plan_cost(month(), rate, is_batch=True).gross_usd * 2 == plan_cost(month(), rate).gross_usd
    with pytest.raises(ConfigError, match="no batch price is known for workers-ai"):
        plan_cost(month(), QWEN, is_batch=True)


def test_the_free_plan_bills_nothing_and_fails_instead():
    plan = plan_cost(month(), QWEN, is_free_plan=True)
    assert (plan.net_usd, plan.refused_days) == (0, 30)
    small = plan_cost(month(30), QWEN, is_free_plan=True)
    assert small.refused_days == 0
    paid_only = find_rate("workers-ai:glm-5.3", FACTS)
    assert plan_cost(month(30), paid_only, is_free_plan=True).refused_days == 30


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 10**7), st.integers(0, 10**5), st.integers(0, 10**5), st.integers(0, 10**5), st.fractions(0, 1),
    st.lists(st.integers(0, 50), min_size=1, max_size=31).filter(any),
)  # fmt: skip
def test_amounts_add_up_and_only_grow(requests, entry, leave, thought, cached, pattern):
    def plan(count, more=0):
        traffic = spread(
            count, input_tokens=entry, output_tokens=leave, reasoning=thought + more, cached=cached, pattern=pattern
        )
        return plan_cost(traffic, QWEN)

    found = plan(requests)
    assert found.gross_usd == found.input_usd + found.output_usd
    assert found.traffic.total.input == requests * entry
    assert found.billed_neurons <= found.neurons
    assert found.pooled_usd <= found.net_usd <= found.one_day_usd + Fraction(11, 100) * len(pattern)
    assert plan(requests, 1).net_usd >= found.net_usd
    assert plan(requests + 1).net_usd >= found.net_usd


@pytest.mark.parametrize(
    ("text", "days"),
    [("1", (1,)), ("3", (1, 1, 1)), ("even:2", (1, 1)), ("burst:3", (1, 0, 0)), ("weekdays:7", (1, 1, 1, 1, 1, 0, 0)),
     ("5,0,2", (5, 0, 2))],
)  # fmt: skip
def test_day_patterns(text, days):
    assert day_pattern(text) == days


@pytest.mark.parametrize("text", ["", "0", "-1", "x", "burst:0", "9999", "1,x"])
def test_wrong_day_patterns_are_named(text):
    with pytest.raises(ConfigError, match="--days"):
        day_pattern(text)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"requests": -1}, "--requests is -1"),
        ({"input_tokens": -1}, "--input is -1"),
        ({"output_tokens": -1}, "--output is -1"),
        ({"reasoning": -1}, "--reasoning is -1"),
        ({"cached": Fraction(2)}, "--cached-share is 2"),
        ({"pattern": (0, 0)}, "--days"),
    ],
)
def test_wrong_traffic_is_named(more, said):
    right = {
        "requests": 1, "input_tokens": 1, "output_tokens": 1, "reasoning": 0, "cached": Fraction(0), "pattern": (1,)
    }  # fmt: skip
    asked = right | more
    with pytest.raises(ConfigError, match=said):
        spread(asked.pop("requests"), **asked)


@pytest.mark.parametrize("price", ["1", "1/2/3/4", "x/y", "workers-ai:nothing", "1/9999999", "-1/2"])
def test_wrong_prices_are_named(price):
    with pytest.raises(ConfigError, match="--price"):
        find_rate(price, FACTS)


def test_planned_and_billed_prices_are_the_same():
    """The server's price lists and the planner's are two files: what both have must agree to the last digit."""
    compared = 0
    for file in (files("hitsend.serve.usage") / "prices").iterdir():
        if not file.name.endswith(".toml"):
            continue
        listed = tomllib.loads(file.read_text())
        provider = "openai" if listed["engine"] == "openai" else "workers-ai"
        for model in listed["models"]:
            rate = find_rate(f"{provider}:{model['model']}", FACTS)
            kind = "neurons" if listed["unit"] == "neurons" else "usd"
            assert getattr(rate, f"input_{kind}") == Fraction(model["input"]), model
            assert getattr(rate, f"output_{kind}") == Fraction(model["output"]), model
            if model.get("cached_input"):
                assert getattr(rate, f"cached_{kind}") == Fraction(model["cached_input"]), model
            if model.get("paid_only"):
                assert rate.is_paid_only, model
            compared += 1
    assert compared > 35


def test_planned_and_billed_amounts_are_the_same():
    price = PriceBook().find("Qwen3.8-27B", is_local=False)
    billed = cost_microusd(price, Usage(prompt_tokens=36_000_000, completion_tokens=12_000_000))
    assert billed == microusd(plan_cost(month(), FLAT).gross_usd) == 54_600_000


def test_every_price_is_a_decimal_that_stays_exact():
    for price in FACTS.prices:
        assert Fraction(Decimal(price.input)) == find_rate(price.name, FACTS).input_usd
        assert json.dumps(cost_document(plan_cost(month(), find_rate(price.name, FACTS))))
