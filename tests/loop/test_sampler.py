import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from hitsend.core.request import SamplingParams
from hitsend.serve.loop.rows import COLUMNS, largest
from hitsend.serve.loop.sampler import Sampler, sample

LOGITS = st.floats(-12, 12, width=32)


class Grid:
    """Stands in for the generator: uniforms at equal distances, so that frequencies are probabilities within 1/n."""

    def __init__(self, n):
        self.uniforms = iter([(i + 0.5) / n for i in range(n)])

    def random(self):
        return next(self.uniforms)


def frequencies(row, params, n):
    sampler = Sampler(params, 0, ())
    sampler._generator = Grid(n)
    counts = np.zeros(row.size)
    for _ in range(n):
        (token,) = sample(row[np.newaxis].copy(), [sampler])
        counts[token.token_id] += 1
    return counts / n


def reference(row, params):
    """The definition, slowly, in float64; a filter keeps what ties with the last token that it needs."""
    p = np.exp((row.astype(np.float64) - row.max()) / params.temperature)
    if 0 < params.top_k < row.size:
        p[row < np.sort(row)[-params.top_k]] = 0.0
    if params.top_p < 1.0:
        falling = np.sort(p)[::-1]
        last = min(int(np.searchsorted(falling.cumsum(), params.top_p * p.sum())), p.size - 1)
        p[p < falling[last] * (1 - 1e-6)] = 0.0
    p[p < params.min_p * p.max() * (1 - 1e-6)] = 0.0
    return p / p.sum()


def test_greedy_takes_the_best_and_the_lowest_id_among_equals():
    logits = np.array([[0, 3, 3, 1], [9, 0, 0, 0]], dtype=np.float32)
    tokens = sample(logits, [Sampler(SamplingParams(temperature=0.0), seed, ()) for seed in (1, 2)])
    assert [token.token_id for token in tokens] == [1, 0]


@pytest.mark.parametrize("params", [SamplingParams(temperature=1e-30), SamplingParams(temperature=2.0, top_k=1)])
def test_a_tiny_temperature_and_top_k_1_are_greedy(params):
    logits = np.array([[0.0, 3.0, 3.0, 2.999]], dtype=np.float32)
    assert sample(logits, [Sampler(params, 5, ())])[0].token_id == 1


@settings(max_examples=40, deadline=None)
@given(
    row=arrays(np.float32, st.integers(2, 12), elements=LOGITS),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 2.5]),
    top_k=st.sampled_from([0, 2, 3, 7, 40]),
    top_p=st.sampled_from([0.1, 0.5, 0.93, 1.0]),
    min_p=st.sampled_from([0.0, 0.07, 0.4]),
)
def test_frequencies_are_the_probabilities_of_the_definition(row, temperature, top_k, top_p, min_p):
    row = np.round(row, 3)  # what nearly ties is a matter of rounding: ties are exact here
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    expected = reference(row, params)
    for sway in (1 - 1e-4, 1 + 1e-4):  # where a filter's edge falls on a rounding error there is nothing to compare
        swayed = SamplingParams(temperature=temperature, top_k=top_k, top_p=min(top_p * sway, 1.0), min_p=min_p * sway)
        assume(np.array_equal(reference(row, swayed) > 0, expected > 0))
    n = 300
    found = frequencies(row, params, n)
    assert np.abs(found - expected).max() <= 1.0 / n + 1e-5
    assert not found[expected == 0].any()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5),
        SamplingParams(top_k=20),
        SamplingParams(top_p=0.9),
        SamplingParams(top_p=0.99, temperature=4.0),
        SamplingParams(min_p=0.1),
        SamplingParams(top_k=50, top_p=0.8, min_p=0.05, temperature=1.5),
    ],
)
@pytest.mark.parametrize("size", [9 * COLUMNS, 9 * COLUMNS + 37])
def test_long_rows_take_shortcuts_to_the_same_probabilities(params, size):
    row = np.random.Generator(np.random.PCG64(7)).standard_normal(size).astype(np.float32)
    row[[3, 1500, size - 2]] = [9.0, 8.0, 8.5]
    n = 1500
    found = frequencies(row, params, n)
    expected = reference(row, params)
    likely = expected > 1e-3
    assert np.abs(found - expected)[likely].max() <= 1.0 / n + 1e-4
    assert not found[expected == 0].any()


def test_a_nucleus_may_reach_far_into_a_tail_of_unlikely_tokens():
    row = np.linspace(-16.0, -12.0, 9 * COLUMNS, dtype=np.float32)
    row[77] = 0.0
    params = SamplingParams(top_p=0.995)
    found = frequencies(row, params, 4000)
    expected = reference(row, params)
    assert 0.0 < 1.0 - expected[77] < 0.02
    assert abs(found[77] - expected[77]) <= 1.0 / 4000
    assert not found[expected == 0].any()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000),
    size=st.sampled_from([5, 700, 8 * COLUMNS, 8 * COLUMNS + 11]),
    k=st.integers(1, 300),
    steps=st.sampled_from([3, 50, 10**6]),
)
def test_largest_is_the_k_best_and_their_ties(seed, size, k, steps):
    k = min(k, size)
    row = np.random.Generator(np.random.PCG64(seed)).integers(0, steps, size).astype(np.float32)
    edge = np.sort(row)[-k]
    assert largest(row, k).tolist() == np.flatnonzero(row >= edge).tolist()


