"""Log-probabilities of a prompt's own tokens."""

from collections import defaultdict

import numpy as np
import pytest

from hitsend.serve.loop.messages import Abort, StepReport, WasPreempted
from hitsend.serve.loop.prompt_scores import SCORED_TOKENS, score
from hitsend.serve.loop.roster import LoopLimits
from tests.loop.driven import Driven, submit


def limits(**fields):
    return LoopLimits(**({"step_tokens": 16, "reserve_tokens": 4, "check_every_step": True} | fields))


def scored(driven, request_id="a"):
    rows = [row for report in driven.of(StepReport) for row in report.rows if row.request_id == request_id]
    return [token for row in rows for token in row.scored]


def expected(driven, tokens, num_top):
    """From the fake's logits, in double precision: (token, logprob, rank, alternatives)."""
    found = []
    for end in range(1, len(tokens)):
        row = driven.decoder._logits(tuple(tokens[:end])).astype(np.float64)
        logprobs = row - np.log(np.exp(row).sum())
        best = np.argsort(-logprobs, kind="stable")[:num_top]
        rank = 1 + int((row > row[tokens[end]]).sum())
        found.append((tokens[end], logprobs[tokens[end]], rank, [(int(i), logprobs[i]) for i in best]))
    return found


def assert_same(got, wanted):
    assert len(got) == len(wanted)
    for token, (token_id, logprob, rank, best) in zip(got, wanted, strict=True):
        assert (token.token_id, token.rank) == (token_id, rank)
        assert token.logprob == pytest.approx(logprob, abs=1e-4)
        assert [each.token_id for each in token.top] == [i for i, _ in best]
        assert [each.logprob for each in token.top] == pytest.approx([value for _, value in best], abs=1e-4)


@pytest.mark.parametrize("num_top", [0, 3])
@pytest.mark.parametrize("length", [1, 2, 16, 17, 41])
def test_every_token_but_the_first_is_scored_once_and_in_order(length, num_top):
    driven = Driven(num_slots=2)
    command = submit("a", length, prompt_logprobs=num_top)
    driven.handle(command)
    driven.run()
    assert_same(scored(driven), expected(driven, command.prompt_token_ids, num_top))


def test_it_changes_no_token_of_anybody():
    plain, scoring = Driven(num_slots=4), Driven(num_slots=4)
    for driven, fields in ((plain, {}), (scoring, {"prompt_logprobs": 5})):
        driven.handle(submit("b", 30, logprobs=True), submit("a", 40, **fields), submit("c", 9))
        driven.run()
    for name in "abc":
        assert plain.sampled[name, 0] == scoring.sampled[name, 0]
    assert len(scored(scoring)) == 39
    assert scored(scoring, "b") == scored(scoring, "c") == []


def test_choices_share_one_scoring():
    driven = Driven(num_slots=2)
    command = submit("a", 40, seeds=(3, 4, 5), prompt_logprobs=1)
    driven.handle(command)
    driven.run()
    assert driven.prefilled["a", 2] == 40, "it found no place in time and computed for itself"
    assert_same(scored(driven), expected(driven, command.prompt_token_ids, 1))


def test_whoever_takes_over_goes_on_where_the_scores_end():
    driven = Driven(num_slots=4)
    command = submit("a", 40, seeds=(3, 4), prompt_logprobs=1)
    driven.handle(command)
    driven.step()
    driven.handle(Abort("a", 0))
    driven.run()
    assert_same(scored(driven), expected(driven, command.prompt_token_ids, 1))


def test_a_preempted_prompt_is_scored_once():
    driven = Driven(num_slots=3, num_cells=48, cells_per_slot=48, limits=limits(step_tokens=4, reserve_tokens=1))
    command = submit("z", 20, prompt_logprobs=2, max_tokens=4)
    driven.handle(submit("a", 4, max_tokens=30), submit("b", 4, max_tokens=30), command)
    driven.run()
    assert any(report.request_id == "z" for report in driven.of(WasPreempted))
    assert_same(scored(driven, "z"), expected(driven, command.prompt_token_ids, 2))


def test_no_step_asks_for_more_rows_than_it_may():
    sizes = {"num_slots": 4, "cells_per_slot": 512, "num_cells": 2048, "max_batch_tokens": 512}
    driven = Driven(limits=limits(step_tokens=512), **sizes)
    for name in "abc":
        driven.handle(submit(name, 400, prompt_logprobs=0, max_tokens=2))
    driven.handle(submit("d", 300, max_tokens=2))
    driven.run()
    rows = [int(batch.wants_logits.sum()) for batch in driven.decoder.batches]
    assert max(rows) <= SCORED_TOKENS + 4
    assert [len(scored(driven, name)) for name in "abcd"] == [399, 399, 399, 0]
    ends = defaultdict(list)
    for report in driven.of(StepReport):
        for row in report.rows:
            ends[row.request_id].append(row.prefill_tokens)
    cuts = [sum(ends[name][:i]) for name in "abc" for i in range(1, 4)]
    assert all(cut % 64 == 0 for cut in cuts), "a cut inside a tile"
    assert ends["d"][0] == 300, "those who want no scores are not held up"
    assert driven.of(StepReport)[0].rows[-1].request_id == "d"


def test_numbers_that_are_none_do_not_break_it():
    nothing = score(np.full(8, np.nan, np.float32), 3, 4)
    assert (nothing.token_id, nothing.top) == (3, ())
    forbidden = score(np.array([0.0, -np.inf, 0.0], np.float32), 1, 3)
    assert (forbidden.logprob, forbidden.rank, [each.token_id for each in forbidden.top]) == (-np.inf, 3, [0, 2])
