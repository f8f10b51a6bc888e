"""plan/fleet.py, traffic.py, timing.py, simulate.py: the scheduler itself on a counted clock."""

import json

import msgspec
import pytest

from hitsend.core.errors import ConfigError
from hitsend.plan.calibrate import Point
from hitsend.plan.fleet import (
    FleetQuestion,
    Place,
    Served,
    Slo,
    concurrency,
    level,
    plan_fleet,
    replicas_for,
    sustainable,
)
from hitsend.plan.fleet_text import fleet_document
from hitsend.plan.hardware import find_gpu
from hitsend.plan.simulate import simulate
from hitsend.plan.speed import SpeedQuestion, plan_speed
from hitsend.plan.timing import MeasuredTiming, PlannedTiming, Work, fit_timing, read_timing
from hitsend.plan.traffic import Arrival, Traffic, at_rate, make_arrivals, rate_of, read_trace
from tests.plan.asked import FACTS, answer, known

TIMING = MeasuredTiming(step_ms=10, prefill_ms=1, decode_ms=5)
PLACE = Place(slots=4, cells_per_slot=256, cells=1024, step_tokens=64)
ALIKE = Traffic(input=20, output=8, spread=0)


def question(**more):
    draws = (tuple(make_arrivals(ALIKE, 60, 1)), tuple(make_arrivals(ALIKE, 60, 2)))
    given = {
        "peak_per_s": 50.0,
        "slo": Slo(ttft_s=0.5, tpot_s=0.06),
        "draws": draws,
        "place": PLACE,
        "timing": TIMING,
        "fast": TIMING.stretched(0.9),
        "slow": TIMING.stretched(1.1),
    }
    return FleetQuestion(**given | more)


def test_one_request_takes_what_its_steps_take():
    (served,) = simulate([Arrival(1.0, 20, 8)], TIMING, PLACE)
    assert served.ttft_s == pytest.approx(0.030)
    assert served.tpot_s == pytest.approx(0.015)
    assert served.tokens == 8
    assert served.ended_s == pytest.approx(1.0 + 0.030 + 7 * 0.015)


def test_the_same_arrivals_give_the_same_figures():
    arrivals = at_rate(make_arrivals(Traffic(input=30, output=10), 50, 3), 20.0)
    assert simulate(arrivals, TIMING, PLACE) == simulate(arrivals, TIMING, PLACE)


def test_a_shared_beginning_is_computed_once():
    arrivals = [Arrival(float(number), 40, 4, shared=30) for number in range(3)]
    place = msgspec.structs.replace(PLACE, prefix_cache_bytes=1 << 20, prefix_step=10)
    first, second, third = simulate(arrivals, TIMING, place)
    assert first.ttft_s == pytest.approx(0.050)
    assert second.ttft_s == pytest.approx(third.ttft_s or 0)
    assert (second.ttft_s or 0) < (first.ttft_s or 0) - 0.02


def test_whoever_finds_no_place_counts_as_missed():
    place = msgspec.structs.replace(PLACE, slots=1, cells=256, max_waiting=2)
    served = simulate([Arrival(0.0, 20, 8) for _ in range(8)], TIMING, place)
    refused = [one for one in served if one.ttft_s is None]
    assert refused
    assert not any(Slo(ttft_s=1e9, tpot_s=1e9).is_kept(one) for one in refused)


@pytest.mark.slow  # a fleet simulated
def test_a_plan_keeps_its_goal_and_says_how_sure_it_is():
    plan = plan_fleet(question(usd_per_gpu_hour=2.0), simulate)
    assert plan.slowest_per_s <= plan.per_replica_per_s <= plan.fastest_per_s
    assert plan.fewest is not None
    assert plan.replicas is not None
    assert plan.most is not None
    assert plan.fewest <= plan.replicas <= plan.most
    assert plan.with_spare == plan.replicas + 1
    assert plan.scale_down_per_s < plan.scale_up_per_s < plan.per_replica_per_s
    kept = [one.kept for one in plan.curve]
    assert kept[0] == 1
    assert kept[-1] < kept[0]
    found = json.loads(msgspec.json.encode(fleet_document(plan)))
    assert found["usd_per_day_scaled_to_zero"] < found["usd_per_day"]
    assert "replicas" in found["sure"]


