"""Guesses from a sequence's own text, what passes cost, and how long drafts should be."""

import random

import pytest

from hitsend.core.drafts import MAX_DRAFT
from hitsend.serve.loop.speculate import (
    GRAM,
    LENGTHS,
    MAX_INDEXED,
    MIN_GAIN,
    KnownCosts,
    Lookup,
    StepCosts,
    draft_lengths,
)


def grown(prompt, more=()):
    """A lookup that saw the prompt, and then one token after the other."""
    ids = list(prompt)
    lookup = Lookup(ids)
    lookup.catch_up()
    for token in more:
        ids.append(token)
        lookup.catch_up()
    return lookup


def test_what_followed_before_is_expected_again():
    text = list(range(10, 40))
    assert grown([*text, 7, 8, 10, 11, 12]).draft(4) == (13, 14, 15, 16)
    assert grown([*text, 7, 8], [10, 11, 12]).draft(4) == (13, 14, 15, 16)


def test_two_equal_tokens_are_no_place():
    assert grown([*range(10, 40), 7, 8, 11, 12]).draft(4) == ()


@pytest.mark.parametrize("length", range(GRAM + 1))
def test_short_texts_have_no_guess(length):
    assert grown(range(length)).draft(3) == ()
    assert grown(range(length)).chance == 0


def test_the_latest_place_counts():
    assert grown([1, 2, 3, 50, 1, 2, 3, 60, 1, 2, 3]).draft(1) == (60,)


def test_a_loop_goes_round():
    assert grown([9, 1, 2, 3, 1, 2, 3]).draft(7) == (1, 2, 3, 1, 2, 3, 1)


def test_after_an_edit_it_finds_back():
    text = list(range(100, 160))
    copied = [*text[:20], 7, *text[21:]]
    replaced = grown([*text, 5, 6], copied[:22])
    assert replaced.draft(3) == tuple(text[22:25]), "one token behind the replaced one is enough"
    left_out = grown([*text, 5, 6], [*text[:20], text[23]])
    assert left_out.draft(3) == tuple(text[24:27])
    put_in = grown([*text, 5, 6], [*text[:20], 7, 8, text[20]])
    assert put_in.draft(3) == tuple(text[21:24])


def test_the_chance_is_what_guesses_came_to():
    text = list(range(100, 180))
    right = grown([*text, 5, 6], text[:60])
    wrong = grown([1, 2, 3] * 3, [random.Random(n).choice([1, 2, 3, 4, 5, 6]) for n in range(60)])
    assert right.chance > 0.9
    assert wrong.chance < 0.5


def test_nobody_begins_with_a_draft():
    costs = StepCosts()
    for _ in range(20):
        costs.observe(1, 1, 0.0125)
        costs.observe(1, 9, 0.053)
    fresh = grown([*range(10, 40), 10, 11, 12])
    assert 0 < fresh.chance < 0.3
    assert draft_lengths([fresh.chance], [MAX_DRAFT], costs) == [0]


def test_an_index_is_bounded_and_right_where_it_was_cut():
    rng = random.Random(3)
    ids = [rng.randrange(50_000) for _ in range(2 * MAX_INDEXED + 1000)]
    ids += ids[-500:-490]
    lookup = grown(ids)
    assert lookup.draft(3) == tuple(ids[-500:-497])
    assert len(lookup._index) <= MAX_INDEXED
    for token in ids[-500:-400]:
        ids.append(token)
    lookup.catch_up()


def test_work_per_token_does_not_grow():
    """Counted in looked-up tokens: a list that counts how often it is read."""

    class Counting(list):
        reads = 0

        def __getitem__(self, place):
            self.reads += len(range(*place.indices(len(self)))) if isinstance(place, slice) else 1
            return list.__getitem__(self, place)

    rng = random.Random(1)
    for size in (500, 8000):
        ids = Counting(rng.randrange(30) for _ in range(size))
        lookup = Lookup(ids)
        lookup.catch_up()
        ids.reads = 0
        for _ in range(200):
            list.append(ids, rng.randrange(30))
            lookup.catch_up()
            lookup.draft(4)
        assert ids.reads < 200 * 20


