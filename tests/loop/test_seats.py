"""What of a prompt isn't computed again: left by those that ended, computed by those that run, saved in memory."""

import random

import pytest

from hitsend.core.request import SamplingParams
from hitsend.serve.loop.costs import Costs
from hitsend.serve.loop.decoder import DecoderFailed
from hitsend.serve.loop.messages import Abort, Pause, Resume, Submit, WasMatched
from hitsend.serve.loop.roster import LoopLimits
from tests.loop.driven import Driven

A = tuple(1 + i % 50 for i in range(40))


class Files:
    """A disk: what is put is there, unless it is taken away. `asked` are the salts that something was read for.

    `looks` says how often somebody has to ask until a file is there; `fetched` are the numbers that were asked for.
    """

    problem = None

    def __init__(self, looks=0):
        self.files, self.number, self.asked, self.looks, self.fetched = {}, 0, [], looks, []

    def fetch(self, number):
        self.fetched.append(number)
        return self.fetched.count(number) > self.looks

    def takes(self, num_bytes):
        return True

    def put(self, salt, tokens, saved):
        self.number += 1
        self.files[self.number] = saved
        return self.number

    def get(self, number, salt, tokens):
        self.asked.append(salt)
        return self.files.get(number)

    def drop(self, number):
        self.files.pop(number, None)


def cached(*, num_bytes=10**6, step=4, step_tokens=16, reserve_tokens=4, answers=True, disk=None, **decoder):
    limits = LoopLimits(
        step_tokens=step_tokens,
        reserve_tokens=reserve_tokens,
        max_waiting=200,
        check_every_step=True,
        prefix_cache_bytes=num_bytes,
        prefix_step=step,
        prefix_answers=answers,
        prefix_disk_bytes=0 if disk is None else 10**6,
    )
    return Driven(limits=limits, disk=disk, **decoder)


def ask(request_id, prompt, *, seeds=(1,), max_tokens=6, salt="one", boundaries=(), tenant=(), **sampling):
    return Submit(
        request_id,
        tuple(prompt),
        SamplingParams(**sampling),
        seeds,
        max_tokens,
        60.0,
        tenant=tenant,
        cache_salt=salt,
        boundaries=boundaries,
    )


def alone(prompt, **fields):
    driven = Driven(cells_per_slot=512)
    driven.handle(ask("alone", prompt, salt=None, **fields))
    return driven.run().tokens("alone")


def found(driven, request_id):
    (report,) = [each for each in driven.of(WasMatched) if each.request_id == request_id]
    return report.num_usable, report.source


def test_a_second_turn_takes_its_slot_again_and_computes_the_rest():
    driven = cached()
    driven.handle(ask("a", A))
    second = (*A, *driven.run().tokens("a"), 7, 8, 9)
    pulse = driven.loop.pulse()
    assert (pulse.cells_used, pulse.cells_cached) == (0, 45), "the last token was never computed"
    driven.handle(ask("b", second))
    driven.run()
    assert found(driven, "b") == (44, "live")
    assert driven.prefilled["b", 0] == len(second) - 44
    done = driven.done["b", 0]
    assert (done.num_cached_tokens, done.num_prompt_tokens_computed) == (44, len(second) - 44)
    assert driven.tokens("b") == alone(second)
    assert driven.loop.pulse().cells_cached == len(second) + 5, "one conversation, kept once"
    assert driven.decoder.copies == []


def test_without_answers_only_what_was_prompt_is_used_again():
    driven = cached(answers=False)
    driven.handle(ask("a", A[:38]))
    driven.handle(ask("b", (*A[:38], *driven.run().tokens("a"), 7)))
    driven.run()
    assert found(driven, "b") == (36, "live")


def test_a_shared_beginning_is_copied_and_stays_for_the_next_one():
    driven = cached()
    driven.handle(ask("a", (*A, *range(1, 20))))
    driven.run()
    for name in ("b", "c"):
        driven.handle(ask(name, (*A, 60, 61)))
        driven.run()
        assert driven.tokens(name) == alone((*A, 60, 61))
    assert found(driven, "b") == (40, "live")
    assert found(driven, "c") == (40, "live")
    driven.handle(ask("d", (*A, *range(1, 20), 33)))
    driven.run()
    assert found(driven, "d")[0] == 56, "nothing of the first one was lost"


def test_nobody_finds_what_others_left():
    driven = cached()
    for name, salt in (("a", "one"), ("b", "two"), ("c", None)):
        driven.handle(ask(name, A, salt=salt))
        driven.run()
    driven.handle(ask("d", A, salt=None))
    driven.run()
    assert found(driven, "b") == (0, "")
    assert [driven.done[name, 0].num_cached_tokens for name in "abcd"] == [0, 0, 0, 0]
    assert [driven.prefilled[name, 0] for name in "abcd"] == [40] * 4
    assert {report.request_id for report in driven.of(WasMatched)} == {"a", "b"}, "who has no salt is not looked up"


