"""plan/rent.py: where managed and dedicated meet, and when nobody wins."""

import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hitsend.core.errors import ConfigError
from hitsend.plan.rent import (
    RentQuestion,
    break_even_per_hour,
    dedicated_usd,
    plan_rent,
    replicas_needed,
    usd_per_million,
    usd_per_million_output,
    usd_per_request,
)
from hitsend.plan.rent_text import cheaper, rent_document, verdict
from tests.plan.asked import answer

PLAIN = RentQuestion(managed_usd=54.6, requests=30_000, output_tokens=12e6, dedicated_usd=5460.0)


def change(**more):
    return msgspec.structs.replace(PLAIN, **more)


def test_the_example_of_the_issue():
    plan = plan_rent(PLAIN)
    assert plan.crossover == plan.settled == pytest.approx(100)
    found = rent_document(plan)
    assert found["crossover_requests"] == pytest.approx(3_000_000)
    assert found["cheaper"] == "managed"
    assert next(one for one in found["curve"] if one["factor"] == 100)["managed_usd"] == pytest.approx(5460)


def test_worked_examples():
    told = answer("rent-vs-api")
    assert break_even_per_hour(2.5, 0.004) == told["break_even_per_hour"]
    cost = usd_per_request(2.5, 2950, escalated=0.042, managed=0.004)
    assert cost == pytest.approx(told["usd_per_request_at_2950"], rel=0.002)
    assert usd_per_million(2.69, 1000) == pytest.approx(answer("rent-h100-token")["usd_per_m"], abs=1e-4)
    assert usd_per_million_output(2.69, 4000, 1000) == pytest.approx(
        answer("gke-split")["example_usd_per_m_out"], abs=1e-4
    )


def test_people_and_spares_are_on_the_dedicated_side():
    assert dedicated_usd(change(ops_usd=1000.0, redundancy=1), 1.0) == 2 * 5460 + 1000
    assert plan_rent(change(ops_usd=546.0)).crossover == pytest.approx(110)


def test_a_replica_that_costs_more_than_its_tokens_never_pays():
    plan = plan_rent(change(tokens_per_s=20.0))
    assert plan.crossover is None
    assert rent_document(plan)["crossover_requests"] is None


def test_steps_of_replicas_make_it_dearer_again():
    plan = plan_rent(change(tokens_per_s=2000.0, dedicated_usd=2000.0, ops_usd=1000.0, redundancy=1))
    assert plan.crossover is not None
    assert plan.settled is not None
    assert plan.settled >= plan.crossover
    for factor in (plan.settled, plan.settled * 1.37, plan.settled * 9.1):
        assert plan.question.managed_usd * factor >= dedicated_usd(plan.question, factor) * (1 - 1e-6)


def test_nobody_wins_where_a_plausible_change_turns_it_round():
    plan = plan_rent(change(managed_usd=5500.0))
    assert cheaper(plan) == "unclear"
    assert verdict(plan).startswith("neither wins clearly")
    assert "managed price" in verdict(plan)
    assert cheaper(plan_rent(change(managed_usd=60_000.0))) == "dedicated"


@settings(max_examples=60, deadline=None)
@given(
    managed=st.floats(1, 1e5),
    own=st.floats(10, 1e5),
    speed=st.floats(1, 1e5),
    ops=st.floats(0, 1e4),
    spare=st.integers(0, 2),
    tokens=st.floats(1e5, 1e10),
)
def test_at_the_crossover_they_meet_and_below_managed_is_cheaper(managed, own, speed, ops, spare, tokens):
    question = RentQuestion(
        managed_usd=managed, requests=1000, output_tokens=tokens, dedicated_usd=own, ops_usd=ops, redundancy=spare,
        tokens_per_s=speed,
    )  # fmt: skip
    plan = plan_rent(question)
    assert replicas_needed(question, 2.0) >= replicas_needed(question, 1.0)
    if plan.crossover is not None:
        assert managed * plan.crossover >= dedicated_usd(question, plan.crossover) * (1 - 1e-6)
        for share in (0.3, 0.9):
            assert managed * plan.crossover * share <= dedicated_usd(question, plan.crossover * share) * (1 + 1e-6)


def test_questions_that_mean_nothing_are_refused():
    for more in (
        {"dedicated_usd": 0.0},
        {"utilization": 0.0},
        {"peak_factor": 0.5},
        {"redundancy": -1},
        {"tokens_per_s": 0.0},
        {"tokens_per_s": 1e-308},
        {"dedicated_usd": math.inf},
        {"ops_usd": math.nan},
        {"peak_factor": math.nan},
    ):
        with pytest.raises(ConfigError):
            plan_rent(change(**more))