@pytest.mark.slow  # three fleets simulated
def test_a_lax_goal_needs_no_more_and_a_tight_one_none_at_all():
    tight, lax = (
        sustainable(question(slo=Slo(ttft_s=ttft, tpot_s=1.0)), question().draws[0], TIMING, simulate)
        for ttft in (0.1, 2.0)
    )
    assert lax >= tight > 0
    impossible = plan_fleet(question(slo=Slo(ttft_s=0.001, tpot_s=1.0)), simulate)
    assert impossible.replicas is None
    assert "no rate keeps the goal" in fleet_document(impossible)["sure"]


def test_worked_examples():
    assert replicas_for(2000, 1.3, 600) == answer("replicas")["replicas"]
    assert replicas_for(1, 1, 0) is None
    assert concurrency(2, 1.5, 0.03, 300) == pytest.approx(answer("littles-law")["concurrency"])


def test_a_planned_step_takes_what_the_plan_says():
    """A steady batch, prompts included: within a tenth of `plan speed`."""
    plan = plan_speed(
        SpeedQuestion(
            checkpoint=known("Llama-3.1-8B"),
            gpu=find_gpu("H100", FACTS),
            batch=32,
            input=1000,
            output=500,
            weights="fp8",
        )
    )
    timing = PlannedTiming(plan)
    step = timing.step_s(Work(decodes=32, held=32 * 1250, pieces=1, prefill=64))
    assert step * 1e3 == pytest.approx(plan.tpot_ms.value, rel=0.1)
    assert timing.step_s(Work(decodes=33, held=33 * 1250, pieces=1, prefill=64)) > step
    alone = Work(decodes=1, held=100)
    assert PlannedTiming(plan, factor=2.0).step_s(alone) == pytest.approx(2 * timing.step_s(alone))


def test_rates_and_seeds():
    arrivals = make_arrivals(Traffic(), 500, 7)
    assert arrivals == make_arrivals(Traffic(), 500, 7)
    assert arrivals != make_arrivals(Traffic(), 500, 8)
    assert rate_of(at_rate(arrivals, 12.5)) == pytest.approx(12.5)
    assert max(one.output for one in arrivals) <= 1600
    assert level(question(), arrivals[:20], 1.0, TIMING.stretched(0.01), _instant).kept == 1


def _instant(arrivals, timing, place):
    return [Served(one.at_s, 0.01, 0.01, one.output, one.at_s + 0.01) for one in arrivals]


def test_traces_are_read_or_refused_by_line(tmp_path):
    file = tmp_path / "trace.jsonl"
    lines = [
        {"at_s": 12.0, "input_tokens": 30, "output_tokens": 5},
        {"at_s": 10.0, "input_tokens": 20, "output_tokens": 9},
    ]
    file.write_text("\n".join(json.dumps(line) for line in lines))
    assert read_trace(file) == [Arrival(0.0, 20, 9), Arrival(2.0, 30, 5)]
    for line, said in (("{", "line 1"), ('{"input_tokens": 3, "output_tokens": 1}', "at_s"), ("", "two requests")):
        file.write_text(line)
        with pytest.raises(ConfigError, match=said):
            read_trace(file)


def test_step_times_are_found_from_a_load_test():
    def point(running):
        tpot = 4 + running * (3 + 100 / 50 * 2)
        ttft = 100 * 2 + 4 if running == 1 else None
        return Point(concurrency=running, input=100, output=50, cached=0, ttft_ms=ttft, tpot_ms=tpot)

    found = fit_timing([point(1), point(4), point(8)], 512)
    assert found.step_s(Work(decodes=1)) == pytest.approx(0.007, rel=0.02)
    assert found.step_s(Work(pieces=1, prefill=100)) == pytest.approx(0.204, rel=0.02)
    with pytest.raises(ConfigError, match="one request at a time"):
        fit_timing([point(4)], 512)


def test_step_times_that_mean_nothing_are_refused():
    assert read_timing("4,2,3") == MeasuredTiming(step_ms=4, prefill_ms=2, decode_ms=3)
    for text in ("1,2", "a,b,c", "-1,2,3", "0,0,1"):
        with pytest.raises(ConfigError, match="--timing"):
            read_timing(text)
    with pytest.raises(ConfigError, match="longest request"):
        plan_fleet(question(place=msgspec.structs.replace(PLACE, cells=20)), simulate)
    with pytest.raises(ConfigError, match="--slo-share"):
        plan_fleet(question(slo=Slo(ttft_s=1, tpot_s=1, share=0.0)), simulate)
