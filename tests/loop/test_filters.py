import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from hitsend.core.request import SamplingParams
from hitsend.serve.loop.filters import MAX_REPEAT, Breakers, Repeats, without_atypical, without_top_choices
from hitsend.serve.loop.sampler import Sampler, sample
from tests.loop.driven import Driven, submit

WEIGHTS = npst.arrays(np.float32, st.integers(1, 40), elements=st.sampled_from([0.0, 0.01, 0.1, 0.3, 0.5, 1.0]))


def penalties(tokens, breakers=frozenset(), **fields):
    row = np.zeros(16, np.float32)
    params = SamplingParams(**({"dry_multiplier": 1.0, "dry_base": 2.0, "dry_allowed_length": 2} | fields))
    Repeats(params, tokens, frozenset(breakers)).penalise(row)
    return {token: -float(value) for token, value in enumerate(row) if value}


def by_definition(tokens, breakers, allowed):
    """For each token: the longest passage in front of an earlier occurrence that the text ends with."""
    found = {}
    for place in range(1, len(tokens)):
        length = 0
        while length < min(place, MAX_REPEAT):
            if tokens[place - 1 - length] != tokens[len(tokens) - 1 - length] or tokens[place - 1 - length] in breakers:
                break
            length += 1
        if length >= allowed:
            found[tokens[place]] = max(found.get(tokens[place], 0.0), 2.0 ** (length - allowed))
    return found


def test_a_longer_repeat_costs_more():
    assert penalties([1, 2, 3, 9, 1, 2]) == {3: 1.0}
    assert penalties([5, 1, 2, 3, 9, 5, 1, 2]) == {3: 2.0}
    assert penalties([1, 2, 3, 9, 7, 2]) == {}, "one token in common is allowed"


def test_no_repeat_goes_over_a_breaker():
    assert penalties([5, 1, 2, 3, 9, 5, 1, 2], {1}) == {}
    assert penalties([5, 1, 2, 3, 9, 5, 1, 2], {5}) == {3: 1.0}


def test_very_long_repeats_stay_numbers():
    (cost,) = penalties([1] * 500, dry_base=8.0).values()
    assert math.isfinite(cost)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 3), max_size=30),
    st.sets(st.integers(0, 3), max_size=2),
    st.integers(1, 4),
    st.integers(0, 9),
)
def test_repeats_are_those_of_the_definition_however_they_came(tokens, breakers, allowed, split):
    row = np.zeros(16, np.float32)
    params = SamplingParams(dry_multiplier=1.0, dry_base=2.0, dry_allowed_length=allowed)
    repeats = Repeats(params, tokens[:split], frozenset(breakers))
    for token in tokens[split:]:
        repeats.add(token)
    repeats.penalise(row)
    assert {t: -float(v) for t, v in enumerate(row) if v} == by_definition(tokens, breakers, allowed)


@pytest.mark.slow  # many draws
@settings(max_examples=200, deadline=None)
@given(WEIGHTS.filter(lambda weights: weights.sum() > 0), st.sampled_from([0.1, 0.5, 0.9]))
def test_typical_keeps_the_nearest_to_the_expected_surprise(weights, typical_p):
    kept = without_atypical(weights.copy(), typical_p)
    shares = weights.astype(float) / weights.astype(float).sum()
    surprise = {i: -math.log(share) for i, share in enumerate(shares) if share}
    expected = sum(shares[i] * value for i, value in surprise.items())
    order = sorted(surprise, key=lambda i: abs(surprise[i] - expected))
    away = [abs(surprise[i] - expected) for i in order]
    # a sum that meets the bound exactly may be rounded to either side of it, and so may two equal distances
    last = [int(np.searchsorted(np.cumsum([shares[i] for i in order]), typical_p + off)) for off in (-1e-9, 1e-9)]
    least, most = (away[min(at, len(away) - 1)] for at in last)
    wanted = {i for i, distance in zip(order, away, strict=True) if distance < least - 1e-9}
    assert wanted <= set(np.flatnonzero(kept).tolist())
    assert all(abs(surprise[int(i)] - expected) <= most + 1e-9 for i in np.flatnonzero(kept))
    assert kept.max() == 1


