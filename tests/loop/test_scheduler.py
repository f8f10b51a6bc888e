from hitsend.serve.loop.messages import Pause, Resume, WasAdmitted, WasPreempted
from hitsend.serve.loop.roster import LoopLimits
from tests.loop.driven import Driven, submit


def limits(step_tokens=16, reserve_tokens=4):
    return LoopLimits(step_tokens=step_tokens, reserve_tokens=reserve_tokens, check_every_step=True)


def rows(reports):
    return {row.request_id: (row.prefill_tokens, row.decode_tokens) for row in reports[-1].rows}


def test_decodes_go_first_and_prompts_fill_the_rest():
    driven = Driven(limits=limits(16))
    driven.handle(submit("a", 5))
    assert rows(driven.step()) == {"a": (5, 0)}
    driven.handle(submit("b", 40))
    assert rows(driven.step()) == {"a": (0, 1), "b": (15, 0)}
    assert rows(driven.step()) == {"a": (0, 1), "b": (15, 0)}
    assert rows(driven.step()) == {"a": (0, 1), "b": (10, 0)}
    assert rows(driven.step()) == {"a": (0, 1), "b": (0, 1)}


def test_only_the_last_prompt_token_wants_logits():
    driven = Driven(limits=limits(16))
    driven.handle(submit("a", 20))
    driven.step()
    driven.step()
    assert [batch.wants_logits.tolist() for batch in driven.decoder.batches] == [[False] * 16, [False] * 3 + [True]]


def test_prompts_get_a_part_when_decodes_could_fill_the_budget():
    driven = Driven(num_slots=12, limits=limits(8))
    for number in range(10):
        driven.handle(submit(number, 1, max_tokens=100))
    while driven.loop.pulse().num_running < 10:
        driven.step()
    driven.handle(submit("late", 6))
    for _ in range(6):
        assert rows(driven.step())["late"] == (1, 0)
    assert driven.tokens("late")


def test_a_budget_smaller_than_the_decodes_serves_them_in_turn():
    driven = Driven(num_slots=6, limits=limits(2))
    for number in range(6):
        driven.handle(submit(number, 1, max_tokens=12))
    driven.run()
    assert {done.num_output_tokens for done in driven.done.values()} == {12}
    for _ in range(6):
        driven.handle(submit(len(driven.done), 1, max_tokens=100))
        for _ in range(3):
            driven.step()
    spread = [len(driven.tokens(number)) for number in range(6)]
    assert max(spread) - min(spread) <= 1


def test_a_budget_of_one_token_alternates():
    driven = Driven(num_slots=2, limits=limits(1))
    driven.handle(submit("a", 1, max_tokens=20))
    driven.step()
    driven.handle(submit("b", 9, max_tokens=1))
    for _ in range(18):
        driven.step()
    assert driven.done["b", 0].reason == "length"
    assert len(driven.tokens("a")) >= 9
    driven.run()


def test_a_budget_of_one_token_does_not_stand_still_while_nobody_can_be_admitted():
    driven = Driven(num_slots=1, limits=limits(1))
    driven.handle(submit("a", 2), submit("b", 2))
    driven.run()
    assert {done.reason for done in driven.done.values()} == {"length"}


def test_the_queue_is_first_come_first_served_within_a_tier():
    driven = Driven(num_slots=1)
    driven.handle(submit("first", tier=1), submit("second", tier=1), submit("urgent", tier=0))
    driven.run()
    assert [report.request_id for report in driven.of(WasAdmitted)] == ["urgent", "first", "second"]


def test_nobody_overtakes_a_head_that_does_not_fit_yet():
    driven = Driven(num_slots=4, cells_per_slot=40, num_cells=50)
    driven.handle(submit("big", 20, max_tokens=10))
    driven.step()
    driven.handle(submit("wide", 30, max_tokens=4), submit("small", 2, max_tokens=2))
    driven.step()
    assert driven.loop.pulse().num_waiting == 2
    driven.run()
    assert [report.request_id for report in driven.of(WasAdmitted)] == ["big", "wide", "small"]


def test_admission_holds_the_prompt_and_a_reserve():
    driven = Driven(num_slots=4, cells_per_slot=64, num_cells=100, limits=limits(64, reserve_tokens=10))
    driven.handle(submit("a", 20, max_tokens=30), submit("b", 20, max_tokens=3), submit("c", 50, max_tokens=30))
    driven.step()
    admitted = {report.request_id: report for report in driven.of(WasAdmitted)}
    assert (admitted["a"].cells_free, admitted["a"].cells_reserved) == (100, 30)
    assert (admitted["b"].cells_free, admitted["b"].cells_reserved) == (70, 23)
    assert "c" not in admitted
    assert driven.reports[-1].cells_used == 53