@pytest.mark.parametrize(("call_ms", "token_ms"), [(7.4, 5.1), (5.5, 2.4), (10.0, 0.2)])
def test_costs_are_found_from_few_passes(call_ms, token_ms):
    rng = random.Random(5)
    costs = StepCosts()
    for _ in range(60):
        calls, tokens = rng.choice([(1, 1), (1, 4), (1, 8), (1, 16), (2, 9)])
        noise = rng.uniform(0.9, 1.1)
        costs.observe(calls, tokens, (call_ms * calls + token_ms * tokens) * noise / 1000)
    for calls, tokens in ((1, 1), (1, 8), (2, 20)):
        expected = (call_ms * calls + token_ms * tokens) / 1000
        assert costs.seconds(calls, tokens) == pytest.approx(expected, rel=0.1)


def test_costs_of_one_size_leave_the_rest_to_belief():
    costs = StepCosts()
    for _ in range(500):
        costs.observe(1, 1, 0.02)
    assert costs.seconds(1, 1) == pytest.approx(0.02, rel=0.02)
    assert costs.token_s == pytest.approx(0.02 * StepCosts.PRIOR, rel=0.1)


def test_one_hiccup_changes_little():
    costs = StepCosts()
    for _ in range(40):
        costs.observe(1, 1, 0.0125)
        costs.observe(1, 8, 0.048)
    costs.observe(1, 1, 5.0)
    assert costs.seconds(1, 1) < 0.02


def costs_of(call_ms, token_ms):
    costs = StepCosts()
    for _ in range(50):
        for calls, tokens in ((1, 1), (1, 8), (1, 32), (2, 12)):
            costs.observe(calls, tokens, (call_ms * calls + token_ms * tokens) / 1000)
    return costs


def test_sure_guesses_make_long_drafts_and_doubtful_ones_none():
    costs = costs_of(7.4, 5.1)
    assert draft_lengths([0.98], [MAX_DRAFT], costs)[0] >= 9
    middle = draft_lengths([0.8], [MAX_DRAFT], costs)[0]
    assert 1 <= middle <= 5
    assert draft_lengths([0.3], [MAX_DRAFT], costs) == [0]
    assert draft_lengths([0.98], [2], costs) == [2]
    assert draft_lengths([0.98], [0], costs) == [0]


def test_a_full_batch_has_none():
    costs = costs_of(7.4, 5.1)
    assert draft_lengths([0.8] * 32, [MAX_DRAFT] * 32, costs) == [0] * 32
    assert any(draft_lengths([0.95] * 3, [MAX_DRAFT] * 3, costs))


def test_only_those_whose_guesses_are_good_get_one():
    lengths = draft_lengths([0.97, 0.0, 0.3, 0.97], [MAX_DRAFT] * 4, costs_of(7.4, 0.5))
    assert lengths[1:3] == [0, 0]
    assert lengths[0] == lengths[3] > 0


def test_what_proposing_takes_is_counted():
    costs = costs_of(7.4, 0.5)
    assert draft_lengths([0.9], [MAX_DRAFT], costs)[0] > 0
    assert draft_lengths([0.9], [MAX_DRAFT], costs, lambda count, length: 0.01 * length) == [0]


def test_lengths_are_in_reach():
    assert max(LENGTHS) == MAX_DRAFT
    rng = random.Random(2)
    for _ in range(300):
        count = rng.randint(1, 12)
        most = [rng.randint(0, MAX_DRAFT) for _ in range(count)]
        lengths = draft_lengths([rng.random() for _ in range(count)], most, costs_of(7.4, rng.uniform(0.1, 5)))
        assert all(0 <= length <= limit for length, limit in zip(lengths, most, strict=True))
        assert len({length for length in lengths if length}) <= 1
        assert count == 1 or lengths.count(0) != 1, "one alone in a call has other last bits"


def test_where_one_guess_each_would_pay_somebody_gets_a_draft():
    rng = random.Random(3)
    seen = {True: 0, False: 0}
    for _ in range(3000):
        count = rng.choice((1, 2, 8, 32))
        chances = [rng.random() ** rng.choice((1, 4)) for _ in range(count)]
        costs = KnownCosts(rng.random(), rng.random() / rng.choice((1, 10, 100)))
        plain, gained, best = count / costs.seconds(1, count), 0.0, 0.0
        for number, chance in enumerate(sorted(chances, reverse=True), 1):
            if chance > plain * costs.token_s:
                gained += chance
                calls = 1 if number == count else 2
                if number != count - 1:
                    best = max(best, (count + gained) / costs.seconds(calls, count + number))
        pays = best > plain * MIN_GAIN
        seen[pays] += 1
        if pays:
            assert any(draft_lengths(chances, [15] * count, costs))
    assert min(seen.values()) > 300
