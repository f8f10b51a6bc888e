"""plan/transfer.py: what measured loads say about another one's first token."""

import math

import pytest

from hitsend.plan.calibrate import Point, factors_of
from hitsend.plan.speed import SpeedQuestion, plan_speed
from hitsend.plan.transfer import LOCAL, MOST, NUGGET, OWN, Factors, Near, expected, nearness
from tests.plan.asked import FACTS, find_gpu, known

LOAD = (16.0, 1024.0, 256.0)


def test_nearness_is_shared_and_falls_with_every_octave():
    other = (64.0, 8192.0, 128.0)
    assert nearness(LOAD, LOAD) == 1
    assert nearness(LOAD, other) == nearness(other, LOAD) == pytest.approx(math.exp(-2 / 8 - 3 / 2 - 1 / 8))
    for axis in range(3):
        shares = [nearness(LOAD, tuple(x * 2**n if k == axis else x for k, x in enumerate(LOAD))) for n in range(9)]
        assert shares == sorted(set(shares), reverse=True)


def test_a_measured_load_is_nearly_met_and_a_far_one_is_planned():
    own, whole = OWN + LOCAL * NUGGET, OWN + NUGGET
    assert expected([], LOAD) == 0
    assert expected([(LOAD, 0.5)], LOAD) == pytest.approx(0.5 * (1 + own) / (1 + whole))
    assert expected([(LOAD, 0.5)], (16.0, 2.0**40, 256.0)) == pytest.approx(0, abs=1e-3)
    # twice the same doesn't weigh twice, and what contradicts itself is averaged
    twice = (1 + own) / (1 + own + (whole - own) / 2)
    assert expected([(LOAD, 0.5)] * 2, LOAD) == pytest.approx(0.5 * twice)
    assert expected([(LOAD, 0.3), (LOAD, 0.5)], LOAD) == pytest.approx(0.4 * twice)


def test_between_two_loads_it_is_between():
    low, high = (16.0, 512.0, 256.0), (16.0, 8192.0, 256.0)
    found = [expected([(low, 0.1), (high, 0.6)], (16.0, 2.0**n, 256.0)) for n in range(9, 14)]
    assert found == sorted(found)
    assert 0.09 < found[0] < found[-1] < 0.61


def test_many_measured_loads_are_taken_from_the_nearest():
    near = [((16.0, 1024.0 + n, 256.0), 0.4) for n in range(MOST)]
    far = [((16.0, 2.0**30, 256.0), -9.0)] * 1000
    assert expected([*far, *near], LOAD) == pytest.approx(0.4, rel=0.01)


def test_only_measured_first_tokens_count():
    near = Near(batch=16, input=1024, output=256, tpot=1.0, ttft=None)
    assert Factors(near=(near,)).rest(LOAD) == (1.0, 1.0)
    assert Factors(near=(near,)).nearest(LOAD, with_ttft=True) is None
    both = Factors(near=(near, Near(batch=16, input=1024, output=256, tpot=1.0, ttft=2.0)))
    assert both.nearest(LOAD, with_ttft=True) == both.near[1]
    assert both.rest(LOAD)[1] == pytest.approx(2 ** ((1 + OWN + LOCAL * NUGGET) / (1 + OWN + NUGGET)))


def test_a_sweep_of_prompts_says_more_than_one_of_them():
    """A system whose first token takes twice as long for short prompts and half as long for long ones."""
    asked = SpeedQuestion(checkpoint=known("Llama-3.1-8B"), gpu=find_gpu("H100", FACTS), batch=8, output=128)

    def measured(prompt, factor):
        plan = plan_speed(SpeedQuestion(checkpoint=asked.checkpoint, gpu=asked.gpu, batch=8, input=prompt, output=128))
        ttft = plan.ttft_ms.value * factor
        return Point(concurrency=8, input=prompt, output=128, cached=0, ttft_ms=ttft, tpot_ms=plan.tpot_ms.value)

    short, long = measured(512, 2.0), measured(16_384, 0.5)
    for prompt, factor in ((512, 2.0), (16_384, 0.5)):
        question = SpeedQuestion(checkpoint=asked.checkpoint, gpu=asked.gpu, batch=8, input=prompt, output=128)
        plain = plan_speed(question).ttft_ms.value
        swept = plan_speed(question, factors_of(asked, [short, long])).ttft_ms.value
        assert swept / plain == pytest.approx(factor, rel=0.05)
    assert plan_speed(asked, factors_of(asked, [short])).tpot_ms.value == pytest.approx(plan_speed(asked).tpot_ms.value)