def test_without_a_reserve_there_is_still_a_cell_for_the_first_token():
    driven = Driven(num_slots=2, cells_per_slot=30, num_cells=45, limits=limits(64, reserve_tokens=0))
    driven.handle(submit("a", 22), submit("b", 22))
    driven.step()
    assert [report.cells_reserved for report in driven.of(WasAdmitted)] == [23]


def test_out_of_cells_the_youngest_is_computed_again_and_nothing_of_its_output_changes():
    alone = {}
    for number in range(3):
        driven = Driven(num_slots=4, cells_per_slot=64, limits=limits())
        driven.handle(submit(number, 10, max_tokens=30, seeds=(number,)))
        alone[number] = driven.run().tokens(number)
    driven = Driven(num_slots=4, cells_per_slot=64, num_cells=70, limits=limits())
    driven.handle(*(submit(number, 10, max_tokens=30, seeds=(number,)) for number in range(3)))
    driven.run()
    preempted = driven.of(WasPreempted)
    assert preempted[0].request_id == "2"
    assert "0" not in {report.request_id for report in preempted}
    assert {number: driven.tokens(number) for number in range(3)} == alone
    for number in range(3):
        assert driven.done[str(number), 0].num_prompt_tokens_computed == 10
        assert driven.done[str(number), 0].num_output_tokens == 30
    again = sum(report.num_computed_tokens for report in preempted)
    assert sum(driven.prefilled.values()) + driven.loop.pulse().decode_tokens_total == 3 * 39 + again


def test_the_preempted_wait_at_the_head_of_the_queue():
    driven = Driven(num_slots=4, cells_per_slot=64, num_cells=50)
    driven.handle(submit("old", 20, max_tokens=25), submit("young", 10, max_tokens=20, tier=5))
    while not driven.of(WasPreempted):
        driven.step()
    driven.handle(submit("new", 10, max_tokens=1, tier=0))
    driven.run()
    assert [report.request_id for report in driven.of(WasAdmitted)] == ["old", "young", "young", "new"]


def test_the_paused_lose_their_cells_before_anybody_who_runs():
    driven = Driven(num_slots=4, cells_per_slot=64, num_cells=50)
    driven.handle(submit("old", 15, max_tokens=20), submit("young", 10, max_tokens=30))
    driven.step()
    driven.step()
    driven.handle(Pause("old"))
    driven.run()
    assert [report.request_id for report in driven.of(WasPreempted)] == ["old"]
    assert driven.done["young", 0].num_output_tokens == 30
    driven.handle(Resume("old"))
    driven.run()
    assert driven.done["old", 0].num_output_tokens == 20


def test_gaps_are_closed_in_per_stream_mode():
    driven = Driven(num_slots=4)
    driven.handle(*(submit(number, 3, max_tokens=40 if number != 1 else 2) for number in range(4)))
    for _ in range(4):
        driven.step()
    assert driven.decoder.moves == [(3, 1)]
    assert sorted(set(driven.decoder.batches[-1].slots.tolist())) == [0, 1, 2]


def test_a_waiting_request_fills_the_gap_without_a_move():
    driven = Driven(num_slots=3)
    driven.handle(*(submit(number, 3, max_tokens=40 if number != 1 else 2) for number in range(4)))
    for _ in range(4):
        driven.step()
    assert driven.decoder.moves == []
    assert sorted(set(driven.decoder.batches[-1].slots.tolist())) == [0, 1, 2]


def test_slots_that_are_together_but_not_at_zero_stay():
    driven = Driven(num_slots=4)
    driven.handle(*(submit(number, 3, max_tokens=40 if number > 0 else 2) for number in range(4)))
    for _ in range(4):
        driven.step()
    assert driven.decoder.moves == []
    assert sorted(set(driven.decoder.batches[-1].slots.tolist())) == [1, 2, 3]


def test_unified_mode_moves_nothing():
    driven = Driven(num_slots=4, cells_per_slot=64, num_cells=200)
    driven.handle(*(submit(number, 3, max_tokens=20 if number != 1 else 2) for number in range(4)))
    driven.run()
    assert driven.decoder.moves == []


def test_moving_does_not_change_the_output():
    alone = Driven(num_slots=4)
    alone.handle(submit("kept", 6, seeds=(9,), max_tokens=30))
    alone.run()
    driven = Driven(num_slots=4)
    driven.handle(submit("x", 3, max_tokens=9), submit("y", 3, max_tokens=20), submit("z", 3, max_tokens=4))
    driven.handle(submit("kept", 6, seeds=(9,), max_tokens=30))
    driven.run()
    assert driven.decoder.moves
    assert driven.tokens("kept") == alone.tokens("kept")
