"""A second model that guesses: its cache follows the first one's, and nothing of what is said changes."""

import random

import numpy as np

from hitsend.serve.loop.decoder import DecoderFailed
from hitsend.serve.loop.draft_model import CATCH_UP, DraftModel
from hitsend.serve.loop.messages import StepReport
from hitsend.serve.loop.verify import Speculator
from hitsend.testing import FakeClock, FakeDecoder
from tests.loop.driven import submit
from tests.loop.test_verify import VOCAB, draw_job, draw_sizes, driven, eager, likely_to_go_on, play, said

ENDLESS = frozenset()


def second(sizes, **more):
    """Another model with the same slots and cells."""
    own = {"vocab_size": VOCAB, "num_slots": 4, "cells_per_slot": 80} | sizes | {"step_tokens": None}
    own.pop("step_tokens")
    return FakeDecoder(**(own | more))


class Instant(DraftModel):
    """Its time is free, so that every step has drafts."""

    def seconds(self, count, length):
        return 0.0


def wrong_at_times(tokens):
    """Like the first model, but for every third text."""
    row = likely_to_go_on(tokens)
    if sum(tokens) % 3 == 0:
        row[int(row.argmax())] = -5.0
    return row


def drafts_of(run):
    return [row.drafted for report in run.of(StepReport) for row in report.rows if row.drafted]


def test_a_model_that_is_its_own_draft_is_always_right():
    plain, sizes = driven(logits_of=likely_to_go_on, end_token_ids=ENDLESS), {"logits_of": likely_to_go_on}
    run = driven(eager(Instant(second(sizes), FakeClock(), 0.001)), logits_of=likely_to_go_on, end_token_ids=ENDLESS)
    for which in (plain, run):
        which.handle(submit("a", 20, max_tokens=50, temperature=0.0))
        which.run()
    assert said(run) == said(plain)
    assert drafts_of(run)
    assert all(each.accepted == each.proposed for each in drafts_of(run))
    assert len(run.of(StepReport)) < 8


def test_a_worse_model_is_followed_as_far_as_it_is_right():
    drafts = []
    for seed in range(4):
        rng = random.Random(seed)
        jobs = [draw_job(rng, number) for number in range(6)]
        sizes = draw_sizes(rng) | {"logits_of": likely_to_go_on}
        plain = play(driven(**sizes), jobs)
        run, disturbed = (
            driven(eager(Instant(second(sizes, logits_of=wrong_at_times), FakeClock(), 0.001)), **sizes)
            for _ in range(2)
        )
        assert said(play(run, jobs)) == said(plain)
        play(disturbed, jobs, rng)
        for key, done in disturbed.done.items():
            assert disturbed.sampled[key] == plain.sampled[key][: done.num_output_tokens]
        drafts += drafts_of(run)
    assert any(each.accepted for each in drafts)
    assert any(each.accepted < each.proposed for each in drafts)


def test_its_slots_are_those_of_running_sequences():
    drafting = second({"logits_of": likely_to_go_on})
    run = driven(eager(Instant(drafting, FakeClock(), 0.001)), logits_of=likely_to_go_on, end_token_ids=ENDLESS)
    for wave in range(3):
        for number in range(6):
            run.handle(submit(wave * 10 + number, 6, max_tokens=10 + number, temperature=0.0))
        run.run()
        assert sum(map(bool, drafting.slots)) <= 4
    run.handle(submit("last", 6, max_tokens=12, temperature=0.0))
    run.run()
    assert sum(map(bool, drafting.slots)) == 1, "the others' were emptied when the next draft was wanted"


def test_a_long_prompt_is_caught_up_with_in_chunks():
    sizes = {"num_slots": 1, "cells_per_slot": 2000, "logits_of": lambda tokens: table[tokens[-1]]}
    table = np.random.Generator(np.random.PCG64(1)).standard_normal((VOCAB, VOCAB), dtype=np.float32)
    drafting = second(sizes)
    run = driven(eager(Instant(drafting, FakeClock(), 0.001)), end_token_ids=ENDLESS, **sizes)
    run.handle(submit("a", 900, max_tokens=60, temperature=0.0))
    run.run()
    assert max(len(batch.token_ids) for batch in drafting.batches) <= CATCH_UP
    assert drafts_of(run)
    assert all(each.accepted == each.proposed for each in drafts_of(run))


