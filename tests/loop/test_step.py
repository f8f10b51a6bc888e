import json
import math
from pathlib import Path

import numpy as np
import pytest

from hitsend.core.request import SamplingParams
from hitsend.serve.loop.decoder import Batch, DecoderFailed
from hitsend.serve.loop.messages import Abort, Done, Pause, Resume, Shutdown, StepReport, Submit, WasAdmitted, WasQueued
from hitsend.serve.loop.roster import LoopLimits
from hitsend.testing import FakeDecoder, FakeMisused
from tests.loop.driven import Driven, submit


def test_a_request_from_queue_to_end():
    driven = Driven()
    driven.handle(submit("a", 5, max_tokens=3))
    assert driven.settle() == [WasQueued("a", 1000.0, 1, 0)]
    admitted, first = driven.step()
    assert admitted == WasAdmitted("a", 0, 1000.0, 0, cells_free=512, cells_reserved=8)
    assert (first.rows[0].prefill_tokens, first.rows[0].decode_tokens, len(first.rows[0].sampled)) == (5, 0, 1)
    assert (first.step, first.started_at, first.num_running, first.cells_used) == (1, 1000.0, 1, 8)
    assert first.decode_s == pytest.approx(0.01)
    driven.step()
    (last,) = driven.step()
    assert last.done == (Done("a", 0, last.ended_at, "length", 5, 3),)
    assert (last.num_running, last.num_waiting, last.cells_used) == (0, 0, 0)
    assert not driven.loop.has_work
    assert driven.loop.step() == []


def test_the_last_allowed_token_is_not_decoded():
    driven = Driven()
    driven.handle(submit("a", 5, max_tokens=4))
    driven.run()
    assert sum(len(batch.token_ids) for batch in driven.decoder.batches) == 5 + 3


def test_the_end_token_is_neither_reported_nor_counted():
    driven = Driven(end_token_ids=frozenset({7, 8}), next_token=lambda tokens: 8 if len(tokens) == 7 else 3)
    driven.handle(submit("a", 5, max_tokens=50))
    driven.run()
    assert driven.tokens("a") == [3, 3]
    done = driven.done["a", 0]
    assert (done.reason, done.num_prompt_tokens_computed, done.num_output_tokens) == ("stop", 5, 2)
    assert driven.reports[-1].rows[0].decode_tokens == 1


def test_an_end_token_first_gives_an_empty_output():
    driven = Driven(end_token_ids=frozenset({7}), next_token=lambda tokens: 7)
    driven.handle(submit("a", 5))
    driven.run()
    assert (driven.done["a", 0].reason, driven.tokens("a")) == ("stop", [])


def test_the_same_seed_gives_the_same_tokens_whoever_shares_the_batch():
    kinds = [{}, {"top_k": 5, "top_p": 0.9}, {"temperature": 0.0}, {"min_p": 0.05, "frequency_penalty": 0.5}]
    alone = {}
    for number in range(24):
        driven = Driven(num_slots=1)
        driven.handle(submit(number, 3 + number, seeds=(number,), max_tokens=20, **kinds[number % 4]))
        alone[number] = driven.run().tokens(number)
    together = Driven(num_slots=24, limits=LoopLimits(step_tokens=48, check_every_step=True))
    for number in range(24):
        together.handle(submit(number, 3 + number, seeds=(number,), max_tokens=20, **kinds[number % 4]))
        together.step()
    together.run()
    assert {number: together.tokens(number) for number in range(24)} == alone


def test_the_same_commands_give_the_same_reports():
    def reports():
        driven = Driven(num_slots=3, num_cells=80, cells_per_slot=60)
        driven.handle(*(submit(number, 12, seeds=(number, 5), max_tokens=20) for number in range(4)))
        driven.step()
        driven.handle(Abort("1"))
        return driven.run().reports

    assert reports() == reports()


def test_choices_are_sequences_of_their_own():
    driven = Driven()
    driven.handle(submit("a", 5, seeds=(1, 2, 1), max_tokens=6))
    driven.run()
    assert driven.tokens("a", 0) == driven.tokens("a", 2) != driven.tokens("a", 1)
    assert sorted(driven.done) == [("a", 0), ("a", 1), ("a", 2)]


def test_one_choice_can_be_aborted_and_the_others_go_on():
    driven = Driven()
    driven.handle(submit("a", 5, seeds=(1, 2), max_tokens=6))
    driven.step()
    driven.handle(Abort("a", 0))
    assert [(report.choice, report.reason) for report in driven.settle()] == [(0, "cancelled")]
    driven.run()
    assert driven.done["a", 1].reason == "length"