def test_xtc_leaves_the_lightest_of_the_top_choices():
    weights = np.array([1.0, 0.6, 0.5, 0.1], np.float32)
    assert without_top_choices(weights, 0.2).tolist() == pytest.approx([0.0, 0.0, 0.5, 0.1])
    assert without_top_choices(weights, 0.4).tolist() == weights.tolist(), "a single one is no choice"


@settings(max_examples=100, deadline=None)
@given(WEIGHTS.filter(lambda weights: weights.sum() > 0), st.floats(0, 0.5))
def test_xtc_always_leaves_something(weights, threshold):
    assert without_top_choices(weights, threshold).sum() > 0


@pytest.mark.parametrize(("probability", "uniforms"), [(0.0, 1), (0.5, 2), (1.0, 2)])
def test_xtc_takes_one_uniform_more(probability, uniforms):
    sampler = Sampler(SamplingParams(xtc_probability=probability), 3, ())
    sample(np.zeros((1, 8), np.float32), [sampler])
    other = np.random.Generator(np.random.PCG64(3))
    other.random(uniforms)
    assert sampler._generator.random() == other.random()


def test_a_token_breaks_if_it_contains_the_text():
    breakers = Breakers((b"a\n", b"\n", b"x", b"", b":\n:", "é".encode(), "é".encode()[:1]))
    assert breakers.find(["\n"]) == {0, 1, 4}
    assert breakers.find([":", "é"]) == {4, 5}
    assert breakers.find(["\nx"]) == frozenset(), "over two tokens is in none"
    assert breakers.find([]) == frozenset()
    overlapping = Breakers((b"a", b"aa"))
    assert overlapping.find(["aa"]) == {1}


def test_no_end_before_min_tokens():
    ends = {"end_token_ids": frozenset({7}), "next_token": lambda tokens: 7}
    driven = Driven(**ends)
    driven.handle(submit("a", 5, min_tokens=3, max_tokens=8))
    driven.run()
    assert (driven.done["a", 0].reason, driven.done["a", 0].num_output_tokens) == ("stop", 3)
    assert 7 not in driven.tokens("a")


def test_ignore_eos_goes_on_to_max_tokens():
    driven = Driven(end_token_ids=frozenset({7}), next_token=lambda tokens: 7)
    driven.handle(submit("a", 5, ignore_eos=True, max_tokens=8))
    driven.run()
    assert (driven.done["a", 0].reason, driven.done["a", 0].num_output_tokens) == ("length", 8)


def test_a_stop_token_ends_like_the_end_token():
    driven = Driven(next_token=lambda tokens: 9 if len(tokens) == 8 else 3)
    driven.handle(submit("a", 5, stop_token_ids=(9, 11), max_tokens=20))
    driven.run()
    assert (driven.done["a", 0].reason, driven.tokens("a")) == ("stop", [3, 3, 3])


def test_dry_ends_a_loop_of_words_and_breakers_allow_it():
    def words(tokens):
        return 10 + len(tokens) % 3

    free = Driven(next_token=words)
    free.handle(submit("a", 3, max_tokens=30, dry_multiplier=0.0))
    assert len(set(free.run().tokens("a"))) == 3
    dry = Driven(next_token=words)
    dry.handle(submit("a", 3, max_tokens=30, dry_multiplier=30.0, dry_sequence_breakers=()))
    assert len(set(dry.run().tokens("a"))) > 3
    broken = Driven(next_token=words)
    broken.handle(submit("a", 3, max_tokens=30, dry_multiplier=30.0, dry_sequence_breakers=("\x0a", "\x0b", "\x0c")))
    assert broken.run().tokens("a") == free.tokens("a")


@pytest.mark.parametrize(
    "fields", [{"typical_p": 0.5}, {"xtc_probability": 1.0}, {"dry_multiplier": 1.0}, {"min_tokens": 2}]
)
def test_logprobs_stay_those_of_the_raw_logits(fields):
    row = np.array([[0.0, 1.0, 2.0, 3.0]], dtype=np.float32)
    params = SamplingParams(logprobs=True, top_logprobs=4, **fields)
    (token,) = sample(row.copy(), [Sampler(params, 0, (1, 2, 3), end_token_ids=frozenset({3}))])
    expected = row[0] - math.log(float(np.exp(row[0]).sum()))
    assert [entry.logprob for entry in token.top] == pytest.approx(sorted(expected.tolist(), reverse=True))
