"""One limit at a time: what passes, what is said of what doesn't, and how long an answer may be."""

import pytest

from hitsend.core.errors import InsufficientQuota, InvalidRequest, LimitError, RateLimitExceeded
from hitsend.core.limits import Level, Limits, RateWindow
from hitsend.serve.access.book import Book
from hitsend.serve.access.limits import DAY_US, first_of_month, first_of_next_month, month_of
from hitsend.serve.access.quota import Used
from hitsend.serve.access.room import Size, most_output
from hitsend.serve.usage.pricing import Price, held_microusd
from tests.access.books import WALL_US, asking, at, org

DAY = WALL_US // DAY_US
KEY = Level("key", ("k1",), Limits(requests_per_minute=1))


def full(level: Level, **reserved) -> Book:
    book = Book()
    book.seed(level, DAY, (0, 0), at())
    book.reserve(asking("first", level, **reserved), at())
    return book


def refused(book: Book, *levels: Level, seconds: float = 0.0, **asked) -> LimitError:
    with pytest.raises(LimitError) as error:
        book.reserve(asking("next", *levels, **asked), at(seconds))
    return error.value


@pytest.mark.parametrize(
    ("limits", "tokens", "says", "wait_s"),
    [
        ({"requests_per_minute": 1}, (5, 5), "requests_per_minute of org acme is 1, 0 left, 1 asked", 60.0),
        ({"input_tokens_per_minute": 9}, (5, 5), "input_tokens_per_minute of org acme is 9, 4 left, 5 asked", 20 / 3),
        ({"output_tokens_per_minute": 5}, (5, 5), "output_tokens_per_minute of org acme is 5, 0 left, 5 asked", 60.0),
        ({"parallel_requests": 1}, (5, 5), "parallel_requests of org acme is 1, all are running", 1.0),
    ],
)
def test_a_refusal_names_level_limit_and_value_and_a_wait_that_is_enough(limits, tokens, says, wait_s):
    level = org(**limits)
    book = full(level, tokens=tokens)
    before = book.counters(level).snapshot()
    error = refused(book, level, tokens=tokens)
    assert isinstance(error, RateLimitExceeded)
    assert says in error.message
    assert error.retry_after_s == pytest.approx(wait_s, abs=1e-6)
    assert book.counters(level).snapshot() == before
    assert [check.value > check.limit for check in error.windows.checks] == [True]
    if "parallel_requests" not in limits:
        refused(book, level, tokens=tokens, seconds=error.retry_after_s - 0.001)
        book.reserve(asking("next", level, tokens=tokens), at(error.retry_after_s))


def test_all_levels_must_agree_and_the_longest_wait_is_told():
    acme = org(requests_per_minute=60, output_tokens_per_minute=100)
    book = full(acme, tokens=(0, 90))
    book.reserve(asking("k", KEY), at())
    error = refused(book, acme, KEY, tokens=(0, 20))
    assert "requests_per_minute of key k1" in error.message
    assert book.counters(acme).running == 1
    book.reserve(asking("next", acme, KEY, tokens=(0, 20)), at(error.retry_after_s))
    assert (book.counters(acme).running, book.counters(KEY).running) == (2, 2)


def test_what_was_reserved_and_not_used_goes_back_and_no_more():
    level = org(input_tokens_per_minute=600, output_tokens_per_minute=600)
    book = full(level, tokens=(600, 600))
    book.settle("first", Used(100, 30), at(30))
    left = book.preview(asking("x", level), at(30))
    assert (left.input_tokens.remaining, left.output_tokens.remaining) == (600, 600)
    book.reserve(asking("next", level, tokens=(600, 600)), at(30))
    book.settle("next", Used(500, 700), at(30))
    left = book.preview(asking("x", level), at(30))
    assert (left.input_tokens, left.output_tokens) == (RateWindow(600, 100, 50.0), RateWindow(600, 0, 70.0))
    assert refused(book, level, tokens=(0, 1), seconds=30).retry_after_s == pytest.approx(10.1)


def test_a_request_that_never_began_gives_its_place_back():
    level = org(requests_per_minute=1)
    book = full(level)
    book.settle("first", Used(requests=0), at())
    book.reserve(asking("next", level), at())


def test_budgets_count_what_is_spent_and_what_is_held():
    level = org(usd_per_day_microusd=100, usd_per_month_microusd=150)
    book = full(level, held=60)
    error = refused(book, level, held=50)
    assert isinstance(error, InsufficientQuota)
    assert "usd_per_day of org acme is 0.000100 USD, 0.000040 USD left, 0.000050 USD asked" in error.message
    assert error.retry_after_s == 1.0  # what stands in the way is only held
    book.settle("first", Used(cost_microusd=60), at())
    error = refused(book, level, held=50)
    assert error.retry_after_s == 16 * 3600  # 08:00 now
    refused(book, level, held=50, seconds=error.retry_after_s - 0.001)
    book.reserve(asking("next", level, held=50), at(error.retry_after_s))
    book.settle("next", Used(cost_microusd=50), at(error.retry_after_s))
    month = refused(book, level, held=50, seconds=error.retry_after_s)
    assert "usd_per_month" in month.message
    assert month.retry_after_s == 16 * 86_400
    book.reserve(asking("free", level), at(error.retry_after_s))  # what costs nothing asks no budget
    book.reserve(asking("later", level, held=100), at(error.retry_after_s + month.retry_after_s))


def test_what_is_held_over_midnight_counts_on_both_days_and_what_it_cost_on_the_second():
    level = org(usd_per_day_microusd=100)
    book = full(level, held=80)
    midnight = 16 * 3600
    refused(book, level, held=21, seconds=midnight)
    book.settle("first", Used(cost_microusd=30), at(midnight))
    book.reserve(asking("next", level, held=70), at(midnight))
    assert book.counters(level).spent_day == 30


