"""plan/published.py, and what plans and calibrations make of it: measured systems speak for those like them."""

import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hitsend.plan.calibrate import Point, factors_of
from hitsend.plan.hardware import find_gpu
from hitsend.plan.published import Kin, Likeness, Seen, Wait, beside, inverted, learn
from hitsend.plan.roofline import Layout
from hitsend.plan.speed import SpeedQuestion, plan_speed
from hitsend.plan.transfer import expected
from tests.plan.asked import FACTS, known

LIKE = Likeness(model=1.0, gpu=0.5, weights=0.5, tp=0.2, ep=0.3, attention_dp=0.3, terms=0.2, whole=0.1, nugget=0.01)
KIN = Kin("m", "g", "fp8", 2, False, False)
FAR = Kin("other", "card", "bf16", 8, True, True)


def ask(**more):
    fields = {"checkpoint": known("Llama-3.1-70B"), "gpu": find_gpu("H200", FACTS), "weights": "fp8"}
    return SpeedQuestion(**fields | {"layout": Layout(tp=2), "output": 1024} | more)


def test_likeness_is_one_for_the_same_and_falls_with_all_that_differs():
    assert LIKE.of(KIN, KIN) == 1
    assert LIKE.of(KIN, msgspec.structs.replace(KIN, tp=8)) == pytest.approx(math.exp(-0.4))
    assert LIKE.of(KIN, FAR) == LIKE.of(FAR, KIN) == pytest.approx(math.exp(-(1 + 0.5 + 0.5 + 0.4 + 0.3 + 0.3)))


def test_a_system_that_is_slower_than_planned_moves_its_own_plan_and_hardly_a_strangers():
    seen = [Seen(KIN, {"a": 8.0, "b": 2.0}, 15.0), Seen(KIN, {"a": 2.0, "b": 8.0}, 10.1)]
    systems, without = learn(seen, LIKE)
    own, strange = beside(KIN, systems, LIKE), beside(FAR, systems, LIKE)
    assert own.factors["a"] > 1.3 > own.factors["b"]
    assert own.likeness == 1
    assert own.factors["a"] > strange.factors["a"] > 1
    assert strange.factors["a"] < 1.1
    assert without[0] < 0.9  # what the other says of the first is less than what both say


def test_leaving_one_out_is_what_learning_without_it_says():
    seen = [Seen(KIN, {"a": 8.0, "b": 2.0}, 15.0), Seen(FAR, {"a": 5.0, "b": 5.0}, 7.0)]
    seen.append(Seen(msgspec.structs.replace(KIN, tp=4), {"a": 3.0, "b": 3.0}, 8.0))
    whole, without = learn(seen, LIKE)
    for left, factor in enumerate(without):
        others = learn([one for index, one in enumerate(seen) if index != left], LIKE)[0]
        said = [
            sum(share * math.log(beside(seen[left].kin, systems, LIKE).factors[name]) for name, share in
                {name: value / sum(seen[left].terms.values()) for name, value in seen[left].terms.items()}.items())
            for systems in (whole, others)
        ]  # fmt: skip
        assert math.log(factor) == pytest.approx(said[1] - said[0], abs=2e-3)


def test_nobody_measured_says_nothing():
    assert beside(KIN, (), LIKE).factors == {}
    assert learn([], LIKE) == ([], [])


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.floats(-1, 1), min_size=4, max_size=4), min_size=4, max_size=4))
def test_an_inverse_inverts(half):
    matrix = [[sum(a * b for a, b in zip(x, y, strict=True)) + (i == j) for j, y in enumerate(half)]
              for i, x in enumerate(half)]  # fmt: skip
    inverse = inverted(matrix)
    for i in range(4):
        for j in range(4):
            assert sum(matrix[i][k] * inverse[k][j] for k in range(4)) == pytest.approx(float(i == j), abs=1e-6)


def test_factors_are_of_the_system_and_only_where_it_was_measured():
    plan = plan_speed(ask())
    busy = plan_speed(ask(batch=64, input=8192))
    assert plan.published == busy.published
    assert plan.published[0].likeness == 1
    for more in ({"engine": "llama.cpp"}, {"gpu": find_gpu("L40S", FACTS), "layout": Layout(tp=4)}):
        assert plan_speed(ask(**more)).published[0].factors == {}


def test_an_intervals_middle_moves_little_by_systems_that_are_hardly_like():
    plan = plan_speed(ask(checkpoint=known("Command-A"), layout=Layout(tp=8)))
    assert 0 < plan.published[0].likeness < 0.7
    assert all(0.6 < factor < 1.6 for factor in plan.published[0].factors.values())


def test_first_tokens_of_like_systems_tell_where_an_own_measurement_is_far():
    near, far = (16.0, 1024.0, 1024.0), (2.0, 8192.0, 1024.0)
    told = [Wait(KIN, *near, 0.3), Wait(KIN, *far, -0.2)]
    alone = expected([(near, 0.3)], far)
    assert expected([(near, 0.3)], far, KIN, told) < alone
    assert expected([(near, 0.3)], near, KIN, told) == pytest.approx(0.3, abs=0.03)
    assert expected([], far, KIN, told) == 0  # without a measurement of one's own, the plan stands


def test_a_calibration_meets_its_own_load_and_its_interval_widens_away_from_it():
    question = ask(batch=16)
    plain = plan_speed(question)
    assert plain.ttft_ms is not None
    measured = Point(concurrency=16, input=1024, output=1024, cached=0, ttft_ms=plain.ttft_ms.value * 1.3, tpot_ms=20.0)
    factors = factors_of(question, [measured])
    widths = []
    for batch in (16, 32, 64, 128):
        plan = plan_speed(ask(batch=batch), factors)
        widths.append(round((plan.tpot_ms.high - plan.tpot_ms.low) / plan.tpot_ms.value, 9))
        assert widths[-1] <= (plain.tpot_ms.high - plain.tpot_ms.low) / plain.tpot_ms.value + 1e-9
    assert widths == sorted(widths)
    met = plan_speed(question, factors)
    assert met.tpot_ms.value == pytest.approx(20.0, rel=0.02)
    assert met.ttft_ms is not None
    assert met.ttft_ms.value == pytest.approx(plain.ttft_ms.value * 1.3, rel=0.05)
