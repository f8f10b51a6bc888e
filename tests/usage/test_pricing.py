from datetime import UTC, date, datetime
from decimal import ROUND_HALF_UP, Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hitsend.core.errors import ConfigError
from hitsend.core.request import Usage
from hitsend.serve.usage.pricing import (
    LOCAL_FREE,
    Price,
    PriceBook,
    _built_in,
    cost_microusd,
    held_microusd,
    held_neurons_micro,
    neurons_micro,
    picousd_per_token,
)
from hitsend.settings import PriceSettings

prices = st.builds(
    Price,
    id=st.just("p"),
    input_picousd=st.integers(0, 10**9),
    output_picousd=st.integers(0, 10**9),
    cached_input_picousd=st.none() | st.integers(0, 10**9),
)


@st.composite
def usages(draw):
    prompt, completion = draw(st.integers(0, 10**7)), draw(st.integers(0, 10**7))
    return Usage(prompt, completion, draw(st.integers(0, prompt)), draw(st.integers(0, completion)))


def test_the_worked_examples():
    price = PriceBook().find("Qwen3.8-27B", is_local=False)
    assert cost_microusd(price, Usage(300, 500)) == 1_735
    assert cost_microusd(price, Usage(36_000_000, 12_000_000)) == 54_600_000


@given(prices, usages())
def test_a_cost_is_the_exact_sum_rounded_half_up_once(price, usage):
    def usd(tokens, picousd):
        return Decimal(tokens) * Decimal(picousd) / 10**12

    cached = price.input_picousd if price.cached_input_picousd is None else price.cached_input_picousd
    exact = (
        usd(usage.prompt_tokens - usage.cached_tokens, price.input_picousd)
        + usd(usage.cached_tokens, cached)
        + usd(usage.completion_tokens, price.output_picousd)
    )
    assert cost_microusd(price, usage) == (exact * 10**6).to_integral_value(ROUND_HALF_UP)


@given(prices, usages(), st.integers(0, 1000), st.integers(0, 1000))
def test_more_tokens_never_cost_less(price, usage, more_prompt, more_completion):
    more = Usage(usage.prompt_tokens + more_prompt, usage.completion_tokens + more_completion, usage.cached_tokens)
    assert cost_microusd(price, more) >= cost_microusd(price, usage)


@given(prices, usages())
def test_a_hold_covers_what_it_is_settled_for(price, usage):
    assert held_microusd(price, usage.prompt_tokens, usage.completion_tokens) >= cost_microusd(price, usage)


@given(prices, usages())
def test_reasoning_is_billed_as_output_not_on_top(price, usage):
    plain = Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)
    assert cost_microusd(price, usage) == cost_microusd(price, plain)


@given(st.decimals(0, 1_000_000, places=6))
def test_a_price_in_settings_keeps_its_meaning_exactly(usd):
    assert Decimal(picousd_per_token(str(usd), "f")) == usd * 10**6


def test_half_a_microdollar_rounds_up():
    assert cost_microusd(Price("p", 500_000, 0), Usage(1, 0)) == 1
    assert cost_microusd(Price("p", 499_999, 0), Usage(1, 0)) == 0


def test_cached_tokens_without_a_price_of_their_own_cost_what_input_costs():
    usage = Usage(prompt_tokens=100, cached_tokens=60)
    assert cost_microusd(Price("p", 1_000_000, 0), usage) == 100
    assert cost_microusd(Price("p", 1_000_000, 0, 100_000), usage) == 46


@pytest.mark.parametrize("name", ["qwen3.8-27b", "QWEN/Qwen3.8-27B", "@cf/qwen/qwen3.8-27b"])
def test_built_in_prices_go_by_any_known_name(name):
    assert PriceBook().find(name, is_local=False).id == "workers-ai-2026-08"


def test_settings_go_before_the_list_and_a_name_before_the_star():
    book = PriceBook([PriceSettings("*", 1.0, 2.0, id="all"), PriceSettings("Mine", 0.1, 0.2, 0.05, id="mine")])
    assert book.find("mine", is_local=True) == Price("mine", 100_000, 200_000, 50_000)
    assert book.find("qwen3.8-27b", is_local=False).id == "all"


