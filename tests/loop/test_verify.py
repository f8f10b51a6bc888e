"""Drafts change how fast a sequence speaks, never what it says."""

import random
from collections import Counter
from itertools import pairwise

import msgspec
import numpy as np
import pytest

from hitsend.core.request import SamplingParams
from hitsend.serve.loop.decoder import DecoderFailed
from hitsend.serve.loop.messages import Abort, Pause, Resume, StepReport, Submit
from hitsend.serve.loop.roster import LoopLimits
from hitsend.serve.loop.speculate import KnownCosts, StepCosts
from hitsend.serve.loop.verify import PromptLookup, Speculator
from tests.loop.driven import Driven, submit

VOCAB = 64
PARAMS = {
    "greedy": SamplingParams(temperature=0.0),
    "plain": SamplingParams(),
    "top_k": SamplingParams(top_k=4, temperature=0.7),
    "top_p": SamplingParams(top_p=0.8, min_p=0.05),
    "penalties": SamplingParams(presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.2),
    "dry": SamplingParams(dry_multiplier=1.0, typical_p=0.9, xtc_probability=0.5, xtc_threshold=0.1),
    "bias": SamplingParams(logit_bias=((3, 2.0), (4, -5.0)), min_tokens=4, stop_token_ids=(5,)),
    "logprobs": SamplingParams(logprobs=True, top_logprobs=3, temperature=1.3),
}


class Fixed:
    """Drafts that a test names: a function of the sequence and the length."""

    def __init__(self, draft):
        self._draft = draft
        self.learnt = []

    def name_for(self, sequence):
        return "fixed"

    def chances(self, sequences):
        return [1.0] * len(sequences)

    def longest(self, sequences):
        return 15

    def propose(self, sequences, length):
        return [tuple(self._draft(sequence, length)) for sequence in sequences]

    def seconds(self, count, length):
        return 0.0

    def learn(self, sequence, drafted):
        self.learnt.append((sequence.request_id, drafted.proposed, drafted.accepted))


def driven(speculator=None, *, step_tokens=64, **sizes):
    limits = LoopLimits(step_tokens=step_tokens, reserve_tokens=4, check_every_step=True)
    sizes = {"vocab_size": VOCAB, "num_slots": 4, "cells_per_slot": 80, "end_token_ids": frozenset({0})} | sizes
    return Driven(limits=limits, speculator=speculator, **sizes)


class Free(StepCosts):
    """A token more in a pass costs next to nothing."""

    is_known = True

    def observe(self, calls, tokens, seconds):
        pass

    def seconds(self, calls, tokens):
        return 1.0 + 1e-6 * tokens

    @property
    def token_s(self):
        return 1e-6


def eager(proposer):
    return Speculator(proposer, Free())


def said(run):
    """Everything that clients and bills see of it; prompts by request: which choice computed it for all may differ."""
    ends = {key: (done.reason, done.code, done.num_output_tokens) for key, done in run.done.items()}
    prompts = {}
    for (name, _), done in run.done.items():
        prompts[name] = max(prompts.get(name, 0), done.num_prompt_tokens_computed)
    return dict(run.sampled), ends, prompts


def spoil(rng, truth, length):
    """The truth, up to some place; garbage from there; sometimes shorter, sometimes nothing."""
    right = rng.choice([0, 1, 2, length, length])
    guess = [*truth[:right], *(rng.randrange(VOCAB) for _ in range(length))][:length]
    return guess[: rng.choice([0, 1, length, length])]


def oracle(rng, truth):
    def draft(sequence, length):
        rest = truth[sequence.request_id, sequence.choice][sequence.num_output_tokens :]
        return spoil(rng, [token.token_id for token in rest], length)

    return Fixed(draft)