def test_kept_cells_make_way_at_once_and_are_saved():
    driven = cached(num_slots=2)
    for name, first in (("a", 1), ("b", 2), ("c", 3)):
        driven.handle(ask(name, (first, *A[1:])))
        driven.run()
    pulse = driven.loop.pulse()
    assert pulse.cells_cached == 2 * 45
    assert pulse.cache_bytes == 4 * 45 + 4, "the one that made way: four bytes a token, and the adapter"
    for name, first, source in (("d", 1, "saved"), ("e", 3, "live")):
        driven.handle(ask(name, (first, *A[1:])))
        driven.run()
        assert found(driven, name) == (36, source)
        assert driven.tokens(name) == alone((first, *A[1:]))


def test_without_room_for_bytes_what_makes_way_is_gone():
    driven = cached(num_slots=1, num_bytes=4 * 44)
    for name, first in (("a", 1), ("b", 2), ("c", 1)):
        driven.handle(ask(name, (first, *A[1:])))
        driven.run()
        assert found(driven, name) == (0, "")
    assert driven.loop.pulse().cache_bytes == 0


@pytest.mark.parametrize("shared", [None, 256])
def test_identical_prompts_that_come_together_are_computed_once(shared):
    driven = cached(num_cells=shared)
    driven.handle(*(ask(name, A, seeds=(seed,)) for seed, name in enumerate("abcd")))
    driven.run()
    assert [driven.prefilled[name, 0] for name in "abcd"] == [40, 4, 4, 4]
    assert [found(driven, name) for name in "bcd"] == [(36, "sibling")] * 3
    for seed, name in enumerate("abcd"):
        assert driven.tokens(name) == alone(A, seeds=(seed,))


def test_those_that_share_a_beginning_wait_for_that_only():
    driven = cached(step_tokens=8)
    driven.handle(ask("a", (*A, *A)))
    driven.step()
    driven.handle(ask("b", (*A[:16], 55, 56), tenant=("somebody who had less",)))
    while not driven.tokens("b"):
        driven.step()
    assert found(driven, "b") == (16, "sibling")
    assert not driven.tokens("a"), "its own prompt isn't finished yet"
    driven.run()
    assert driven.tokens("b") == alone((*A[:16], 55, 56))


@pytest.mark.parametrize("ending", [Abort("a"), Pause("a")])
def test_when_the_one_that_computes_goes_the_others_go_on(ending):
    driven = cached(step_tokens=8)
    driven.handle(ask("a", A), ask("b", A), ask("c", A))
    driven.step()
    driven.step()
    driven.handle(ending)
    driven.run()
    assert driven.tokens("b") == driven.tokens("c") == alone(A)
    assert found(driven, "b")[0] == 16, "what there was"
    assert driven.prefilled["b", 0] + driven.prefilled["c", 0] == 24 + 4
    driven.handle(Resume("a"))
    driven.run()
    assert driven.loop.pulse().cells_used == 0


def test_choices_of_one_request_look_once():
    driven = cached()
    driven.handle(ask("a", A))
    driven.run()
    driven.handle(ask("b", A, seeds=(1, 2, 3)))
    driven.run()
    assert [driven.prefilled["b", choice] for choice in range(3)] == [4, 0, 0]
    assert [driven.done["b", choice].num_cached_tokens for choice in range(3)] == [36, 0, 0]
    assert [driven.tokens("b", choice) for choice in range(3)] == [alone(A, seeds=(seed,)) for seed in (1, 2, 3)]


def test_a_prompt_that_is_scored_is_computed_whole():
    driven = cached()
    driven.handle(ask("a", A))
    driven.run()
    driven.handle(ask("b", A, prompt_logprobs=0))
    driven.run()
    assert driven.prefilled["b", 0] == 40


def test_what_failed_is_not_kept():
    driven = cached(fails=lambda batch: DecoderFailed("no", is_fatal=False) if 59 in batch.token_ids else None)
    driven.handle(ask("a", (*A[:20], 59)))
    driven.run()
    pulse = driven.loop.pulse()
    assert driven.done["a", 0].code == "engine_failed"
    assert (pulse.cells_cached, pulse.cache_bytes, driven.decoder.cells_filled) == (0, 0, 0)


def test_gaps_are_closed_over_kept_cells():
    driven = cached(num_slots=3)
    driven.handle(ask("a", (5, *A), max_tokens=2), ask("b", (6, *A), max_tokens=30), ask("c", (7, *A), max_tokens=2))
    driven.run()
    driven.handle(ask("d", (8, *A), max_tokens=20), ask("e", (5, *A)), ask("f", (9, *A)))
    driven.run()
    assert driven.tokens("d") == alone((8, *A), max_tokens=20)
    assert driven.tokens("e") == alone((5, *A))
    assert driven.tokens("f") == alone((9, *A))


def test_a_model_that_cannot_go_back_leaves_checkpoints_where_messages_end():
    driven = cached(can_go_back=False, cells_per_slot=1024, num_slots=2, step_tokens=64)
    prompt, known = A, 0
    for turn in range(10):
        name = f"turn {turn}"
        driven.handle(ask(name, prompt, boundaries=(len(prompt) - 3,)))
        driven.run()
        assert driven.tokens(name) == alone(prompt)
        assert driven.prefilled[name, 0] <= len(prompt) - known + 3 + 4, "new ones, what comes after, one step"
        known = len(prompt)
        prompt = (*prompt, 60, 60, *A[: 5 + turn])  # what came back is never what was decoded


