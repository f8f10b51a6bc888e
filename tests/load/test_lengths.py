"""Lengths and arrival times: within their bounds, the same again from a seed, and as frequent as was asked."""

from itertools import pairwise
from statistics import fmean, median, pvariance

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hitsend.core.errors import ConfigError
from hitsend.load.arrivals import KINDS, arrivals, ramp
from hitsend.load.lengths import dice, fixed, read_length

DISTRIBUTIONS = st.one_of(
    st.integers(1, 5000).map(str),
    st.tuples(st.integers(1, 900), st.integers(0, 900)).map(lambda two: f"uniform:{two[0]},{two[0] + two[1]}"),
    st.tuples(st.integers(1, 500), st.integers(0, 300), st.integers(1, 90), st.integers(90, 9000)).map(
        lambda four: "normal:{},{},{},{}".format(*four)
    ),
    st.tuples(st.integers(1, 500), st.floats(0, 3), st.integers(1, 90)).map(
        "lognormal:{0[0]},{0[1]:.3f},{0[2]}".format
    ),
)


@settings(max_examples=40)
@given(DISTRIBUTIONS, st.integers())
def test_draws_lie_within_bounds_and_come_again(text, seed):
    length = read_length("--input", text)
    drawn = [length.draw(dice(seed, number)) for number in range(50)]
    assert all(length.least <= tokens <= length.most for tokens in drawn)
    assert drawn == [length.draw(dice(seed, number)) for number in range(50)]


@settings(max_examples=40)
@given(DISTRIBUTIONS)
def test_a_length_says_what_was_typed(text):
    length = read_length("--input", text)
    assert read_length("--input", length.said()) == length


@settings(max_examples=40)
@given(DISTRIBUTIONS, st.floats(0.01, 1.0))
def test_scaling_keeps_the_form_and_never_reaches_zero(text, factor):
    length = read_length("--input", text)
    scaled = length.scaled(factor)
    assert scaled.kind == length.kind
    assert 1 <= scaled.least <= scaled.most
    assert all(scaled.least <= scaled.draw(dice(0, number)) <= scaled.most for number in range(20))


def test_distributions_have_the_middle_that_was_asked():
    chance = dice(1)
    uniform = [read_length("-", "uniform:100,300").draw(chance) for _ in range(4000)]
    normal = [read_length("-", "normal:200,50").draw(chance) for _ in range(4000)]
    lognormal = [read_length("-", "lognormal:200,0.6").draw(chance) for _ in range(4000)]
    assert fmean(uniform) == pytest.approx(200, rel=0.03)
    assert fmean(normal) == pytest.approx(200, rel=0.03)
    assert pvariance(normal) ** 0.5 == pytest.approx(50, rel=0.06)
    assert median(lognormal) == pytest.approx(200, rel=0.06)
    assert fmean(lognormal) > 220
    assert fixed(7).draw(chance) == 7


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "0",
            "-3",
            "1.5",
            "nan",
            "inf",
            "abc",
            "uniform:5",
            "uniform:9,3",
            "uniform:0,3",
            "normal:1",
            "poisson:3",
        ),
        *("normal:0,5", "normal:5,1,9,3", "lognormal:-1,2", "lognormal:1,2,3,4,5", "10000001", "1,2", "normal:5,nan"),
    ],
)
def test_a_length_that_cannot_be_names_flag_and_value(text):
    with pytest.raises(ConfigError) as refused:
        read_length("--output", text)
    assert f"--output={text}" in str(refused.value)


@settings(max_examples=40)
@given(st.sampled_from(KINDS), st.floats(0.1, 500), st.floats(0.1, 20), st.integers(1, 300), st.integers())
def test_arrivals_are_ordered_bounded_and_come_again(kind, rate, duration_s, requests, seed):
    bounds = {"duration_s": duration_s, "requests": requests, "seed": seed}
    times = arrivals(kind, rate, **bounds)
    assert times == sorted(times) == arrivals(kind, rate, **bounds)
    assert len(times) <= requests
    assert all(0 <= at < duration_s for at in times)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_has_the_rate_that_was_asked(kind):
    times = arrivals(kind, 20.0, duration_s=500.0, requests=None, seed=3, burst_size=5)
    assert len(times) / 500 == pytest.approx(20, rel=0.06)
    gaps = [after - before for before, after in pairwise(times)]
    if kind == "constant":
        assert max(gaps) == pytest.approx(min(gaps)) == pytest.approx(0.05)
    elif kind == "poisson":  # as spread as its mean
        assert pvariance(gaps) ** 0.5 == pytest.approx(0.05, rel=0.1)
    else:
        assert sum(gap == 0 for gap in gaps) / len(gaps) == pytest.approx(4 / 5, rel=0.02)


def test_a_ramp_ends_at_its_stop():
    assert ramp(1, 10) == [1, 2, 4, 8, 10]
    assert ramp(4, 4) == [4]