@pytest.mark.parametrize("name", PARAMS)
def test_the_same_is_said_whatever_was_guessed(name):
    jobs = [submit(number, 6, seeds=(number, 7), max_tokens=30) for number in range(3)]
    jobs = [msgspec.structs.replace(job, sampling=PARAMS[name]) for job in jobs]
    plain = driven(logits_of=likely_to_go_on)
    plain.handle(*jobs)
    plain.run()
    for seed in range(6):
        proposer = oracle(random.Random(seed), plain.sampled)
        run = driven(eager(proposer), logits_of=likely_to_go_on)
        run.handle(*jobs)
        run.run()
        assert said(run) == said(plain)
        assert any(accepted for _, _, accepted in proposer.learnt)
        assert any(accepted < proposed for _, proposed, accepted in proposer.learnt)
        assert len(run.of(StepReport)) < len(plain.of(StepReport))
        assert run.loop.pulse().decode_tokens_total == plain.loop.pulse().decode_tokens_total


@pytest.mark.parametrize("place", range(8))
def test_a_draft_can_be_wrong_at_every_place(place):
    job = submit("a", 5, max_tokens=40, temperature=0.0)
    plain = driven(end_token_ids=frozenset())
    plain.handle(job)
    plain.run()
    truth = plain.tokens("a")

    def draft(sequence, length):
        guess = truth[sequence.num_output_tokens :][: min(length, 7)]
        if place < len(guess):
            guess[place] = (guess[place] + 1) % VOCAB
        return guess

    proposer = Fixed(draft)
    run = driven(eager(proposer), end_token_ids=frozenset())
    run.handle(job)
    run.run()
    assert said(run) == said(plain)
    whole = [accepted for _, proposed, accepted in proposer.learnt if proposed == 7]
    assert whole
    assert set(whole) == {min(place, 7)}
    assert run.decoder.cells_filled == 0


def test_rows_tell_what_was_guessed_and_add_up():
    job = submit("a", 5, max_tokens=40)
    plain = driven(end_token_ids=frozenset())
    plain.handle(job)
    plain.run()
    run = driven(eager(oracle(random.Random(1), plain.sampled)), end_token_ids=frozenset())
    run.handle(job)
    run.run()
    rows = [row for report in run.of(StepReport) for row in report.rows]
    assert sum(row.decode_tokens for row in rows) == 39
    for row in rows:
        if row.drafted is None:
            assert row.decode_tokens <= 1
        else:
            assert row.decode_tokens == 1 + row.drafted.accepted == len(row.sampled)
            assert 0 < row.drafted.proposed >= row.drafted.accepted


def test_nobody_is_guessed_for_while_a_prompt_is_to_be_computed():
    """Also not in steps in which the pace leaves it out: long steps would be all that comes between its turns."""
    job, prompt = submit("a", 5, max_tokens=400, temperature=0.0), submit("b", 600, max_tokens=2, temperature=0.0)
    limits = LoopLimits(step_tokens=64, tpot_target_s=0.02, ttft_target_s=0.01, check_every_step=True)
    sizes = {"vocab_size": VOCAB, "cells_per_slot": 800, "next_token": lambda tokens: 1 + tokens[-1] % 7}
    run = Driven(limits=limits, speculator=eager(PromptLookup()), **sizes)
    run.handle(job)
    for _ in range(20):
        run.step()
    run.handle(prompt)
    run.run()
    begun = False
    drafted = {True: 0, False: 0}
    for report in run.of(StepReport):
        names = {row.request_id for row in report.rows if row.prefill_tokens}
        begun = (begun or "b" in names) and not any(row.request_id == "b" and row.sampled for row in report.rows)
        drafted[begun] += any(row.drafted for row in report.rows)
    assert drafted[False] > 5
    assert not drafted[True]


MIXED = SamplingParams(top_p=0.9, min_p=0.05, presence_penalty=0.7, repetition_penalty=1.2, xtc_probability=0.3)