def test_a_model_on_this_machine_is_free_unless_priced():
    assert PriceBook().find("smollm2-135m", is_local=True) == LOCAL_FREE


def test_a_remote_model_without_a_price_is_refused_and_named():
    with pytest.raises(ConfigError, match=r"no price for the model 'gpt-x'"):
        PriceBook().find("gpt-x", is_local=False)


@pytest.mark.parametrize("usd", [float("nan"), float("inf"), -1.0, 1e7, 0.1234567, "abc", ""])
def test_a_price_that_means_nothing_is_refused(usd):
    with pytest.raises(ConfigError, match=r"prices\.x"):
        picousd_per_token(usd, "prices.x")


def test_neurons_are_exact_and_worth_eleven_dollars_a_million():
    price = PriceBook().find("@cf/qwen/qwen3.8-27b", is_local=False, engine="workers_ai")
    assert price == Price("workers-ai-2026-08-28", 40_909 * 11, 290_909 * 11, None, in_neurons=True)
    assert neurons_micro(price, Usage(1_200, 400)) == 1_200 * 40_909 + 400 * 290_909
    assert held_neurons_micro(price, 1_200, 400) == neurons_micro(price, Usage(1_200, 400))
    assert cost_microusd(price, Usage(1_000_000, 0)) == 449_999
    assert neurons_micro(Price("usd", 1, 1), Usage(5, 5)) is None


def test_every_workers_ai_model_has_its_rates_and_the_paid_ones_say_so():
    listed = [name for engine, name in _built_in() if engine == "workers_ai"]
    found = {name: PriceBook().find(name, is_local=False, engine="workers_ai") for name in listed}
    assert sum(price.output_picousd > 0 for price in found.values()) == 37
    assert sum(price.output_picousd == 0 for price in found.values()) == 5, "that embed"
    assert all(
        price.in_neurons and price.input_picousd % 11 == price.output_picousd % 11 == 0 for price in found.values()
    )
    paid = {name for name, price in found.items() if price.is_paid_only}
    assert paid == {
        "@cf/moonshotai/kimi-k2.6",
        "@cf/moonshotai/kimi-k2.7-code",
        "@cf/zai-org/glm-5.2",
        "@cf/zai-org/glm-5.3",
        "@cf/zai-org/glm-5.3-flash",
        "@cf/deepseek-ai/deepseek-v4-flash-0731",
        "@cf/deepseek-ai/deepseek-v4-pro-0813",
    }
    assert found["@cf/zai-org/glm-5.2"].cached_input_picousd == 23_636 * 11


def test_a_list_counts_from_its_day_on_and_only_for_its_kind_of_engine():
    book = PriceBook(now=lambda: datetime(2025, 11, 13, tzinfo=UTC).timestamp())
    assert book.find("gpt-5", is_local=False, engine="openai").cached_input_picousd == 125_000
    with pytest.raises(ConfigError, match="on 2025-11-12"):
        book.find("gpt-5", is_local=False, engine="openai", on=date(2025, 11, 12))
    with pytest.raises(ConfigError):
        book.find("gpt-5", is_local=False, engine="vllm")


def test_reasoning_of_a_month_of_requests_is_billed_as_output():
    price = Price("usd", 450_000, 3_200_000)
    plain, thinking = Usage(1_200, 400), Usage(1_200, 1_200, reasoning_tokens=800)
    assert 30_000 * cost_microusd(price, plain) == 54_600_000 == cost_microusd(price, Usage(36_000_000, 12_000_000))
    assert cost_microusd(price, Usage(36_000_000, 0)) == 16_200_000
    assert cost_microusd(price, Usage(0, 12_000_000)) == 38_400_000
    assert 30_000 * cost_microusd(price, thinking) == 131_400_000


def test_an_upstreams_model_without_a_price_says_where_one_goes():
    with pytest.raises(ConfigError, match=r"prices = \{ input = …, output = … \} to its \[\[engines\]\]"):
        PriceBook(elsewhere={"mine": ("openai", "gpt-x")}).find("mine", is_local=False)