def test_bias_then_repetition_then_presence_and_frequency():
    params = SamplingParams(
        logit_bias=((0, 5.0), (3, -100.0)), repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25
    )
    sampler = Sampler(params, 0, (1, 1, 2))
    for token in (4, 4, 0):
        sampler.note(token)
    row = np.array([1, 2, -2, 7, 8, 6], dtype=np.float32)
    sampler._edit(row)
    # 0: biased to 6, halved (output), one presence and one frequency; 1 and 2: prompt, so repetition only; 5: untouched
    assert row.tolist() == pytest.approx([2.25, 1.0, -4.0, -93.0, 3.0, 6.0])


def test_penalties_keep_counting_over_hundreds_of_tokens():
    sampler = Sampler(SamplingParams(temperature=0.0, frequency_penalty=0.01), 0, ())
    for token in range(300):
        for _ in range(token % 3):
            sampler.note(token)
    row = np.zeros(300, dtype=np.float32)
    sampler._edit(row)
    assert row.tolist() == pytest.approx([-0.01 * (token % 3) for token in range(300)])


def test_logprobs_are_those_of_the_raw_logits():
    raw = np.array([[1.0, 2.0, 3.0, 0.0, 3.0]], dtype=np.float32)
    params = SamplingParams(
        temperature=0.0, logit_bias=((3, 50.0),), repetition_penalty=1.5, logprobs=True, top_logprobs=3
    )
    (token,) = sample(raw.copy(), [Sampler(params, 0, (2,))])
    log_total = math.log(sum(math.exp(x) for x in raw[0].tolist()))
    assert token.token_id == 3
    assert token.logprob == pytest.approx(0.0 - log_total, abs=1e-6)
    assert [alternative.token_id for alternative in token.top] == [2, 4, 1]
    assert [alternative.logprob for alternative in token.top] == pytest.approx(
        [3 - log_total, 3 - log_total, 2 - log_total], abs=1e-6
    )


def test_more_alternatives_than_tokens_are_all_tokens():
    params = SamplingParams(logprobs=True, top_logprobs=20)
    (token,) = sample(np.array([[0.0, 1.0]], dtype=np.float32), [Sampler(params, 0, ())])
    assert [alternative.token_id for alternative in token.top] == [1, 0]
    assert sum(math.exp(alternative.logprob) for alternative in token.top) == pytest.approx(1.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), SamplingParams(top_k=2, logprobs=True)])
def test_a_row_that_is_no_numbers_ends_alone(bad, params):
    logits = np.array(
        [[0.0, 1.0, 5.0], [0.0, bad, 1.0], [-math.inf] * 3, [-math.inf, 2.0, -math.inf]], dtype=np.float32
    )
    tokens = sample(logits, [Sampler(params, seed, ()) for seed in range(4)])
    assert tokens[0] is not None
    assert tokens[1] is None
    assert tokens[2] is None
    assert tokens[3].token_id == 1


@pytest.mark.parametrize("size", [4, 8 * COLUMNS + 3])
def test_rounding_at_the_upper_end_never_draws_what_is_impossible(size):
    row = np.full(size, -math.inf, dtype=np.float32)
    row[:2] = 0.0
    sampler = Sampler(SamplingParams(), 0, ())
    sampler._generator = Grid(1)
    sampler._generator.uniforms = iter([1.0, 0.0])
    assert [sample(row[np.newaxis].copy(), [sampler])[0].token_id for _ in range(2)] == [1, 0]


def test_extreme_parameters_do_not_raise():
    for params in (
        SamplingParams(temperature=1e39),
        SamplingParams(temperature=math.nan),
        SamplingParams(top_p=0.0),
        SamplingParams(top_p=-1.0, min_p=7.0),
        SamplingParams(repetition_penalty=1e-45),
        SamplingParams(top_k=-3),
    ):
        sample(np.array([[0.5, -3.0, 2.0]], dtype=np.float32), [Sampler(params, -5, (0, 1))])


@pytest.mark.parametrize("penalty", [1e-300, 1e-45, 1e-38, 1e300])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_penalty_beyond_the_floats_still_gives_a_token(penalty, temperature):
    params = SamplingParams(temperature=temperature, repetition_penalty=penalty)
    row = np.array([[0.5, -3.0, 2.0, -np.inf]], dtype=np.float32)
    (token,) = sample(row, [Sampler(params, 1, (0, 1, 3))])
    assert token is not None
    assert token.token_id == (0 if penalty < 1 else 2)


@given(
    params=st.sampled_from(
        [SamplingParams(), SamplingParams(top_k=3), SamplingParams(top_p=0.5), SamplingParams(min_p=0.5, logprobs=True)]
    ),
    seed=st.integers(-(2**63), 2**64),
    count=st.integers(0, 5),
)
@settings(max_examples=20, deadline=None)
def test_each_drawn_token_takes_exactly_one_uniform(params, seed, count):
    sampler = Sampler(params, seed, ())
    for _ in range(count):
        sample(np.arange(8, dtype=np.float32)[np.newaxis], [sampler])
    fresh = np.random.Generator(np.random.PCG64(seed % 2**64))
    fresh.random(count)
    assert sampler._generator.random() == fresh.random()


@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_a_row_does_not_depend_on_its_neighbours(data):
    kinds = [
        SamplingParams(temperature=0.0),
        SamplingParams(),
        SamplingParams(top_k=4, top_p=0.9),
        SamplingParams(presence_penalty=1.0, logprobs=True, top_logprobs=2),
    ]
    chosen = data.draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=6))
    logits = np.random.Generator(np.random.PCG64(data.draw(st.integers(0, 99)))).standard_normal(
        (len(chosen), 50), dtype=np.float32
    )
    together = sample(logits.copy(), [Sampler(params, seed, ()) for seed, params in enumerate(chosen)])
    alone = [sample(logits[i : i + 1].copy(), [Sampler(params, i, ())])[0] for i, params in enumerate(chosen)]
    assert together == alone