def test_changed_limits_hold_from_the_next_request_on():
    book = full(org(requests_per_minute=1))
    raised = org(requests_per_minute=3)
    for request_id in "ab":
        book.reserve(asking(request_id, raised), at())
    error = refused(book, org(requests_per_minute=2))
    assert error.windows.requests.remaining == 0
    assert error.retry_after_s == 60.0  # one more than the new bucket holds is missing
    book.reserve(asking("c", org(requests_per_minute=2)), at(60))


def test_a_limit_that_is_taken_away_and_comes_back_gives_nothing_twice():
    level = org(output_tokens_per_minute=10)
    book = full(level, tokens=(0, 10))
    book.reserve(asking("free", org(), tokens=(0, 99)), at())
    book.settle("free", Used(0, 0), at())
    refused(book, level, tokens=(0, 1))


@pytest.mark.parametrize(
    ("limits", "asked", "param"),
    [
        ({"input_tokens_per_minute": 9}, {"tokens": (10, 1)}, "messages"),
        ({"output_tokens_per_minute": 9}, {"tokens": (1, 10)}, "max_tokens"),
        ({"tokens_per_request": 9}, {"tokens": (5, 5)}, "max_tokens"),
        ({"tokens_per_request": 9}, {"tokens": (9, 1)}, "messages"),
        ({"usd_per_day_microusd": 9}, {"tokens": (5, 5), "held": 10}, "max_tokens"),
        ({"usd_per_month_microusd": 9}, {"tokens": (5, 0), "held": 10}, "messages"),
    ],
)
def test_what_can_never_pass_is_no_429(limits, asked, param):
    book, level = Book(), org(requests_per_minute=5, **limits)
    book.seed(level, DAY, (0, 0), at())
    with pytest.raises(InvalidRequest, match="of org acme is .*: this can never pass") as error:
        book.reserve(asking("a", level, **asked), at())
    assert error.value.param == param
    assert book.counters(level).snapshot() == (0,) * 7


@pytest.mark.parametrize(
    ("limits", "most"),
    [
        ({}, None),
        ({"input_tokens_per_minute": 40}, None),
        ({"output_tokens_per_minute": 101}, 50),
        ({"tokens_per_request": 100}, 30),
        ({"usd_per_day_microusd": 100}, 10),  # 40 of input, 3 for each token of output
        ({"usd_per_day_microusd": 99}, 9),
        ({"usd_per_month_microusd": 100, "tokens_per_request": 45}, 2),
    ],
)
def test_an_answer_may_be_as_long_as_the_smallest_bucket_can_ever_hold(limits, most):
    size = Size(40, 2, input_picousd=1_000_000, output_picousd=3_000_000)
    levels = (org("other", output_tokens_per_minute=10_000), org(**limits)) if limits else (org(),)
    expected = 5_000 if most is None and limits else most
    assert most_output(levels, size) == expected
    if most is not None:
        book = Book()
        ask = asking("a", *levels, tokens=(40, 2 * most), held=size.microusd(2 * most))
        for level in book.unseeded(levels):
            book.seed(level, DAY, (0, 0), at())
        book.reserve(ask, at())
        more = asking("b", *levels, tokens=(40, 2 * most + 2), held=size.microusd(2 * most + 2))
        with pytest.raises(InvalidRequest):
            book.reserve(more, at(3600))


@pytest.mark.parametrize(
    ("limits", "max_tokens", "param", "says"),
    [
        ({"output_tokens_per_minute": 99}, 50, "max_tokens", "100 asked, output_tokens_per_minute of org acme is 99"),
        ({"tokens_per_request": 100}, 31, "max_tokens", "102 asked, tokens_per_request of org acme is 100"),
        ({"tokens_per_request": 41}, None, "messages", "42 asked, tokens_per_request of org acme is 41"),
        ({"input_tokens_per_minute": 39}, 5, "messages", "40 asked, input_tokens_per_minute of org acme is 39"),
        ({"usd_per_day_microusd": 45}, None, "messages", "0.000046 USD asked, usd_per_day of org acme is 0.000045 USD"),
    ],
)
def test_a_length_or_an_input_that_never_fits_is_refused_with_its_numbers(limits, max_tokens, param, says):
    size = Size(40, 2, max_tokens, input_picousd=1_000_000, output_picousd=3_000_000)
    with pytest.raises(InvalidRequest) as error:
        most_output((org(**limits),), size)
    assert error.value.param == param
    assert says in error.value.message


def test_a_free_model_is_not_cut_by_a_budget_but_a_dear_input_is():
    assert most_output((org(usd_per_day_microusd=0),), Size(40, 1)) is None
    with pytest.raises(InvalidRequest):
        most_output((org(usd_per_day_microusd=3),), Size(4, 1, input_picousd=1_000_000))


@pytest.mark.parametrize(("input_picousd", "output_picousd"), [(1, 1), (450_000, 3_200_000), (499_999, 500_001)])
def test_what_a_request_can_cost_is_what_the_ledger_will_hold(input_picousd, output_picousd):
    price = Price("p", input_picousd, output_picousd)
    for tokens in range(0, 3000, 7):
        size = Size(tokens, 1, input_picousd=price.dearest_input_picousd, output_picousd=price.output_picousd)
        assert size.microusd(3000 - tokens) == held_microusd(price, tokens, 3000 - tokens)


def test_months_and_days():
    assert month_of(0) == 1970 * 12
    assert [first_of_month(day) for day in (0, 30, 31, 58, 59)] == [0, 0, 31, 31, 59]
    assert [first_of_next_month(day) for day in (0, 30, 31, 58, 59, 364)] == [31, 31, 59, 59, 90, 365]
