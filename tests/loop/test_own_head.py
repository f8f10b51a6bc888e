"""A model's own head, ways of guessing beside each other, and models that can go back a few tokens only."""

import random

import msgspec
import pytest

from hitsend.core.drafts import Drafted
from hitsend.serve.loop.messages import StepReport
from hitsend.serve.loop.own_head import BOLD_CHANCE, Likelier, OwnHead
from hitsend.serve.loop.roster import LoopLimits
from hitsend.serve.loop.speculate import KnownCosts, draft_lengths
from hitsend.serve.loop.trust import FIRST_CHANCE, Trusts
from hitsend.serve.loop.verify import GoingBack, PromptLookup, Speculator
from tests.loop.driven import Driven, submit
from tests.loop.test_verify import VOCAB, Free, draw_job, draw_sizes, driven, eager, likely_to_go_on, oracle, play, said

ENDLESS = frozenset()
COSTS = KnownCosts(0.7, 0.3)


class Guessing:
    """A head that says `draft(slot, token)`."""

    def __init__(self, draft, pass_s=0.1):
        self._draft, self._pass_s = draft, pass_s
        self.asked = []

    def draft(self, asked, length):
        self.asked.append((sorted(asked), length))
        return {slot: self._draft(slot, token)[:length] for slot, token in asked.items()}

    def seconds(self, count, length):
        return self._pass_s * length


def drafts_of(run):
    return [row.drafted for report in run.of(StepReport) for row in report.rows if row.drafted]


def counting(speculator):
    """Says 1 to 60 in turn: the next word is known, and nothing repeats before that."""
    run = driven(speculator, next_token=lambda tokens: 1 + tokens[-1] % 60, end_token_ids=ENDLESS, cells_per_slot=400)
    run.handle(submit("a", 5, max_tokens=300, temperature=0.0))
    return run.run()


def onward(_, token):
    return tuple(1 + (token - 1 + step) % 60 for step in range(1, 16))


def test_a_head_that_is_right_is_asked_all_the_time():
    run = counting(Speculator(OwnHead(Guessing(onward)), alone=COSTS))
    assert said(run) == said(counting(None))
    assert all(each.accepted == each.proposed for each in drafts_of(run))
    assert {each.drafter for each in drafts_of(run)} == {"mtp"}
    assert len(run.of(StepReport)) < 0.4 * 300


def test_a_head_that_is_wrong_is_asked_ever_more_rarely():
    head = Guessing(lambda _slot, token: (token,) * 15)
    run = counting(Speculator(OwnHead(head), alone=COSTS))
    assert said(run) == said(counting(None))
    assert 3 <= len(head.asked) <= 5, "after 16, 32, 64 and 128 steps more"
    assert {each.proposed for each in drafts_of(run)} == {1}, "nobody risks more on somebody who was never right"
    assert len(run.of(StepReport)) == 300


def test_a_head_that_is_right_now_and_then_costs_little():
    """Three guesses of ten are right, which is less than a checked token costs: what that loses is bounded."""
    rng = random.Random(4)
    head = Guessing(lambda slot, token: onward(slot, token) if rng.random() < 0.3 else (token,) * 15)
    run = counting(Speculator(OwnHead(head), alone=COSTS))
    assert said(run) == said(counting(None))
    spent = sum(
        1.0 + 0.4 * sum(row.drafted.proposed for row in report.rows if row.drafted) for report in run.of(StepReport)
    )
    assert spent <= 300 / 0.97


def test_a_head_that_takes_too_long_is_not_asked():
    head = Guessing(onward, pass_s=1.0)
    counting(Speculator(OwnHead(head), alone=COSTS))
    assert head.asked == []


def test_of_two_ways_the_likelier_one_guesses():
    """Nothing repeats in the first round of 60, so the head is all there is; later its own text says it better."""
    rng = random.Random(2)
    often_wrong = Guessing(lambda slot, token: (token,) if rng.random() < 0.4 else onward(slot, token))
    run = counting(Speculator(Likelier([PromptLookup(), OwnHead(often_wrong)]), alone=COSTS))
    assert said(run) == said(counting(None))
    by = [each.drafter for each in drafts_of(run)]
    assert by[0] == "mtp"
    assert set(by[-8:]) == {"prompt_lookup"}


@pytest.mark.parametrize("longest", [1, 3, 7])
def test_no_draft_is_longer_than_can_be_taken_back(longest):
    speculator = Speculator(OwnHead(Guessing(onward)), Free(), going_back=GoingBack(longest))
    assert said(counting(speculator)) == said(counting(None))
    run = counting(speculator)
    assert {each.proposed for each in drafts_of(run)} >= {longest}
    assert max(each.proposed for each in drafts_of(run)) == longest