@pytest.mark.parametrize("state", ["waiting", "prefilling", "decoding", "paused", "preempted", "waiting paused"])
def test_abort_is_answered_before_the_next_step_in_any_state(state):
    driven = Driven(num_slots=2, num_cells=60, cells_per_slot=60)
    if state.startswith("waiting"):
        driven.handle(submit("x", 20, max_tokens=40), submit("y", 20, max_tokens=40))
        driven.step()
    driven.handle(submit("a", 20, max_tokens=30))
    if state == "preempted":
        driven.clock.advance(0)
        driven.handle(Abort("a"))
        driven.settle()
        driven.done.clear()
        driven.handle(submit("x", 20, max_tokens=40), submit("a", 20, max_tokens=30))
        while not driven.loop.pulse().preemptions_total:
            driven.step()
    elif state != "prefilling":
        driven.step()
        driven.step()
    else:
        driven.step()
    if "paused" in state:
        driven.handle(Pause("a"))
    if state == "waiting":
        driven.step()
    computed = len(driven.decoder.batches)
    driven.handle(Abort("a"))
    (done,) = driven.settle()
    assert (done.request_id, done.reason) == ("a", "cancelled")
    assert len(driven.decoder.batches) == computed
    held_by_a = 0 if state in ("waiting", "waiting paused", "preempted") else 20
    assert done.num_prompt_tokens_computed == {"prefilling": 16, "preempted": 20}.get(state, held_by_a)
    driven.handle(Abort("a"), Abort("x"), Abort("y"))
    while driven.loop.has_work:
        driven.settle()
    assert driven.decoder.cells_filled == 0
    assert driven.loop.pulse().slots_used == 0


def test_a_prompt_computed_again_counts_once_even_if_it_ends_halfway():
    driven = Driven(num_slots=2, cells_per_slot=64, num_cells=64, limits=LoopLimits(step_tokens=8, reserve_tokens=4))
    driven.handle(submit("old", 20, max_tokens=30), submit("young", 20, max_tokens=30))
    while len(driven.of(WasAdmitted)) < 3:
        driven.step()
    driven.handle(Abort("young"))
    driven.settle()
    done = driven.done["young", 0]
    assert done.num_prompt_tokens_computed == 20
    assert driven.prefilled["young", 0] == 28


def test_pause_keeps_the_cells_and_resume_goes_on_with_the_same_tokens():
    straight = Driven()
    straight.handle(submit("a", 5, max_tokens=12))
    straight.run()
    driven = Driven()
    driven.handle(submit("a", 5, max_tokens=12), submit("b", 5, max_tokens=12))
    driven.step()
    driven.handle(Pause("a"))
    before = driven.tokens("a")
    driven.run()
    assert driven.tokens("a") == before
    assert "a" not in {row.request_id for row in driven.reports[-1].rows}
    assert driven.loop.pulse().cells_used == 9
    assert not driven.loop.has_work
    driven.handle(Resume("a"))
    driven.run()
    assert driven.tokens("a") == straight.tokens("a")


def test_a_paused_request_in_the_queue_lets_others_pass_and_does_not_expire():
    driven = Driven(num_slots=1)
    driven.handle(submit("a", deadline_s=1.0), Pause("a"), submit("b"))
    driven.run()
    driven.clock.advance(5)
    assert not driven.loop.has_work
    assert driven.settle() == []
    assert set(driven.done) == {("b", 0)}
    driven.handle(Resume("a"))
    driven.run()
    assert driven.done["a", 0].code == "server_overloaded"


def test_a_request_that_can_never_fit_is_refused_at_once_with_the_numbers():
    driven = Driven(num_slots=2, cells_per_slot=20)
    driven.handle(submit("a", 20, seeds=(1, 2)))
    first, second = driven.settle()
    assert (first.code, first.reason, first.choice, second.choice) == ("context_length_exceeded", "error", 0, 1)
    assert "20 tokens" in first.message
    driven.handle(submit("b", 19))
    driven.run()
    assert (driven.done["b", 0].reason, driven.done["b", 0].num_output_tokens) == ("length", 1)


def test_larger_than_all_cells_neither_blocks_nor_loops():
    """Case sch-larger-than-kv: prompts within the model's context, but above and near the pool of 800 cells."""
    driven = Driven(num_slots=4, cells_per_slot=4096, num_cells=800, limits=LoopLimits(step_tokens=128))
    driven.handle(submit("R1", 1000, max_tokens=10))
    driven.handle(submit("R2", 10, max_tokens=20))
    driven.handle(submit("R3", 700, max_tokens=300))
    assert driven.settle()[0] == driven.done["R1", 0]
    assert not driven.decoder.batches
    driven.run(limit=400)
    assert driven.done["R1", 0].code == "context_length_exceeded"
    assert "1000" in driven.done["R1", 0].message
    assert "800" in driven.done["R1", 0].message
    assert (driven.done["R2", 0].reason, driven.done["R2", 0].num_output_tokens) == ("length", 20)
    assert (driven.done["R3", 0].reason, driven.done["R3", 0].num_output_tokens) == ("length", 100)
    assert driven.loop.pulse().preemptions_total == 0