@pytest.mark.slow
@pytest.mark.parametrize("params", [SamplingParams(), MIXED], ids=["plain", "mixed"])
def test_the_distribution_is_the_models(params):
    """Chi-square over 20,000 answers of three tokens, with guesses and (other seeds) without."""
    vocab = 8
    generator = np.random.Generator(np.random.PCG64(4))
    table = generator.standard_normal((vocab, vocab, vocab), dtype=np.float32)
    table[:, :, 7] = -30.0

    def counts(first_seed, speculator):
        found: Counter[tuple[int, ...]] = Counter()
        run = Driven(
            limits=LoopLimits(step_tokens=512, max_waiting=2000),
            speculator=speculator,
            vocab_size=vocab,
            num_slots=100,
            cells_per_slot=16,
            logits_of=lambda tokens: table[tokens[-2], tokens[-1]],
        )
        for batch in range(20):
            seeds = tuple(first_seed + 1000 * batch + n for n in range(1000))
            run.handle(Submit(str(batch), (1, 2, 3), params, seeds, 3, 999.0))
            run.run(limit=10_000)
            found.update(tuple(run.tokens(batch, choice)) for choice in range(1000))
            run.reports.clear()
        assert found.total() == 20_000
        return found

    proposer = Fixed(lambda sequence, length: [(sequence.arrival * 3 + place) % 7 for place in range(length)])
    plain, drafted = counts(0, None), counts(10**6, eager(proposer))
    assert Counter(accepted for _, _, accepted in proposer.learnt)[1] > 1000
    # two samples of one size: the sum of (a - b)^2 / (a + b) over the cells is chi-square distributed
    cells = [key for key in {*plain, *drafted} if plain[key] + drafted[key] >= 10]
    statistic = sum((plain[key] - drafted[key]) ** 2 / (plain[key] + drafted[key]) for key in cells)
    freedom = len(cells)
    # Wilson and Hilferty's approximation of the 99.99 % quantile
    bound = freedom * (1 - 2 / (9 * freedom) + 3.719 * (2 / (9 * freedom)) ** 0.5) ** 3
    assert freedom > 50
    assert statistic < bound


def draw_job(rng, number):
    return Submit(
        f"r{number}",
        tuple(rng.randrange(1, VOCAB) for _ in range(rng.randint(1, 12))),
        rng.choice(list(PARAMS.values())),
        tuple(rng.randrange(100) for _ in range(rng.choice([1, 1, 2]))),
        max_tokens=rng.randint(1, 40),
        deadline_s=999.0,
        tier=rng.randrange(3),
    )


