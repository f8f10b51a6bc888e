"""Random lives of the books: nothing is lost, made, passed twice or left behind."""

import contextlib
import copy

import pytest

from hitsend.core.errors import LimitError
from hitsend.serve.access import limits as core
from hitsend.serve.access.book import Book
from hitsend.serve.access.limits import Moment
from hitsend.serve.access.quota import Used
from tests.access.books import SECOND, WALL_US, Life, asking, at, org
from tests.served import IS_DRILL


def live(seed: int, num_operations: int) -> Life:
    life = Life(seed)
    for _ in range(num_operations):
        life.step()
    while life.open:
        life.settle(next(iter(life.open)))
    return life


def check_at_rest(life: Life) -> None:
    assert life.book.num_open == 0
    for level, shadow in zip(life.levels, life.shadows, strict=True):
        counters = life.book.counters(level)
        assert (shadow.running, shadow.held) == (0, 0)
        assert counters is None or (counters.running, counters.held) == (0, 0)
    assert life.passed > life.num / 50
    assert life.refused > life.num / 50


@pytest.mark.parametrize("seed", range(4))
def test_random_operations_leave_nothing_behind_and_never_pass_a_limit(seed):
    check_at_rest(live(seed, 5_000))


@pytest.mark.slow
@pytest.mark.parametrize("first", [100, 110])  # in halves, so that two workers share them
def test_very_many_random_operations(first):
    """A million by `make drill`."""
    impossible = 0
    for seed in range(first, first + 10):
        life = live(seed, 50_000 if IS_DRILL else 10_000)
        check_at_rest(life)
        impossible += life.impossible
    assert impossible


def test_waiting_as_long_as_told_is_enough_and_not_a_microsecond_too_long():
    told = 0
    for seed in range(400):
        life = Life(seed, num_levels=5)
        for _ in range(40):
            life.step()
        back = (0, 3, 30)[seed % 3] * SECOND  # as a clock tells it that was set back meanwhile
        moment = Moment(life.latest.now_us - back, life.latest.wall_us - back)
        ask = asking("next", *life.levels, tokens=(60, 60), held=20)
        for level in life.book.unseeded(life.levels):
            life.book.seed(level, moment.wall_us // core.DAY_US, (0, 0), moment)
        pairs = [(level, life.book.counters(level) or core.Counters(moment)) for level in life.levels]
        refusal = core.check(pairs, ask, moment)
        if refusal is None or refusal.retry_after_us is None or not refusal.is_certain:
            continue
        told += 1
        wait = refusal.retry_after_us
        early, late = (Moment(moment.now_us + w, moment.wall_us + w) for w in (wait - 1, wait))
        assert core.check(copy.deepcopy(pairs), ask, early) is not None
        assert core.check(pairs, ask, late) is None
    assert told > 10


def test_a_clock_that_is_wrong_by_five_seconds_or_steps_back_gives_no_token_twice():
    book, level = Book(), org(requests_per_minute=60)

    def passed(seconds: float) -> int:
        count = 0
        while True:
            try:
                book.reserve(asking(f"{seconds}-{count}-{book.num_open}", level), at(seconds))
            except LimitError:
                return count
            count += 1

    assert passed(0) == 60
    assert [passed(seconds) for seconds in (5, -5, 5, 0, 5, -5, 5)] == [5, 0, 0, 0, 0, 0, 0]
    assert [passed(seconds) for seconds in (-25, -20, -1, 4, 5, 6)] == [0, 0, 0, 0, 0, 1]


def test_a_level_that_was_forgotten_lives_through_no_time_twice():
    book, level, other = Book(), org(requests_per_minute=60), org("x", requests_per_minute=600)
    passed = 0
    for turn in range(80):
        with contextlib.suppress(LimitError):
            book.reserve(asking(f"{turn}", level), at(0))
            passed += 1
        book.settle(f"{turn}", Used(), at(0))
        for number in range(3):  # each looks for levels to forget
            book.reserve(asking(f"{turn} {number}", other), at(10))
            book.settle(f"{turn} {number}", Used(), at(10))
    assert passed == 61  # what the first one took came back, and no more


def test_a_wall_clock_that_steps_back_over_midnight_spends_no_day_twice():
    midnight = (WALL_US // core.DAY_US + 1) * core.DAY_US
    book, level = Book(), org(usd_per_day_microusd=100)
    book.seed(level, midnight // core.DAY_US - 1, (100, 100), at(-60, midnight))
    with pytest.raises(LimitError):
        book.reserve(asking("a", level, held=1), at(-1, midnight))
    book.reserve(asking("b", level, held=100), at(0, midnight))
    book.settle("b", Used(cost_microusd=100), at(0, midnight))
    for seconds in (-30, -1, 0, 29):
        with pytest.raises(LimitError):
            book.reserve(asking("c", level, held=1), at(seconds, midnight))


def test_levels_that_are_as_good_as_new_are_forgotten():
    book = Book()
    for number in range(20_000):
        level = org(f"o{number}", requests_per_minute=60, parallel_requests=2)
        book.reserve(asking(f"r{number}", level), at(number / 100))
        book.settle(f"r{number}", Used(), at(number / 100))
        assert book.num_levels <= 250
    for number in range(200):
        book.reserve(asking(f"s{number}", org("last", requests_per_minute=1_000)), at(1_000))
    assert book.num_levels == 1
    assert book.num_open == 200


def test_what_is_known_of_spending_is_kept_for_its_month():
    book, level, other = Book(), org(usd_per_day_microusd=9), org("x", requests_per_minute=9)
    book.seed(level, at().wall_us // core.DAY_US, (1, 5), at())

    def touch(seconds: float) -> None:
        book.reserve(asking(f"t{seconds}", other), at(seconds))
        book.settle(f"t{seconds}", Used(), at(seconds))

    for day in range(16):
        touch(day * 86_400)
        assert book.counters(level) is not None
    touch(17 * 86_400)
    assert book.counters(level) is None


def test_a_request_id_holds_once():
    book, level = Book(), org(parallel_requests=5)
    book.reserve(asking("a", level), at())
    with pytest.raises(core.InvalidRequest):
        book.reserve(asking("a", level), at())
    assert book.counters(level).running == 1


def test_shedding_looks_at_requests_and_parallel_only_and_takes_nothing():
    book = Book()
    level = org(requests_per_minute=2, parallel_requests=2, output_tokens_per_minute=10, usd_per_day_microusd=0)
    book.shed((level,), at())
    assert book.num_levels == 0
    book.reserve(asking("a", level, tokens=(0, 10)), at())
    before = book.counters(level).snapshot()
    book.shed((level,), at())
    assert book.counters(level).snapshot() == before
    book.reserve(asking("b", level), at())
    with pytest.raises(LimitError, match="requests_per_minute of org acme is 2") as refused:
        book.shed((level,), at())
    assert refused.value.retry_after_s == 30.0
    book.settle("b", Used(requests=0), at())
    book.shed((level,), at())
    assert at(1).now_us - at().now_us == SECOND


def test_a_level_is_not_forgotten_between_being_told_its_spending_and_the_request():
    book, level = Book(), org(usd_per_month_microusd=100)
    book.seed(level, at().wall_us // core.DAY_US, (0, 0), at())
    later = at(20 * 86_400)
    assert book.unseeded((level,)) == []
    book.reserve(asking("a", level, held=60), later)
    book.settle("a", Used(cost_microusd=60), later)
    assert book.counters(level).spent_month == 60
