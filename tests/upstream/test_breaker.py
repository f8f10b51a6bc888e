"""The breaker and the retry budget, on a clock that only moves when told to."""

import pytest

from hitsend.serve.engine.breaker import LEAST, LONGEST_OPEN_S, PROBING_S, Breaker, RetryBudget
from hitsend.testing import FakeClock


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def breaker(clock):
    return Breaker(clock, failures=3, share=0.5, open_s=2.0)


def run(breaker, *outcomes):
    for outcome in outcomes:
        assert breaker.refused_s() is None
        breaker.leave(breaker.enter(), outcome)


def test_failures_in_a_row_open_it_and_time_half_opens_it(breaker, clock):
    run(breaker, "failed", "failed", "ok", "failed", "failed")
    assert breaker.state == "closed"
    run(breaker, "failed")
    assert (breaker.state, breaker.refused_s()) == ("open", 2.0)
    clock.advance(1.5)
    assert breaker.refused_s() == 0.5
    clock.advance(0.5)
    assert (breaker.state, breaker.refused_s()) == ("half_open", None)


def test_half_open_lets_one_through_at_a_time(breaker, clock):
    run(breaker, "failed", "failed", "failed")
    clock.advance(2.0)
    probe = breaker.enter()
    assert breaker.refused_s() == PROBING_S
    breaker.leave(probe, "left")
    assert breaker.refused_s() is None, "a client that left says nothing; the next may probe"
    breaker.leave(breaker.enter(), "ok")
    assert breaker.state == "closed"
    run(breaker, "failed", "failed")
    assert breaker.state == "closed", "it starts to count anew"


def test_a_failed_probe_doubles_the_pause_up_to_a_limit(breaker, clock):
    run(breaker, "failed", "failed", "failed")
    waits = []
    for _ in range(8):
        clock.advance(breaker.refused_s())
        breaker.leave(breaker.enter(), "failed")
        waits.append(breaker.refused_s())
    assert waits == [4, 8, 16, 32, LONGEST_OPEN_S, LONGEST_OPEN_S, LONGEST_OPEN_S, LONGEST_OPEN_S]
    clock.advance(LONGEST_OPEN_S)
    breaker.leave(breaker.enter(), "ok")
    run(breaker, "failed", "failed", "failed")
    assert breaker.refused_s() == 2.0, "a good probe forgets the doubling"


def test_a_share_of_failures_opens_it_only_with_enough_results(breaker):
    half = ["failed", "ok"] * (LEAST // 2 - 1)
    run(breaker, *half)
    assert breaker.state == "closed", f"{len(half)} results are too few"
    run(breaker, "ok", "failed")
    assert breaker.state == "open"


def test_what_ends_late_changes_nothing(breaker, clock):
    late = [breaker.enter() for _ in range(5)]
    run(breaker, "failed", "failed", "failed")
    breaker.leave(late[0], "ok")
    assert breaker.state == "open"
    clock.advance(2.0)
    probe = breaker.enter()
    breaker.leave(late[1], "failed")
    breaker.leave(late[2], "ok")
    assert breaker.state == "half_open"
    breaker.leave(probe, "ok")
    breaker.leave(late[3], "failed")
    breaker.leave(late[4], "failed")
    run(breaker, "failed", "failed")
    assert breaker.state == "closed"


def test_retries_are_a_share_of_requests():
    budget = RetryBudget(0.1, burst=2.0)
    assert [budget.take() for _ in range(3)] == [True, True, False]
    granted = 0
    for _ in range(1000):
        budget.pay_in()
        granted += budget.take()
    assert 99 <= granted <= 100
    assert budget.num_retries == granted + 2


def test_what_is_saved_for_retries_is_bounded():
    budget = RetryBudget(0.5, burst=3.0)
    for _ in range(100):
        budget.pay_in()
    assert [budget.take() for _ in range(4)] == [True, True, True, False]


def test_no_share_no_retries():
    budget = RetryBudget(0.0)
    budget.pay_in()
    assert not budget.take()
