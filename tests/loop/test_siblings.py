"""Choices of one request compute their prompt once."""

import numpy as np
import pytest

from hitsend.serve.loop.decoder import DecoderFailed
from hitsend.serve.loop.messages import Abort, Pause, Resume, StepReport, WasAdmitted
from hitsend.serve.loop.roster import LoopLimits
from tests.loop.driven import Driven, submit

SEEDS = (3, 4, 5)


def limits(**fields):
    return LoopLimits(**({"step_tokens": 16, "reserve_tokens": 4, "check_every_step": True} | fields))


def alone(seed, num_prompt_tokens=40, **fields):
    driven = Driven(num_slots=1)
    driven.handle(submit("a", num_prompt_tokens, seeds=(seed,), **fields))
    return driven.run().tokens("a")


def test_one_computes_the_prompt_and_each_draws_from_the_same_row_with_its_own_seed():
    driven = Driven(num_slots=4)
    driven.handle(submit("a", 40, seeds=SEEDS))
    driven.run()
    assert [driven.tokens("a", choice) for choice in range(3)] == [alone(seed) for seed in SEEDS]
    assert driven.decoder.copies == [(0, 1), (0, 2)]
    assert [driven.prefilled["a", choice] for choice in range(3)] == [40, 0, 0]
    assert [driven.done["a", choice].num_prompt_tokens_computed for choice in range(3)] == [40, 0, 0]
    first = next(report for report in driven.of(StepReport) if report.rows[0].sampled)
    rows = [(row.choice, row.prefill_tokens, row.decode_tokens, len(row.sampled)) for row in first.rows]
    assert rows == [(0, 8, 0, 1), (1, 0, 0, 1), (2, 0, 0, 1)]


def test_all_get_their_places_before_the_prompt_is_complete():
    driven = Driven(num_slots=4)
    driven.handle(submit("a", 40, seeds=SEEDS))
    driven.step()
    assert [report.choice for report in driven.of(WasAdmitted)] == [0, 1, 2]
    assert driven.loop.pulse().cells_used == 3 * 44, "each holds cells of its own"
    assert driven.decoder.cells_filled == 16


def test_without_a_place_in_time_a_choice_computes_for_itself():
    driven = Driven(num_slots=2)
    driven.handle(submit("a", 40, seeds=SEEDS))
    driven.run()
    assert [driven.tokens("a", choice) for choice in range(3)] == [alone(seed) for seed in SEEDS]
    assert driven.decoder.copies == [(0, 1)]
    assert driven.prefilled["a", 2] == 40


@pytest.mark.parametrize("steps", [1, 2])
def test_when_the_one_that_computes_is_aborted_the_next_one_takes_over(steps):
    driven = Driven(num_slots=4)
    driven.handle(submit("x", 5, max_tokens=2), submit("a", 40, seeds=SEEDS))
    for _ in range(steps):
        driven.step()
    driven.handle(Abort("a", 0))
    driven.run()
    assert driven.done["a", 0].reason == "cancelled"
    assert [driven.tokens("a", choice) for choice in (1, 2)] == [alone(seed) for seed in SEEDS[1:]]
    assert driven.done["a", 1].num_prompt_tokens_computed == 40
    assert driven.done["a", 2].num_prompt_tokens_computed == 0


def test_a_paused_request_waits_as_a_whole():
    driven = Driven(num_slots=4)
    driven.handle(submit("a", 40, seeds=SEEDS))
    driven.step()
    driven.handle(Pause("a"))
    assert not driven.loop.has_work
    driven.handle(Resume("a"))
    driven.run()
    assert [driven.tokens("a", choice) for choice in range(3)] == [alone(seed) for seed in SEEDS]


def test_a_choice_that_loses_its_cells_computes_the_prompt_itself():
    driven = Driven(num_slots=3, num_cells=130, cells_per_slot=60, limits=limits(reserve_tokens=1))
    driven.handle(submit("a", 40, seeds=SEEDS, max_tokens=15))
    driven.run()
    assert driven.loop.pulse().preemptions_total > 0
    assert [driven.tokens("a", choice) for choice in range(3)] == [alone(seed, max_tokens=15) for seed in SEEDS]


def test_an_end_at_the_first_token_ends_each_choice_for_itself():
    driven = Driven(end_token_ids=frozenset({7}), next_token=lambda tokens: 7)
    driven.handle(submit("a", 5, seeds=SEEDS))
    driven.run()
    assert {driven.done["a", choice].reason for choice in range(3)} == {"stop"}
    assert driven.decoder.cells_filled == 0


def test_a_row_that_is_no_numbers_fails_all_who_would_draw_from_it():
    driven = Driven(logits_of=lambda tokens: np.full(64, np.nan, np.float32))
    driven.handle(submit("a", 5, seeds=SEEDS))
    driven.run()
    assert {driven.done["a", choice].code for choice in range(3)} == {"engine_failed"}


def test_a_prompt_that_cannot_be_computed_is_tried_by_each():
    driven = Driven(fails=lambda batch: DecoderFailed("no", is_fatal=False))
    driven.handle(submit("a", 5, seeds=SEEDS))
    driven.run()
    assert {driven.done["a", choice].code for choice in range(3)} == {"engine_failed"}
    assert driven.decoder.cells_filled == 0