def test_what_must_be_computed_again_is_risked_alone_only():
    speculator = Speculator(OwnHead(Guessing(onward)), Free(), going_back=GoingBack(15, is_again=True))
    run = driven(speculator, next_token=lambda tokens: 1 + tokens[-1] % 60, end_token_ids=ENDLESS)
    run.handle(submit("a", 5, max_tokens=30, temperature=0.0), submit("b", 5, max_tokens=60, temperature=0.0))
    run.run()
    for report in run.of(StepReport):
        assert len(report.rows) == 1 or not any(row.drafted for row in report.rows)
    assert drafts_of(run)


def test_computing_again_asks_for_surer_guesses():
    for chance, without, again in ((0.5, [1], [0]), (0.8, [4], [2]), (0.99, [15], [15])):
        costs = KnownCosts(0.8, 0.2)
        assert draft_lengths([chance], [15], costs) == without
        assert draft_lengths([chance], [15], costs, is_again=True) == again


def test_a_head_is_tried_where_it_is_costly_to_be_wrong_too():
    for first_chance, is_tried in ((FIRST_CHANCE, False), (BOLD_CHANCE, True)):
        head = Guessing(onward, pass_s=0.02)
        costs, again = KnownCosts(0.9, 0.1), GoingBack(15, is_again=True)
        run = counting(Speculator(OwnHead(head, first_chance), alone=costs, going_back=again))
        assert bool(drafts_of(run)) is is_tried


def test_random_requests_on_a_model_that_goes_back_a_few_tokens():
    """With a prefix cache of checkpoints, preemptions, and commands in between: books and answers as without drafts."""
    drafts, preemptions = [], 0
    for seed in range(8):
        rng = random.Random(seed)
        jobs = [msgspec.structs.replace(draw_job(rng, number), cache_salt="one") for number in range(8)]
        sizes = draw_sizes(rng) | {"logits_of": likely_to_go_on, "can_go_back": False, "takes_back": 3}
        limits = LoopLimits(
            step_tokens=sizes.pop("step_tokens"),
            reserve_tokens=4,
            check_every_step=True,
            prefix_cache_bytes=20_000,
            prefix_step=2,
        )
        model = {"vocab_size": VOCAB, "end_token_ids": frozenset({0})} | sizes
        plain = play(Driven(limits=limits, **model), jobs)
        run, disturbed = (
            Driven(
                limits=limits,
                speculator=Speculator(oracle(rng, plain.sampled), Free(), going_back=GoingBack(3)),
                **model,
            )
            for _ in range(2)
        )
        assert said(play(run, jobs))[:2] == said(plain)[:2]
        play(disturbed, jobs, rng)
        for which in (run, disturbed):
            pulse = which.loop.pulse()
            assert (pulse.cells_used, pulse.slots_used, which.decoder.cells_filled) == (0, 0, pulse.cells_cached)
        for key, done in disturbed.done.items():
            assert disturbed.sampled[key] == plain.sampled[key][: done.num_output_tokens]
        drafts += drafts_of(run) + drafts_of(disturbed)
        preemptions += run.loop.pulse().preemptions_total
    assert preemptions
    assert any(0 < each.accepted < each.proposed for each in drafts)
    assert any(each.accepted == each.proposed == 3 for each in drafts)


def test_whoever_ends_within_a_draft_leaves_what_it_said_and_no_more():
    run = driven(
        eager(OwnHead(Guessing(onward))),
        next_token=lambda tokens: 1 + tokens[-1] % 60,
        end_token_ids=frozenset({20}),
        can_go_back=False,
        takes_back=15,
    )
    run.handle(submit("a", 5, max_tokens=60, temperature=0.0))
    run.run()
    assert run.tokens("a")[-1] == 19
    assert run.decoder.cells_filled == 0


def test_who_rests_does_so_as_long_whoever_comes_and_goes_meanwhile():
    rng = random.Random(5)
    run = driven(num_slots=6, end_token_ids=ENDLESS, cells_per_slot=400)
    run.handle(*(submit(number, 5, max_tokens=300) for number in range(6)))
    run.step()
    everybody = list(run.loop._roster.running)
    undisturbed, visited = Trusts(), Trusts()
    few = everybody[:3]
    for step in range(600):
        chances = undisturbed.chances(few)
        # another list in each step, so that nobody's steps are only counted; those who are left out don't rest
        assert visited.chances([*few, everybody[3 + step % 3]])[:3] == chances
        for sequence, chance in zip(few, chances, strict=True):
            if chance:
                drafted = Drafted(0, 1, int(rng.random() < 0.2), "mtp")
                undisturbed.learn(sequence, drafted)
                visited.learn(sequence, drafted)
