import math
import random
from collections import defaultdict
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hitsend.core.request import IDLE_TIER
from hitsend.serve.loop.messages import Submit
from hitsend.serve.loop.pace import BLAS_PIECE, CROWD, FINEST, FLOOR, PIECE, Pace, StepCosts
from hitsend.serve.loop.roster import LoopLimits
from tests.loop.driven import Driven, submit
from tests.loop.simulated import (
    DECODE_S,
    OUTPUT_TOKENS,
    PREFILL_S,
    SAMPLING,
    STEP_S,
    CostlyDecoder,
    Simulated,
    percentile,
)

BUDGET = 512
UNPACED = LoopLimits(tpot_target_s=math.inf, ttft_target_s=math.inf)


def seconds(decodes, prefill):
    return STEP_S + DECODE_S * decodes + PREFILL_S * prefill


def taught(target_s=0.1, ttft_s=2.0, steps=400, noise=None):
    """A pace that has seen steps of all kinds."""
    pace, rng = Pace(target_s, ttft_s), random.Random(1)
    for _ in range(steps):
        decodes, prefill = rng.randrange(1, 33), rng.choice([0, 0, 0, 64, 128])
        pace.costs.learn(decodes, prefill, seconds(decodes, prefill) * (noise(rng) if noise else 1.0))
    return pace


def test_the_costs_of_a_steady_machine_are_found():
    costs = taught(steps=4000).costs
    for decodes in (1, 4, 8, 16, 32):
        assert costs.decodes_s(decodes) == pytest.approx(seconds(decodes, 0), rel=0.1)
    assert costs.prefill_s == pytest.approx(PREFILL_S, rel=0.1)


@pytest.mark.parametrize("seed", range(5))
def test_steps_that_took_ten_times_as_long_now_and_then_are_no_lesson(seed):
    rng = random.Random(seed)

    def noise(_):
        return rng.uniform(0.8, 1.25) * (10.0 if rng.random() < 0.02 else 1.0)

    costs = taught(noise=noise, steps=1000).costs
    assert costs.decodes_s(8) == pytest.approx(seconds(8, 0), rel=0.4)
    assert costs.prefill_s == pytest.approx(PREFILL_S, rel=0.4)


def test_one_hiccup_moves_an_estimate_by_a_twentieth_at_most():
    costs = taught().costs
    before_s = costs.decodes_s(8)
    costs.learn(8, 0, 30.0)
    assert costs.decodes_s(8) <= before_s * 1.06
    prefill_s = costs.prefill_s
    costs.learn(8, 64, 30.0)
    assert costs.prefill_s <= prefill_s * 1.06


def test_a_machine_that_gets_slower_is_followed():
    costs = taught().costs
    for _ in range(160):
        costs.learn(8, 0, 3 * seconds(8, 0))
        costs.learn(8, 64, 3 * seconds(8, 64))
    assert costs.decodes_s(8) == pytest.approx(3 * seconds(8, 0), rel=0.15)
    assert costs.prefill_s == pytest.approx(3 * PREFILL_S, rel=0.2)


def test_the_costs_never_become_negative():
    costs = StepCosts()
    for decodes, prefill, took in ((8, 0, 1.0), (1, 64, 0.0), (1, 0, 0.0), (8, 64, 0.0), (32, 0, 0.0)):
        for _ in range(50):
            costs.learn(decodes, prefill, took)
            assert min(costs.fixed_s, costs.decode_s, costs.prefill_s) >= 0.0


def test_without_decodes_prompts_have_the_whole_budget():
    assert taught().tokens(0, BUDGET, is_long=True) == BUDGET
    assert Pace(0.1, 2.0).tokens(8, BUDGET, is_long=False) == BUDGET  # nothing is known yet
    assert taught(math.inf).tokens(32, BUDGET, is_long=True) == BUDGET


TAUGHT = taught().costs


def first_tokens(decodes, target_s, *, is_long):
    pace = Pace(target_s, 2.0)
    pace.costs = TAUGHT
    return pace.tokens(decodes, BUDGET, is_long=is_long)


@pytest.mark.parametrize("is_long", [False, True])
def test_a_tighter_target_never_means_more(is_long):
    told = [first_tokens(8, target_s, is_long=is_long) for target_s in (0.01, 0.05, 0.1, 0.2, 0.5, 2.0)]
    assert told == sorted(told)


def test_more_decodes_never_mean_more_of_a_short_prompt():
    told = [first_tokens(decodes, 0.5, is_long=False) for decodes in range(1, 65)]
    assert told == sorted(told, reverse=True)
    assert told[0] > told[-1]