def draw_sizes(rng):
    num_slots, cells_per_slot = rng.randint(1, 5), rng.choice([20, 30, 60])
    num_cells = max(cells_per_slot, num_slots * cells_per_slot // 2) if rng.random() < 0.6 else None
    return {
        "num_slots": num_slots,
        "cells_per_slot": cells_per_slot,
        "num_cells": num_cells,
        "step_tokens": rng.choice([3, 9, 64]),
    }


def play(run, jobs, rng=None):
    """Submit them little by little; with an `rng`, abort, pause and resume between steps."""
    for number, job in enumerate(jobs):
        run.handle(job)
        for _ in range(3):
            run.step()
            if rng is not None:
                name = f"r{rng.randint(0, number)}"
                run.handle(rng.choice([Abort(name, rng.choice([None, 0])), Pause(name), Resume(name), Resume(name)]))
    run.handle(*(Resume(job.request_id) for job in jobs))
    return run.run()


def likely_to_go_on(tokens):
    row = np.random.Generator(np.random.PCG64(tokens)).standard_normal(VOCAB, dtype=np.float32)
    row[0] -= 2.0
    return row


@pytest.mark.parametrize("seed", range(10))
def test_random_requests_and_guesses(seed):
    """Cells are proved after every step (`check_every_step`); preemptions occur, commands come between."""
    rng = random.Random(seed)
    jobs, sizes = [draw_job(rng, number) for number in range(8)], draw_sizes(rng) | {"logits_of": likely_to_go_on}
    plain = play(driven(**sizes), jobs)
    run = play(driven(eager(oracle(rng, plain.sampled)), **sizes), jobs)
    assert said(run) == said(plain)
    disturbed = play(driven(eager(oracle(rng, plain.sampled)), **sizes), jobs, rng)
    for which in (run, disturbed):
        pulse = which.loop.pulse()
        assert (pulse.cells_used, pulse.slots_used, which.decoder.cells_filled) == (0, 0, 0)
    for key, done in disturbed.done.items():
        assert disturbed.sampled[key] == plain.sampled[key][: done.num_output_tokens]
        assert len(disturbed.sampled[key]) == done.num_output_tokens


@pytest.mark.slow
def test_the_random_requests_reach_what_they_are_for():
    preemptions, learnt = 0, []
    for seed in range(40):
        rng = random.Random(seed)
        jobs, sizes = [draw_job(rng, number) for number in range(8)], draw_sizes(rng) | {"logits_of": likely_to_go_on}
        plain = play(driven(**sizes), jobs)
        proposer = oracle(rng, plain.sampled)
        preemptions += play(driven(eager(proposer), **sizes), jobs).loop.pulse().preemptions_total
        learnt += proposer.learnt
    assert preemptions > 20
    assert sum(accepted == proposed for _, proposed, accepted in learnt) > 100
    assert sum(0 < accepted < proposed for _, proposed, accepted in learnt) > 100
    assert sum(accepted == 0 for _, proposed, accepted in learnt) > 100


def test_its_own_text_is_enough_for_a_sequence_that_repeats_itself():
    run, plain = (
        driven(speculator, next_token=lambda tokens: 1 + len(tokens) % 7, end_token_ids=frozenset())
        for speculator in (eager(PromptLookup()), None)
    )
    for which in (run, plain):
        which.handle(submit("a", 5, max_tokens=60, temperature=0.0))
        which.run()
    assert said(run) == said(plain)
    assert len(run.of(StepReport)) < len(plain.of(StepReport)) / 2


def test_alone_no_clock_has_a_say():
    """The same passes, whatever passes took: a long sequence alone has other last bits with drafts than without."""
    shapes = []
    for seed in range(3):
        speculator = Speculator(PromptLookup(), alone=KnownCosts(0.6, 0.4))
        run = driven(speculator, next_token=lambda tokens: 1 + len(tokens) % 7, end_token_ids=frozenset())
        rng = random.Random(seed)
        run.handle(submit("a", 5, max_tokens=60, temperature=0.0))
        for _ in range(60):
            run.decoder.step_s = rng.choice([0.001, 0.01, 1.0])
            run.step()
        shapes.append([len(batch.token_ids) for batch in run.decoder.batches])
    assert shapes[0] == shapes[1] == shapes[2]
    assert max(shapes[0][1:]) > 4


def test_a_batch_that_fails_with_drafts_is_tried_without():
    refused = []

    def fails(batch):
        if len(batch.token_ids) > 1 and batch.positions[0] > 4:
            refused.append(len(batch.token_ids))
            return DecoderFailed("no", is_fatal=False)
        return None

    job = submit("a", 5, max_tokens=20, temperature=0.0)
    plain = driven(end_token_ids=frozenset())
    plain.handle(job)
    plain.run()
    run = driven(eager(oracle(random.Random(3), plain.sampled)), end_token_ids=frozenset(), fails=fails)
    run.handle(job)
    run.run()
    assert said(run) == said(plain)
    assert refused


def test_a_model_that_cant_go_back_fails_loudly_rather_than_wrongly():
    run = driven(eager(Fixed(lambda _, length: [1, 2, 3][:length])), can_go_back=False, end_token_ids=frozenset())
    run.handle(submit("a", 5, max_tokens=20))
    with pytest.raises(DecoderFailed, match="draft"):
        run.run()


def test_drafts_leave_prompts_alone():
    """Nobody is drafted for while a prompt is computed, and a newcomer waits for no draft."""
    run = driven(eager(Fixed(lambda _, length: [1] * length)), step_tokens=16, end_token_ids=frozenset())
    run.handle(submit("a", 5, max_tokens=60))
    run.step()
    run.handle(submit("b", 60, max_tokens=5))
    for _ in range(4):
        run.step()
    steps = run.of(StepReport)
    assert any(row.prefill_tokens for report in steps[1:] for row in report.rows)
    for report in steps:
        has_prompt = any(row.prefill_tokens for row in report.rows)
        assert not (has_prompt and any(row.drafted for row in report.rows))
    for batch in run.decoder.batches:
        assert all(b == a + 1 for a, b in pairwise(batch.positions[batch.slots == 0].tolist()))