def test_the_case_is_the_one_that_was_reported():
    cases = Path(__file__).parents[3] / "shared/cases/cases.json"
    if not cases.exists():
        pytest.skip("the collection of cases is not here")
    (case,) = [case for case in json.loads(cases.read_text()) if case["id"] == "sch-larger-than-kv"]
    assert case["input"]["kv_tokens"] == 800


def test_outgrowing_the_slot_ends_with_length():
    driven = Driven(num_slots=2, cells_per_slot=12)
    driven.handle(submit("a", 5, max_tokens=100))
    driven.run()
    assert (driven.done["a", 0].reason, driven.done["a", 0].num_output_tokens) == ("length", 7)


def test_waiting_past_the_deadline_is_refused_with_advice():
    driven = Driven(num_slots=1)
    driven.handle(submit("a", max_tokens=100), submit("b", deadline_s=2.0), submit("c", deadline_s=9.0))
    driven.step()
    driven.clock.advance(2.5)
    (done,) = driven.settle()
    assert (done.request_id, done.code, done.reason) == ("b", "server_overloaded", "error")
    assert "2 s" in done.message
    assert done.retry_after_s >= 1.0
    driven.run()
    assert driven.done["c", 0].reason == "length"


def test_the_deadline_only_bounds_the_first_wait():
    driven = Driven(num_slots=3, cells_per_slot=64, num_cells=50)
    driven.handle(submit("a", 20, max_tokens=29, deadline_s=0.1), submit("b", 15, max_tokens=25, deadline_s=0.1))
    driven.run()
    assert driven.loop.pulse().preemptions_total == 1
    assert {done.reason for done in driven.done.values()} == {"length"}


def test_a_full_queue_refuses():
    driven = Driven(num_slots=1, limits=LoopLimits(step_tokens=16, max_waiting=2))
    driven.handle(submit("a"))
    driven.step()
    driven.handle(submit("b"), submit("c", seeds=(1, 2)), submit("d"), submit("e"))
    driven.run()
    codes = {key: done.code for key, done in driven.done.items()}
    overloaded = "server_overloaded"
    expected = {("a", 0): None, ("b", 0): None, ("d", 0): None}
    assert codes == expected | {("c", 0): overloaded, ("c", 1): overloaded, ("e", 0): overloaded}
    assert driven.done["e", 0].retry_after_s >= 1.0
    assert "2 waiting" in driven.done["e", 0].message


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        (submit("a", 0), "no tokens"),
        (submit("a", max_tokens=0), "max_tokens is 0"),
        (submit("a", logit_bias=((64, 1.0),)), "logit_bias names token 64"),
        (submit("a", logit_bias=((-1, 1.0),)), "logit_bias names token -1"),
    ],
)
def test_what_the_edge_should_have_refused_ends_here_without_harm(wrong, name):
    driven = Driven()
    driven.handle(wrong, submit("b"))
    driven.run()
    assert driven.done["a", 0].code == "invalid_request"
    assert name in driven.done["a", 0].message
    assert driven.done["b", 0].reason == "length"


def test_a_token_outside_the_vocabulary_is_refused():
    driven = Driven(vocab_size=4)
    driven.handle(submit("a", 5))
    driven.run()
    assert "vocabulary ends at 3" in driven.done["a", 0].message


def test_an_id_that_still_runs_is_not_submitted_again():
    driven = Driven()
    driven.handle(submit("a", max_tokens=3), submit("a", max_tokens=9))
    driven.run()
    assert driven.done["a", 0].num_output_tokens == 3
    assert len(driven.of(WasQueued)) == 1


def test_unknown_ids_are_ignored():
    driven = Driven()
    driven.handle(Abort("x"), Pause("x"), Resume("x"), Abort("x", 3))
    assert not driven.loop.has_work
    assert driven.loop.step() == []


def test_shutdown_ends_everything_and_refuses_what_comes_after():
    driven = Driven(num_slots=1)
    driven.handle(submit("a"), submit("b"))
    driven.step()
    driven.handle(Shutdown(), submit("c"))
    driven.run()
    assert {done.code for done in driven.done.values()} == {"shutting_down"}
    assert sorted(driven.done) == [("a", 0), ("b", 0), ("c", 0)]
    assert driven.decoder.cells_filled == 0