def test_a_storm_of_preemptions_passes_and_everybody_ends():
    """A hundred requests on a third of the memory that they need together."""
    rng = random.Random(1)
    prompts = [tuple(rng.randrange(1, 60) for _ in range(rng.randint(10, 40))) for _ in range(100)]
    needed = sum(len(prompt) + 60 for prompt in prompts[:16])
    driven = cached(num_slots=16, cells_per_slot=128, num_cells=needed // 3, reserve_tokens=1, step_tokens=32)
    driven.handle(*(ask(str(n), prompt, max_tokens=60) for n, prompt in enumerate(prompts)))
    driven.run(limit=20_000)
    assert {done.reason for done in driven.done.values()} == {"length"}
    assert len(driven.done) == 100
    pulse = driven.loop.pulse()
    assert pulse.preemptions_total > 20
    recomputed = sum(driven.prefilled.values()) - sum(map(len, prompts))
    assert recomputed <= 0, "whoever gave up its place found all that it had"
    for n in range(0, 100, 9):
        assert driven.tokens(n) == alone(prompts[n], max_tokens=60)
    assert pulse.cells_used == 0


def test_saving_is_left_where_computing_is_cheaper():
    costs = Costs()
    assert costs.is_saving_cheaper
    for _ in range(50):
        costs.saved(10, 1000, 1.0)
        costs.computed(1000, 0.001)
    assert not costs.is_saving_cheaper


def test_what_memory_has_no_room_for_comes_back_from_disk():
    disk = Files()
    driven = cached(num_slots=1, num_bytes=200, disk=disk)
    prompts = {name: (first, *A[1:]) for first, name in enumerate("abc", 1)}
    for name, prompt in prompts.items():
        driven.handle(ask(name, prompt))
        driven.run()
    pulse = driven.loop.pulse()
    assert (pulse.cache_bytes, pulse.cache_disk_bytes, len(disk.files)) == (184, 184, 1)
    for name, salt, expected in (("other", "two", (0, "")), ("again", "one", (36, "disk"))):
        driven.handle(ask(name, prompts["a"], salt=salt))
        driven.run()
        assert found(driven, name) == expected
        assert driven.tokens(name) == alone(prompts["a"])
    assert driven.done["again", 0].num_cached_tokens == 36
    assert disk.asked == ["one"], "no file is read for who may not have it"


def beside_disk(disk, *, decodes):
    """Three prompts were here and one of them is on disk only; then somebody decodes, and it is asked for again."""
    driven = cached(num_slots=2, num_bytes=200, disk=disk)
    for first, name in enumerate("abcd", 1):
        driven.handle(ask(name, (first, *A[1:])))
        driven.run()
    if decodes:
        driven.handle(ask("busy", (9, 9, 9), max_tokens=30, salt="other"))
        driven.step()
    driven.handle(ask("again", (1, *A[1:])))
    return driven


def test_nobody_waits_for_a_file_that_is_read_for_another():
    disk = Files(looks=5)
    driven = beside_disk(disk, decodes=True)
    for _ in range(5):
        rows = driven.step()[-1].rows
        assert [row.request_id for row in rows] == ["busy"], "a token in each step meanwhile"
        assert disk.asked == []
    driven.run()
    assert disk.asked == ["one"]
    assert found(driven, "again") == (36, "disk")
    assert driven.tokens("again") == alone((1, *A[1:]))


def test_a_file_is_read_at_once_where_nobody_else_goes_on():
    disk = Files(looks=10**6)
    driven = beside_disk(disk, decodes=False)
    driven.step()
    assert (disk.asked, disk.fetched) == (["one"], [])
    driven = beside_disk(disk := Files(looks=10**6), decodes=True)
    driven.run()  # the other one ends, and then nothing is waited for
    assert (disk.asked, found(driven, "again")) == (["one"], (36, "disk"))


def test_one_that_waits_for_a_file_can_go():
    disk = Files(looks=10**6)
    driven = beside_disk(disk, decodes=True)
    driven.step()
    driven.handle(Abort("again"))
    driven.run()
    assert driven.done["again", 0].reason == "cancelled"
    assert disk.asked == []
    assert driven.loop.pulse().check is None


def test_a_file_that_is_lost_is_a_miss_and_nothing_else():
    disk = Files()
    driven = cached(num_slots=1, num_bytes=200, disk=disk)
    for first, name in enumerate("abc", 1):
        driven.handle(ask(name, (first, *A[1:])))
        driven.run()
    disk.files.clear()
    driven.handle(ask("again", (1, *A[1:])))
    driven.run()
    assert found(driven, "again") == (0, "")
    assert driven.tokens("again") == alone((1, *A[1:]))
    assert driven.prefilled["again", 0] == 40
