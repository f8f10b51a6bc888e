"""Prefix cache, drafts, adapters, scores and idle work in one loop: none of them spoils another."""

import random

import msgspec
import pytest

from hitsend.core.request import IDLE_TIER, SamplingParams
from hitsend.serve.loop.messages import Abort, Pause, Resume, Submit, WasPreempted
from hitsend.serve.loop.roster import LoopLimits
from hitsend.testing import FakeClock
from tests.loop.driven import Driven
from tests.loop.test_draft_model import Instant, second, wrong_at_times
from tests.loop.test_seats import A, ask, cached
from tests.loop.test_verify import VOCAB, eager, likely_to_go_on, oracle


def both(proposer, *, num_bytes=10**6, **decoder):
    limits = LoopLimits(
        step_tokens=32,
        reserve_tokens=2,
        max_waiting=200,
        check_every_step=True,
        prefix_cache_bytes=num_bytes,
        prefix_step=4,
    )
    return Driven(limits=limits, speculator=proposer and eager(proposer), logits_of=likely_to_go_on, **decoder)


def test_drafts_use_no_cell_in_which_a_prefix_is_kept():
    sizes = {"vocab_size": VOCAB, "num_slots": 4, "cells_per_slot": 80, "num_cells": 80}
    plain = both(None, **sizes)
    plain.handle(ask("b", (9, 9, 8, 7), max_tokens=40, temperature=0.0))
    plain.run()
    run = both(oracle(AlwaysRight(), plain.sampled), **sizes)
    run.handle(ask("a", A[:38], max_tokens=28, temperature=0.0, seeds=(1,)))
    plain.sampled["a", 0] = []
    run.run()
    assert run.loop.pulse().cells_cached > 60
    run.handle(ask("b", (9, 9, 8, 7), max_tokens=40, temperature=0.0))
    run.run()
    assert run.tokens("b") == plain.tokens("b")


class AlwaysRight:
    def choice(self, among):
        return among[-1]

    def randrange(self, _):
        return 1


def test_a_saved_prefix_needs_room_for_all_of_it_while_it_is_brought():
    driven = cached(num_slots=3, cells_per_slot=60, num_cells=60)
    driven.handle(ask("long", (*A, *range(1, 13)), max_tokens=2))
    driven.run()
    driven.handle(ask("other", [50 - i for i in range(24)], max_tokens=30))
    driven.step()
    driven.handle(ask("short", (*A[:12], 60, 61), max_tokens=3))
    driven.run()
    assert driven.tokens("short") == alone_short()
    assert driven.done["short", 0].num_cached_tokens in (0, 12)


def alone_short():
    driven = Driven(cells_per_slot=512)
    driven.handle(ask("alone", (*A[:12], 60, 61), salt=None, max_tokens=3))
    return driven.run().tokens("alone")


@pytest.mark.parametrize("seeds", [(1,), (1, 2)])
def test_what_was_computed_and_is_found_again_after_a_preemption_was_not_cached(seeds):
    driven = cached(num_bytes=100, num_slots=4, cells_per_slot=64, num_cells=64, reserve_tokens=1)
    driven.handle(ask("first", A[:13], max_tokens=1))
    driven.run()
    driven.handle(ask("old", (50, 51, 52), max_tokens=40))
    driven.step()
    scored = {"prompt_logprobs": 0} if len(seeds) == 1 else {}
    driven.handle(ask("a", A[:16], seeds=seeds, max_tokens=30, **scored))
    driven.run()
    assert [each for each in driven.of(WasPreempted) if each.request_id == "a"]
    done = [driven.done["a", choice] for choice in range(len(seeds))]
    assert sum(each.num_prompt_tokens_computed + each.num_cached_tokens for each in done) == 16


def test_nobody_waits_for_idle_work_to_compute_their_prompt():
    driven = cached(step_tokens=512, cells_per_slot=2048, step=64)
    prompt = [1 + i % 50 for i in range(1500)]
    driven.handle(msgspec.structs.replace(ask("idle", prompt), tier=IDLE_TIER))
    driven.step()
    driven.handle(ask("now", (*prompt, 3), max_tokens=1))
    for _ in range(4):
        driven.step()
    assert ("now", 0) in driven.done


def test_who_is_within_its_share_waits_for_nobody_who_is_over_theirs():
    """They sit out while a third one's prompt is pending: so would whoever waits for them."""
    driven = cached(step_tokens=512, cells_per_slot=2048, step=64, num_slots=6)
    shared = [1 + i % 50 for i in range(1200)]
    other = [51 + i % 9 for i in range(1200)]
    driven.handle(ask("before", [60] * 1500, tenant=("greedy",), salt="x", max_tokens=1))
    driven.run()
    driven.handle(ask("greedy", shared, tenant=("greedy",)))
    driven.step()
    driven.handle(ask("third", other, tenant=("third",), salt="y", max_tokens=1))
    driven.handle(ask("modest", (*shared, 3), tenant=("modest",), max_tokens=1))
    for _ in range(8):
        driven.step()
    assert ("modest", 0) in driven.done


@pytest.mark.parametrize("seed", [1, 2, 43, 50])
@pytest.mark.parametrize("has_draft_model", [False, True])
def test_a_storm_of_everything_says_what_each_says_alone(seed, has_draft_model):
    rng = random.Random(seed)
    shared = rng.choice([True, True, False])
    sizes = {"vocab_size": VOCAB, "num_slots": 4, "cells_per_slot": 80, "num_cells": 150 if shared else None}
    sizes |= {"adapter_names": frozenset({"x"})}
    jobs = [_draw(rng, number) for number in range(24)]
    truth = Driven(logits_of=likely_to_go_on, **(sizes | {"num_cells": None}), limits=LoopLimits(step_tokens=64))
    for job in jobs:
        truth.handle(msgspec.structs.replace(job, cache_salt=None))
        truth.run()
    proposer = oracle(rng, truth.sampled)
    if has_draft_model:
        own = {"logits_of": wrong_at_times, **{k: v for k, v in sizes.items() if k != "adapter_names"}}
        proposer = Instant(second(own), FakeClock(), 0.001)
    run = both(proposer, num_bytes=rng.choice([1, 600, 10**6]), **sizes)
    for job in jobs:
        run.handle(job)
        for _ in range(rng.randrange(4)):
            run.step()
            other = rng.choice(jobs).request_id
            run.handle(
                rng.choice([Pause(other), Resume(other), Resume(other), Abort(other)])
                if rng.random() < 0.2
                else Resume(other)
            )
    run.handle(*(Resume(job.request_id) for job in jobs))
    run.run()
    for key, done in run.done.items():
        assert run.tokens(*key) == truth.tokens(*key)[: done.num_output_tokens]
        assert done.reason in {truth.done[key].reason, "cancelled"}, done.message
        (job,) = [each for each in jobs if each.request_id == key[0]]
        assert done.num_prompt_tokens_computed + done.num_cached_tokens <= len(job.prompt_token_ids)


def _draw(rng, number):
    adapter = rng.choice([None, None, None, "x"])
    size = rng.randrange(2, 50)
    prompt = (*A[: rng.choice([0, 8, 30])], *(rng.randrange(1, 4) for _ in range(size)))[:50]
    sampling = SamplingParams(temperature=rng.choice([0.0, 0.8]), prompt_logprobs=rng.choice([None, None, None, 0]))
    seeds = tuple(range(rng.choice([1, 1, 2, 3])))
    salt = rng.choice([f"one-{adapter}", f"one-{adapter}", None])
    return Submit(str(number), prompt, sampling, seeds, rng.randrange(1, 28), 600.0, adapter=adapter, cache_salt=salt)