def test_chunks_end_at_whole_pieces_but_for_long_prompts():
    for decodes in range(1, 65):
        for target_s in (0.02, 0.1, 0.3, 1.0):
            assert first_tokens(decodes, target_s, is_long=False) % PIECE == 0
            fine = first_tokens(decodes, target_s, is_long=True)
            assert fine % PIECE == 0 or (FINEST if target_s > 0.02 or decodes > 3 else 3) <= fine < PIECE


def test_no_short_prompt_goes_in_smaller_pieces_than_are_worth_a_call():
    for decodes in range(1, 65):
        coarse, fine = Pace(0.1, 2.0, piece=BLAS_PIECE), Pace(0.1, 2.0)
        coarse.costs = fine.costs = TAUGHT
        assert coarse.tokens(decodes, BUDGET, is_long=False) >= BLAS_PIECE
        assert coarse.tokens(decodes, 100, is_long=False) <= 100
        assert fine.tokens(decodes, BUDGET, is_long=False) >= PIECE


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    decodes=st.integers(1, 64),
    target_s=st.floats(0.001, 3.0),
    scale=st.floats(0.001, 100.0),
    is_long=st.booleans(),
    seed=st.integers(0, 1000),
    piece=st.sampled_from([PIECE, BLAS_PIECE]),
)
def test_neither_prompts_nor_decodes_starve(decodes, target_s, scale, is_long, seed, piece):
    """Whatever the machine: what prompts take lies between what is promised to them and what is promised to others."""
    rng, pace = random.Random(seed), Pace(target_s, 2.0, piece=piece)
    prefill_s = decode_s = most_s = 0.0
    for number in range(2000):
        tokens = pace.tokens(decodes, BUDGET, is_long=is_long) if number > 20 else (0 if number else BUDGET)
        took_s = scale * seconds(0 if number == 0 else decodes, tokens) * rng.uniform(0.9, 1.1)
        pace.took(0 if number == 0 else decodes, tokens, took_s)
        if number > 200:
            prefill_s += scale * PREFILL_S * tokens
            decode_s += scale * seconds(decodes, 0)
            most_s = max(most_s, scale * PREFILL_S * tokens)
    alone_s = scale * seconds(decodes, 0)
    assert prefill_s + most_s >= 0.6 * FLOOR * decode_s or prefill_s >= 0.6 * 1800 * scale * PREFILL_S * BUDGET
    share_s = max(target_s - alone_s, FLOOR * alone_s)
    assert prefill_s <= 1.5 * 1800 * share_s + most_s + 0.25 * decode_s


class FineDecoder(CostlyDecoder):
    """Chunks of less than a piece cost more per token, and a call of their own: as measured."""

    def decode(self, batch):
        sizes = np.bincount(batch.slots)
        self.clock.advance(sum(STEP_S + (int(size) % PIECE) * PREFILL_S * 0.4 for size in sizes[sizes > 1]))
        return super().decode(batch)


def arrival(at, name, prompt_tokens, max_tokens):
    prompt = tuple(random.Random(name).choices(range(1, 8), k=prompt_tokens))
    return at, Submit(name, prompt, SAMPLING, (1,), max_tokens, 600.0)


def beside(extra, limits=None):
    decodes = [arrival(0.0, f"d{number}", 64, 300) for number in range(8)]
    return Simulated([*decodes, *extra], cells_per_slot=8192, limits=limits, decoder=FineDecoder)


def test_a_prompt_of_4000_tokens_raises_the_p99_between_tokens_of_eight_decodes_to_twice_at_most():
    alone, together = beside([]), beside([arrival(3.0, "long", 4000, 10)])
    assert percentile(together.gaps_s("d"), 0.99) <= 2.0 * percentile(alone.gaps_s("d"), 0.99)
    unpaced = beside([arrival(3.0, "long", 4000, 10)], UNPACED)
    assert percentile(unpaced.gaps_s("d"), 0.99) > 10 * percentile(alone.gaps_s("d"), 0.99)
    # and it is done in bounded time: no more than five times what it takes alone
    assert together.ttft_s["long"] <= 5 * 4000 * PREFILL_S
    assert together.done["long"].num_output_tokens == 10


class FarDecoder(FineDecoder):
    """Far into a prompt each of its tokens costs ten times as much: attention over all that is before it."""

    def decode(self, batch):
        sizes = np.bincount(batch.slots)
        far = (sizes[batch.slots] > 1) | (batch.positions > 400)
        self.clock.advance(float((9 * PREFILL_S * batch.positions * far).sum()) / 4000)
        return super().decode(batch)