def test_its_failures_cost_drafts_only():
    fickle = random.Random(5)
    drafting = second(
        {"logits_of": likely_to_go_on},
        fails=lambda _: DecoderFailed("no", is_fatal=False) if fickle.random() < 0.2 else None,
    )
    plain = driven(logits_of=likely_to_go_on, end_token_ids=ENDLESS)
    run = driven(eager(Instant(drafting, FakeClock(), 0.001)), logits_of=likely_to_go_on, end_token_ids=ENDLESS)
    for which in (plain, run):
        which.handle(*(submit(number, 6, max_tokens=40) for number in range(4)))
        which.run()
    assert said(run) == said(plain)
    assert drafts_of(run)
    assert any(not row.drafted and row.decode_tokens for report in run.of(StepReport) for row in report.rows)


def test_a_bad_one_is_left_alone_for_a_while():
    plain = driven(logits_of=likely_to_go_on, end_token_ids=ENDLESS, cells_per_slot=400)
    never = second({"cells_per_slot": 400}, next_token=lambda tokens: 1 + sum(tokens) % 3)

    class Dear(Instant):
        def seconds(self, count, length):
            return 0.4 * length

    run = driven(
        eager(Dear(never, FakeClock(), 0.001)), logits_of=likely_to_go_on, end_token_ids=ENDLESS, cells_per_slot=400
    )
    for which in (plain, run):
        which.handle(submit("a", 6, max_tokens=300, temperature=0.0))
        which.run()
    assert said(run) == said(plain)
    assert 1 <= len(drafts_of(run)) <= 5
    assert {each.proposed for each in drafts_of(run)} == {1}


def test_one_that_never_helped_is_asked_for_ever_fewer_requests_and_for_all_once_it_does():
    knows = {"is_right": False}

    def either(tokens):
        return likely_to_go_on(tokens) if knows["is_right"] else np.eye(VOCAB, dtype=np.float32)[1 + sum(tokens) % 3]

    run = driven(
        eager(Instant(second({"logits_of": either}), FakeClock(), 0.001)),
        logits_of=likely_to_go_on,
        end_token_ids=ENDLESS,
    )
    tried = []
    for number in range(200):
        knows["is_right"] = number >= 150
        run.reports.clear()
        run.handle(submit(number, 6, max_tokens=8, temperature=0.0))
        run.run()
        tried.append(bool(drafts_of(run)))
    assert 3 <= sum(tried[:150]) <= 12
    assert all(tried[190:])


def test_the_longer_it_helped_nobody_the_longer_those_rest_that_are_tried():
    wrong = second({"cells_per_slot": 400}, next_token=lambda tokens: 1 + sum(tokens) % 3)
    speculator = eager(Instant(wrong, FakeClock(), 0.001))
    run = driven(speculator, logits_of=likely_to_go_on, end_token_ids=ENDLESS, cells_per_slot=400)
    asked = []
    for number in range(20):
        run.reports.clear()
        run.handle(submit(number, 6, max_tokens=200, temperature=0.0))
        run.run()
        asked.append(len(drafts_of(run)))
    assert asked[0] >= 3
    assert [count for count in asked if count][-1] == 1


def test_its_time_counts():
    """A second model of a tenth of the first one's time is used, one of ten times its time isn't."""
    plain = driven(logits_of=likely_to_go_on, end_token_ids=ENDLESS)
    plain.handle(submit("a", 6, max_tokens=60, temperature=0.0))
    plain.run()
    counts = []
    for step_s in (0.001, 0.1):
        clock = FakeClock()
        drafting = second({"logits_of": likely_to_go_on}, clock=clock, step_s=step_s)
        speculator = Speculator(DraftModel(drafting, clock, step_s))
        run = driven(speculator, logits_of=likely_to_go_on, end_token_ids=ENDLESS)
        run.handle(submit("a", 6, max_tokens=60, temperature=0.0))
        run.run()
        assert said(run) == said(plain)
        counts.append(len(drafts_of(run)))
    assert counts[0] > 3
    assert counts[1] == 0
