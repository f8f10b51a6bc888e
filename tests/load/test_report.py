"""The figures: percentiles by definition, goodput, saturation, ratios, and usage that isn't taken on trust."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hitsend.load.charts import curves
from hitsend.load.compare import medians, middle, ratios
from hitsend.load.report import Facts, Slo, check_usage, is_growing, percentile, spread, summarise
from hitsend.load.saturation import BISECTIONS, Ramp, find
from tests.load.virtual import sample

LATENCIES = st.lists(st.floats(0, 1e6), min_size=1, max_size=60)


@given(LATENCIES, st.floats(0.001, 1.0))
def test_a_percentile_is_the_least_value_that_enough_do_not_exceed(values, share):
    found = percentile(sorted(values), share)
    assert found in values
    needed = share * len(values) - 1e-6
    assert sum(value <= found for value in values) >= needed
    below = [value for value in values if value < found]
    assert not below or sum(value <= max(below) for value in values) < needed + 1e-5


def test_percentiles_of_a_hundred_are_themselves():
    values = [float(number) for number in range(1, 101)]
    assert [percentile(values, share) for share in (0.5, 0.9, 0.99, 1.0)] == [50, 90, 99, 100]
    assert spread([]) is None
    assert spread([None, 4.0]).p99 == 4.0


@given(st.floats(0, 10), st.floats(0, 10), st.lists(st.floats(0, 5), max_size=30))
def test_tpot_is_what_is_left_of_e2e_over_the_tokens_after_the_first(at, late, gaps):
    arrivals, when = [at + late], at + late
    for gap in gaps:
        when += gap
        arrivals.append(when)
    one = sample(at=at, arrivals=arrivals, claimed_output=len(arrivals))
    assert one.ttft_ms == pytest.approx(late * 1000, abs=1e-6)
    if gaps:
        assert one.tpot_ms == pytest.approx((one.e2e_ms - one.ttft_ms) / (len(arrivals) - 1), abs=1e-6)
        assert math.fsum(one.gaps_ms()) == pytest.approx(one.e2e_ms - one.ttft_ms, abs=1e-6)
    else:
        assert one.tpot_ms is None


def level(samples, **facts):
    defaults = {"mode": "closed", "concurrency": 2, "wall_s": 10.0, "sending_s": 10.0}
    return summarise(samples, Facts(**defaults | facts))


@given(
    st.lists(
        st.tuples(st.sampled_from(["ok", "error", "aborted", "interrupted"]), st.floats(0, 3), st.floats(0, 0.3)),
        max_size=40,
    ),
    st.floats(1, 3000),
    st.floats(1, 300),
)
def test_good_is_what_came_whole_and_in_time(asked, ttft_ms, tpot_ms):
    samples = [
        sample(outcome, arrivals=(first, first + gap, first + 2 * gap) if outcome != "error" else (), claimed_output=3)
        for outcome, first, gap in asked
    ]
    found = level(samples, slo=Slo(ttft_ms, tpot_ms))
    good = sum(
        one.outcome == "ok" and one.ttft_ms <= ttft_ms and (one.tpot_ms is None or one.tpot_ms <= tpot_ms)
        for one in samples
    )
    tried = sum(one.outcome in ("ok", "error") for one in samples)
    assert found.goodput_per_s == pytest.approx(good / 10)
    assert found.goodput_share == (pytest.approx(good / tried) if tried else None)
    counts = found.requests
    assert counts.sent == counts.ok + counts.errors + counts.aborted + counts.interrupted == len(samples)
    assert sum(found.errors.values()) == counts.errors


def test_a_level_counts_whole_answers_and_sets_the_rest_apart():
    whole = sample(claimed_input=100, claimed_output=3, claimed_cached=20)
    cut = sample("aborted", arrivals=(0.1, 0.2))
    broken = sample("error", arrivals=(9.0,), error="broken")
    found = level([whole, cut, broken, sample("error", arrivals=(), error="http_429")])
    assert (found.output_tokens_per_s, found.total_tokens_per_s) == (0.3, 10.3)
    assert (found.input_tokens_mean, found.output_tokens_mean, found.cached_tokens_mean) == (100, 3, 20)
    assert found.aborted_tokens == 2
    assert found.errors == {"broken": 1, "http_429": 1}
    assert found.ttft_ms.n == 1
    assert found.goodput_per_s is None


def test_without_usage_pieces_are_counted():
    assert level([sample(arrivals=(1, 2, 3, 4))]).output_tokens_mean == 4


def test_usage_is_held_against_our_own_count():
    honest = [sample(number=number, claimed_output=3, asked_output=3) for number in range(10)]
    assert check_usage(honest, None, is_exact=False).is_believable
    assert check_usage(honest, dict.fromkeys(range(10), 3), is_exact=False).method == "tokenize"
    inflated = check_usage(honest, dict.fromkeys(range(10), 2), is_exact=False)
    assert (inflated.is_believable, inflated.differ, inflated.own_tokens, inflated.claimed_tokens) == (
        False,
        10,
        20,
        30,
    )
    fewer = [sample(claimed_output=1) for _ in range(10)]  # than the pieces that came
    assert check_usage(fewer, None, is_exact=False).is_believable is False
    over = check_usage([sample(claimed_output=9, asked_output=3)], None, is_exact=False)
    assert (over.over_limit, over.is_believable) == (1, False)
    none = check_usage([sample()], None, is_exact=False)
    assert (none.without, none.checked, none.is_believable) == (1, 0, None)
    prompts = [sample(claimed_output=3, asked_input=10, claimed_input=given) for given in (10, 10, 12)]
    assert check_usage(prompts, None, is_exact=True).prompts_differ == 1
    assert check_usage(prompts, None, is_exact=False).prompts_checked == 0


def queue(rate, service_s, seconds):
    """Requests at a constant rate to one server."""
    free, samples = 0.0, []
    for number in range(int(rate * seconds)):
        at = number / rate
        free = max(free, at) + service_s
        samples.append(sample(at=at, arrivals=(free,)))
    return samples


@pytest.mark.parametrize(("rate", "growing"), [(1, False), (8, False), (9.5, False), (12, True), (40, True)])
def test_requests_pile_up_where_more_come_than_one_server_can_serve(rate, growing):
    assert is_growing(queue(rate, 0.1, 30), 30) == growing


def rated(rate, *, serves=10.0, **fields):
    samples = queue(rate, 1 / serves, 30)
    wall = max(one.done_s for one in samples)
    facts = {"mode": "open", "concurrency": None, "rate_per_s": rate, "wall_s": wall, "sending_s": 30}
    return level(samples, **facts | fields)


@given(st.floats(0.5, 50), st.floats(0.1, 4))
def test_a_ramp_ends_close_to_what_is_served(serves, start):
    ramp, tried = Ramp(start, 200.0), []
    while (rate := ramp.next()) is not None:
        tried.append((rate, rate <= serves))
        ramp.tell(sustained=rate <= serves)
        assert len(tried) < 30
    best = max((rate for rate, sustained in tried if sustained), default=None)
    if start > serves:
        assert best is None
    else:
        assert best <= serves <= best * (1 + 1 / 2**BISECTIONS) + 1e-9


def test_saturation_of_rates_is_the_highest_that_was_kept_up_with():
    found = find([rated(rate, slo=Slo(ttft_ms=500)) for rate in (2.0, 8.0, 16.0)])
    assert (found.by, found.at, found.is_reached, found.goodput_at) == ("rate", 8.0, True, 8.0)
    assert find([rated(2.0), rated(4.0)]).is_reached is False
    assert find([rated(40.0), rated(80.0)]).at is None


def closed(concurrency, tokens_per_s, number=0):
    one = sample(claimed_output=int(tokens_per_s * 10))
    return level([one], concurrency=concurrency, round=number)


def test_the_knee_is_where_more_at_once_brings_no_more():
    found = find([closed(1, 100), closed(8, 300), closed(16, 310), closed(32, 305)])
    assert (found.by, found.at, found.is_reached) == ("concurrency", 8, True)
    assert find([closed(1, 100), closed(8, 300)]).is_reached is False
    assert find([closed(1, 100)]) is None


def test_a_target_that_is_gone_is_full_nowhere():
    gone = [level([sample("error", error="connect")], concurrency=number) for number in (1, 8)]
    assert find(gone) is None
    assert find([level([], mode="open", concurrency=None, rate_per_s=rate) for rate in (1.0, 2.0)]) is None


def test_a_ratio_of_few_rounds_says_so():
    theirs = [closed(8, 100, number) for number in range(3)]
    ours = [closed(8, 100, 0), *(level([], concurrency=8, round=number) for number in (1, 2))]
    found = {one.metric: one for one in ratios([("a", theirs), ("b", ours)])}
    assert found["ttft_p50_ms"].said(3).endswith("; 1 of 3 rounds)")
    assert "rounds" not in found["output_tokens_per_s"].said(3)


def test_a_curve_has_a_gap_where_nothing_was_measured():
    assert curves("c", [1.0, 2.0, 3.0, 4.0], [("t", [1.0, None, 2.0, 3.0])]).count("<polyline") == 2


def test_ratios_are_of_medians_and_spread_over_the_rounds_own_pairs():
    ours = [closed(8, speed, number) for number, speed in enumerate((110, 240, 330))]
    theirs = [closed(8, speed, number) for number, speed in enumerate((100, 200, 300))]
    found = {one.metric: one for one in ratios([("a", theirs), ("b", ours)])}["output_tokens_per_s"]
    assert (found.target, found.base, found.by, found.load, found.rounds) == ("b", "a", "concurrency", 8, 3)
    assert (found.ratio, found.least, found.greatest) == pytest.approx((1.2, 1.1, 1.2))
    assert ratios([("a", theirs)]) == []
    assert medians(ours)[0]["output_tokens_per_s"] == pytest.approx(240)
    assert middle(ours)[0].round == 1