def test_far_into_a_long_prompt_chunks_are_finer_still():
    decodes = [arrival(0.0, f"d{number}", 64, 300) for number in range(8)]
    alone, together = (
        Simulated([*decodes, *extra], cells_per_slot=8192, decoder=FarDecoder)
        for extra in ([], [arrival(3.0, "long", 4000, 10)])
    )
    assert percentile(together.gaps_s("d"), 0.99) <= 2.2 * percentile(alone.gaps_s("d"), 0.99)
    assert together.done["long"].num_output_tokens == 10


def test_a_prompt_is_long_that_cannot_be_on_time_even_with_the_whole_machine():
    pace = Pace(0.1, 2.0)
    assert [pace.is_long(tokens) for tokens in (1024, 1025, 4000)] == [False, True, True], "nothing is measured yet"
    for prefill_s, shortest in ((0.0021, 1025), (0.001, 2001), (0.0007, 2858), (0.0001, 3073)):
        pace.costs.prefill_s = prefill_s
        assert not pace.is_long(shortest - 1)
        assert pace.is_long(shortest)


def test_a_short_prompt_passes_a_long_one_that_cannot_be_on_time():
    both = [arrival(3.0, "long", 4000, 10), arrival(3.5, "short", 128, 10)]
    assert beside(both).ttft_s["short"] < 2.0
    assert beside(both, UNPACED).ttft_s["short"] > 5.0


def test_a_stream_of_short_prompts_does_not_hold_up_a_long_one_for_ever():
    short = [arrival(3.0 + number / 4, f"short{number}", 64, 2) for number in range(400)]
    ran = Simulated([arrival(2.9, "long", 4000, 10), *short], cells_per_slot=8192, decoder=FineDecoder)
    assert ran.ended_s["long"] < 100
    assert {done.reason for done in ran.done.values()} == {"length"}


def test_pacing_costs_no_throughput_when_32_come_at_once():
    burst = [arrival(0.0, f"r{number}", 128, OUTPUT_TOKENS) for number in range(96)]
    ends = [max(ran.ended_s.values()) for ran in (Simulated(burst), Simulated(burst, limits=UNPACED))]
    assert ends[0] <= 1.02 * ends[1]


def prefilled(driven, request_id):
    """How many tokens of its prompt the next step computes."""
    return {row.request_id: row.prefill_tokens for row in driven.step()[-1].rows}[request_id]


def decoding(tpot_target_s=0.02):
    """One that decodes, in steps of 10 ms."""
    limits = LoopLimits(tpot_target_s=tpot_target_s, ttft_target_s=2.0)
    driven = Driven(num_slots=4, cells_per_slot=1024, limits=limits)
    driven.handle(submit("a", 5, max_tokens=600))
    for _ in range(5):
        driven.step()
    return driven


def test_a_late_prompt_has_the_whole_budget_as_long_as_it_can_be_on_time():
    driven = decoding()
    driven.handle(submit("b", 300))
    assert prefilled(driven, "b") == PIECE
    driven.clock.advance(1.1)
    assert prefilled(driven, "b") == 300 - PIECE
    driven.handle(submit("c", 300))
    driven.step()
    driven.clock.advance(2.1)
    assert prefilled(driven, "c") in {0, PIECE}, "too late: it may as well wait for a while"


class BusyDecoder(CostlyDecoder):
    """On a machine that does much else: even short prompts come late."""

    def decode(self, batch):
        begin = self.clock.now()
        found = super().decode(batch)
        self.clock.advance(7 * (self.clock.now() - begin))
        return found


class Pieces(Simulated):
    """What a step computes of each prompt, too."""

    def _take(self, report):
        for row in getattr(report, "rows", ()):
            self.pieces[row.request_id].append(row.prefill_tokens)
        super()._take(report)


@pytest.mark.parametrize("gap_s", [0.1, 0.2, 0.4])
def test_what_is_given_to_a_late_prompt_cuts_nobody_s_finer(gap_s, monkeypatch):
    """Bit for bit the same in company needs whole pieces, however few tokens the late one has left."""
    monkeypatch.setattr(Pieces, "pieces", defaultdict(list), raising=False)
    lengths = (1, 90, 90, 10)
    coming = [arrival(number * gap_s, f"r{number}", length, 20) for number, length in enumerate(lengths)]
    ran = Pieces(coming, num_slots=8, limits=LoopLimits(step_tokens=192), decoder=BusyDecoder)
    for number, length in enumerate(lengths):
        ends = set(accumulate(ran.pieces[f"r{number}"]))
        assert max(ends) == length
        assert all(end % PIECE == 0 for end in ends - {length})