def test_logits_that_are_no_numbers_end_their_sequence_only():
    def logits_of(tokens):
        row = np.zeros(64, dtype=np.float32)
        row[5] = 9.0
        if tokens[:2] == (9, 9) and len(tokens) == 7:
            row[3] = math.nan
        return row

    driven = Driven(logits_of=logits_of)
    driven.handle(submit("a", max_tokens=6), Submit("bad", (9,) * 5, SamplingParams(temperature=0.0), (1,), 6, 60.0))
    driven.run()
    done = driven.done["bad", 0]
    assert (done.code, done.reason, done.num_output_tokens) == ("engine_failed", "error", 2)
    assert driven.done["a", 0].reason == "length"


def test_a_batch_that_fails_is_halved_until_the_culprit_stands_alone():
    def fails(batch):
        return DecoderFailed("no room", is_fatal=False) if 42 in batch.token_ids else None

    driven = Driven(num_slots=8, fails=fails, next_token=lambda tokens: 1, limits=LoopLimits(step_tokens=64))
    driven.handle(*(submit(number, 3, max_tokens=4, temperature=0.0) for number in range(6)))
    driven.handle(Submit("bad", (1, 42, 2), SamplingParams(), (1, 2), 4, 60.0))
    first = driven.step()[-1]
    assert [row.request_id for row in first.rows] == ["0", "1", "2", "3", "4", "5"]
    assert [(done.request_id, done.choice) for done in first.done] == [("bad", 0)]
    driven.run()
    assert {key for key, done in driven.done.items() if done.code == "engine_failed"} == {("bad", 0), ("bad", 1)}
    assert "no room" in driven.done["bad", 0].message
    assert all(driven.done[str(number), 0].num_output_tokens == 4 for number in range(6))
    assert driven.decoder.cells_filled == 0


def test_a_fatal_failure_goes_up():
    driven = Driven(fails=lambda batch: DecoderFailed("gone", is_fatal=True))
    driven.handle(submit("a"))
    with pytest.raises(DecoderFailed, match="gone"):
        driven.step()


def test_logits_of_the_wrong_shape_are_fatal():
    class Short(FakeDecoder):
        def decode(self, batch):
            return super().decode(batch)[:0]

    driven = Driven()
    driven.loop._decoder = Short()
    driven.handle(submit("a"))
    with pytest.raises(DecoderFailed, match="shape") as caught:
        driven.step()
    assert caught.value.is_fatal


def test_the_decoder_bounds_the_batch_too():
    driven = Driven(max_batch_tokens=4)
    driven.handle(submit("a", 10))
    driven.run()
    assert max(len(batch.token_ids) for batch in driven.decoder.batches) == 4


def test_broken_books_are_reported_after_the_step_when_asked():
    driven = Driven()
    driven.handle(submit("a"))
    driven.step()
    driven.loop._kv.num_free_cells += 1
    reports = driven.loop.step()
    assert isinstance(reports[0], StepReport)
    assert "are not 512" in reports[1].check


def test_the_pulse_counts():
    driven = Driven()
    driven.handle(submit("a", 5, max_tokens=4), submit("b", 3, max_tokens=2))
    driven.step()
    pulse = driven.loop.pulse()
    assert (pulse.num_running, pulse.num_waiting, pulse.slots_used, pulse.step) == (2, 0, 2, 1)
    driven.run()
    pulse = driven.loop.pulse()
    assert (pulse.prefill_tokens_total, pulse.decode_tokens_total, pulse.cells_used) == (8, 3 + 1, 0)


def test_the_fake_decoder_notices_misuse():
    def batch(positions, slots, tokens=None):
        size = len(positions)
        ids = np.array(tokens or [1] * size, dtype=np.int32)
        return Batch(ids, np.array(positions), np.array(slots), np.array([True] * size))

    decoder = FakeDecoder(num_slots=2, cells_per_slot=3, num_cells=4, max_batch_tokens=5)
    decoder.decode(batch([0, 1, 0], [0, 0, 1]))
    for wrong in (
        batch([3], [0]),
        batch([1, 2], [1, 0]),
        batch([2, 3], [0, 0]),
        batch([2, 1], [0, 1]),
        batch([2], [0], [64]),
        batch([0] * 6, [0] * 6),
        batch([], []),
    ):
        with pytest.raises(FakeMisused):
            decoder.decode(wrong)
    with pytest.raises(FakeMisused):
        decoder.move(0, 1)
    decoder.release(1)
    decoder.move(0, 1)
    with pytest.raises(FakeMisused):
        decoder.move(0, 1)
    assert decoder.slots == [[], [1, 1]]