def test_prompts_are_not_held_back_where_decodes_are_too_many_for_the_target():
    driven = decoding(tpot_target_s=0.001)
    driven.handle(submit("b", 300))
    assert prefilled(driven, "b") == 300


def test_a_decode_that_has_lost_holds_no_short_prompt_back():
    driven = decoding()
    driven.clock.advance(100.0)
    driven.handle(submit("b", 600))
    pieces = [prefilled(driven, "b") for _ in range(4)]
    assert min(pieces) >= PIECE


def warm_then(name, number, at, **more):
    """Some work, from which costs are learnt; then so many prompts at once."""
    before = [arrival(0.0, f"w{each}", 96, 24) for each in range(8)]
    crowd = [arrival(at, f"{name}{each}", 128, OUTPUT_TOKENS) for each in range(number)]
    return Simulated([*before, *crowd], **more)


def test_the_last_of_a_crowd_waits_for_the_prompts_before_it_and_not_for_decodes():
    prompts_s = 32 * 128 * PREFILL_S
    ran = warm_then("r", 32, 10.0)
    assert prompts_s <= ran.of("r")[-1] <= 1.1 * prompts_s
    few = warm_then("r", CROWD - 1, 10.0)
    assert percentile(few.gaps_s("r"), 0.5) < 0.1, "these are paced"


def test_a_crowd_is_one_until_none_of_it_is_left_and_most_can_keep_their_targets():
    pace = taught()
    tokens = math.ceil(2.0 / PREFILL_S * 1.5)
    assert not pace.crowds(CROWD - 1, tokens, is_lost=True)
    assert not pace.crowds(CROWD, tokens // 3, is_lost=True), "all of them can be on time"
    assert pace.crowds(CROWD, tokens, is_lost=False)
    assert pace.crowds(1, 1, is_lost=False)
    assert pace.crowds(0, 0, is_lost=True)
    assert not pace.crowds(0, 0, is_lost=False)
    assert not pace.crowds(1, 1, is_lost=True)


def crowding(num_slots=64, **more):
    """One that decodes, and a crowd that has just come: what the next step computes of it."""
    limits = LoopLimits(tpot_target_s=0.02, ttft_target_s=0.05)
    driven = Driven(num_slots=num_slots, cells_per_slot=1024, limits=limits)
    driven.handle(submit("a", 5, max_tokens=600))
    for _ in range(5):
        driven.step()
    for number in range(2 * CROWD):
        driven.handle(submit(f"b{number}", 100, **more))
    return sum(row.prefill_tokens for row in driven.step()[-1].rows)


def test_neither_idle_work_nor_those_without_a_place_are_a_crowd():
    assert crowding() > 4 * PIECE
    assert crowding(tier=IDLE_TIER) <= PIECE
    assert crowding(num_slots=CROWD) <= PIECE, "one decodes, so that as many less one can begin"


def mixed(rate, limits, seconds=90.0):
    """Requests a second that kept 2 s to the first token and 100 ms per token: short, medium and long prompts."""
    rng, coming, at = random.Random(5), [], 0.0
    while (at := at + rng.expovariate(rate)) < seconds:
        prompt, output = rng.choices([(124, 64), (450, 96), (2000, 48)], [0.7, 0.25, 0.05])[0]
        coming.append(arrival(at, f"r{len(coming)}", prompt, output))
    ran = Simulated(coming, cells_per_slot=2816, limits=limits)
    tpot_s = {name: (told[-1] - told[0]) / (len(told) - 1) for name, told in ran.told_at.items()}
    return sum(ran.ttft_s[name] <= 2.0 and tpot_s[name] <= 0.1 for name in tpot_s) / seconds


def test_more_requests_keep_both_targets_than_first_come_first_served():
    """As many as 2,048 prompt tokens a step, in the order in which they come, is what llama-server does."""
    greedy = LoopLimits(step_tokens=2048, tpot_target_s=math.inf, ttft_target_s=math.inf)
    theirs, ours = ([mixed(rate, limits) for rate in (0.7, 0.9)] for limits in (greedy, LoopLimits()))
    assert all(own >= 1.1 * their for own, their in zip(ours, theirs, strict=True)), (ours, theirs)
    assert max(ours) >= 1.25 * max(theirs), (ours, theirs)
