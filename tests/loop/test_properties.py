"""Random requests, commands, failures and sizes: what must hold whatever comes."""

import math
import random
import zlib
from collections import Counter

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hitsend.core.request import SamplingParams
from hitsend.serve.loop.decoder import DecoderFailed
from hitsend.serve.loop.messages import Abort, Pause, Resume, Shutdown, StepReport, Submit, WasAdmitted, WasMatched
from hitsend.serve.loop.roster import LoopLimits
from tests.loop.driven import Driven

pytestmark = pytest.mark.slow  # waits for sockets or processes, or tries very many examples

KINDS = (
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(top_k=3, presence_penalty=0.5),
    SamplingParams(dry_multiplier=1.0, typical_p=0.9, xtc_probability=0.5, min_tokens=3, stop_token_ids=(3,)),
)
SEEDS = st.integers(0, 10**9)


def draw_sizes(rng, **fixed):
    num_slots, cells_per_slot = rng.randint(1, 6), rng.choice([2, 20, 30, 45, 60])
    is_shared = rng.random() < 0.6
    num_cells = num_slots * cells_per_slot
    return {
        "num_slots": num_slots,
        "cells_per_slot": cells_per_slot,
        "num_cells": max(2, int(num_cells * rng.uniform(0.25, 0.6))) if is_shared else num_cells,
        "step_tokens": rng.choice([1, 2, 3, 7, 12, 20, 64]),
        "reserve_tokens": rng.choice([0, 1, 5]),
        "max_waiting": rng.choice([2, 40, 40]),
        "bad_batches": rng.choice([0, 0, 1, 4]),
        "bad_logits": rng.choice([0, 0, 1]),
        "prefix_cache_bytes": rng.choice([0, 1, 200, 2000, 10**6]),
        "prefix_step": rng.choice([1, 1, 4]),
        "can_go_back": rng.random() < 0.7,
    } | fixed


def draw_prompt(rng, size):
    """Often one of few beginnings, so that prompts share some of it."""
    shared = rng.choice([(), (1, 2, 3, 4), (1, 2, 3, 4, 5, 6, 7, 8), (1, 2, 9, 9, 9, 9)])
    return (*shared, *(rng.randrange(1, 16) for _ in range(size)))[:size]


def draw_submit(rng, request_id):
    longest = rng.choice([0, 40, 40]) if rng.random() < 0.15 else 10
    return Submit(
        request_id,
        draw_prompt(rng, rng.randint(min(1, longest), longest)),
        rng.choice(KINDS),
        tuple(rng.randrange(100) for _ in range(rng.randint(1, 3))),
        max_tokens=rng.choice([0, 1, 2]) if rng.random() < 0.15 else rng.randint(5, 40),
        deadline_s=rng.choice([0.05, 100.0, 100.0, 100.0]),
        tier=rng.randrange(3),
        tenant=rng.choice([(), ("a", "x"), ("a", "y"), ("b", "x")]),
        cache_salt=rng.choice([None, "one", "one", "one", "two"]),
        boundaries=tuple(rng.randint(1, 40) for _ in range(rng.randint(0, 3))),
    )


def draw_events(rng, num_requests):
    """Submits in order, other commands for ids that were there, and numbers of steps to let pass."""
    events = []
    for number in range(num_requests):
        events.append(draw_submit(rng, f"r{number}"))
        while rng.random() < 0.7:
            name = f"r{rng.randint(0, number)}"
            abort = Abort(name, rng.choice([None, 0, 1]))
            events.append(rng.choice([abort, Pause(name), Resume(name), Resume(name), events[0], 1, 2, 4, 6, 9]))
    return events


class Fickle(Driven):
    """A decoder that sometimes can't and sometimes gives no numbers, decided by the tokens alone."""

    def __init__(self, sizes):
        super().__init__(
            vocab_size=16,
            end_token_ids=frozenset({0}),
            num_slots=sizes["num_slots"],
            cells_per_slot=sizes["cells_per_slot"],
            num_cells=sizes["num_cells"],
            limits=LoopLimits(
                step_tokens=sizes["step_tokens"],
                reserve_tokens=sizes["reserve_tokens"],
                max_waiting=sizes["max_waiting"],
                check_every_step=True,
                prefix_cache_bytes=sizes["prefix_cache_bytes"],
                prefix_step=sizes["prefix_step"],
            ),
            can_go_back=sizes["can_go_back"],
        )
        self.sizes = sizes
        self.decoder.fails = self.fails
        self.decoder.logits_of = self.logits_of

    def fails(self, batch):
        mark = zlib.crc32(batch.token_ids.tobytes() + batch.positions.tobytes()) % 40
        return DecoderFailed("fickle", is_fatal=False) if mark < self.sizes["bad_batches"] else None

    def logits_of(self, tokens):
        mark = zlib.crc32(bytes(tokens))
        row = np.random.Generator(np.random.PCG64(mark)).standard_normal(16, dtype=np.float32)
        row[0] -= 2.0
        if mark % 80 < self.sizes["bad_logits"]:
            row[mark % 16] = math.nan
        return row


def play(driven, events):
    """Returns every choice that was submitted; a second submit under an id that still runs is none."""
    submitted = {}
    for event in events:
        if isinstance(event, int):
            driven.clock.advance(0.01)
            for _ in range(event):
                driven.step()
            continue
        if isinstance(event, Submit):
            if (event.request_id, 0) in submitted and event.request_id not in driven.loop._live:
                continue  # the id is free again: that would be a new request
            submitted |= {(event.request_id, choice): event for choice in range(len(event.seeds))}
        driven.handle(event)
        driven.check()
    return submitted


@settings(max_examples=150, deadline=None)
@given(seed=SEEDS, ending=st.sampled_from(["resume", "abort", "shutdown"]))
def test_every_choice_ends_exactly_once_and_nothing_is_left(seed, ending):
    rng = random.Random(seed)
    driven = Fickle(draw_sizes(rng))
    submitted = play(driven, draw_events(rng, 12))
    names = {name for name, _ in submitted}
    if ending == "shutdown":
        driven.handle(Shutdown())
    else:
        driven.handle(*(Resume(name) if ending == "resume" else Abort(name) for name in names))
    driven.run()
    assert set(driven.done) == set(submitted)
    pulse = driven.loop.pulse()
    assert driven.decoder.cells_filled <= pulse.cells_cached
    assert (pulse.cells_used, pulse.slots_used, pulse.num_running, pulse.num_waiting) == (0, 0, 0, 0)
    for key, done in driven.done.items():
        submit = submitted[key]
        assert done.reason in {"stop", "length", "cancelled", "error"}
        assert (done.code is None) == (done.reason in {"stop", "length", "cancelled"})
        assert done.num_output_tokens == len(driven.tokens(*key)) <= max(submit.max_tokens, 0)
        assert done.num_prompt_tokens_computed <= len(submit.prompt_token_ids)
        assert done.num_prompt_tokens_computed <= driven.prefilled[key]
        assert 0 not in driven.tokens(*key)
        if done.reason in {"stop", "length"}:
            siblings = range(len(submit.seeds))
            dones = [driven.done[key[0], choice] for choice in siblings]
            reached = [each.num_prompt_tokens_computed + each.num_cached_tokens for each in dones]
            assert max(reached) == len(submit.prompt_token_ids), "somebody computed it for all, or found it"


@settings(max_examples=100, deadline=None)
@given(seed=SEEDS)
def test_batches_keep_the_budget_and_rows_add_up(seed):
    rng = random.Random(seed)
    sizes = draw_sizes(rng, bad_batches=0)
    driven = Fickle(sizes)
    submitted = play(driven, draw_events(rng, 12))
    driven.handle(*(Resume(name) for name, _ in submitted))
    driven.run()
    steps = driven.of(StepReport)
    assert len(steps) == len(driven.decoder.batches)
    for report, batch in zip(steps, driven.decoder.batches, strict=True):
        fed = sum(row.prefill_tokens + row.decode_tokens for row in report.rows)
        assert fed == len(batch.token_ids) <= sizes["step_tokens"]
        assert len({(row.request_id, row.choice) for row in report.rows}) == len(report.rows)
        assert all(row.decode_tokens <= 1 and row.decode_tokens * row.prefill_tokens == 0 for row in report.rows)
        assert report.started_at <= report.ended_at
    pulse = driven.loop.pulse()
    assert pulse.prefill_tokens_total == sum(driven.prefilled.values())
    if pulse.preemptions_total == 0:
        for key, done in driven.done.items():
            assert driven.prefilled[key] == done.num_prompt_tokens_computed


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS)
def test_output_does_not_depend_on_company(seed):
    rng = random.Random(seed)
    sizes = draw_sizes(rng, bad_batches=0, max_waiting=40)
    crowded = Fickle(sizes)
    submitted = play(crowded, draw_events(rng, 8))
    crowded.handle(*(Resume(name) for name, _ in submitted))
    crowded.run()
    ended = [key for key, done in crowded.done.items() if done.reason in {"stop", "length"}]
    for name, choice in ended[:6]:
        submit = submitted[name, choice]
        alone = Fickle(sizes)
        alone.handle(msgspec.structs.replace(submit, request_id="alone", seeds=(submit.seeds[choice],), deadline_s=9.0))
        alone.run()
        assert alone.tokens("alone") == crowded.tokens(name, choice)
        assert alone.done["alone", 0].reason == crowded.done[name, choice].reason


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS)
def test_whoever_is_admitted_finishes_while_others_keep_coming(seed):
    """Aborts and failures aside, a bounded number of steps is enough: no starvation, no endless preemption."""
    rng = random.Random(seed)
    driven = Fickle(draw_sizes(rng, bad_batches=0, bad_logits=0))
    for number in range(15):
        driven.handle(draw_submit(rng, f"r{number}"))
        for _ in range(rng.randint(0, 8)):
            driven.step()
    driven.run(limit=20_000)
    admitted = {(report.request_id, report.choice) for report in driven.of(WasAdmitted)}
    assert {driven.done[key].reason for key in admitted} <= {"stop", "length"}


def test_the_scenarios_reach_what_they_are_for():
    """Guards the properties above against becoming empty: preemptions, moves and every kind of ending do occur."""
    preemptions, moves, copies, endings, sources = 0, 0, 0, Counter(), Counter()
    for seed in range(80):
        rng = random.Random(seed)
        driven = Fickle(draw_sizes(rng))
        names = {name for name, _ in play(driven, draw_events(rng, 12))}
        driven.handle(*(Resume(name) for name in names))
        driven.run()
        preemptions += driven.loop.pulse().preemptions_total
        moves += len(driven.decoder.moves)
        copies += len(driven.decoder.copies)
        endings.update(done.code or done.reason for done in driven.done.values())
        sources.update(report.source for report in driven.of(WasMatched))
    assert min(sources[source] for source in ("live", "saved", "sibling", "")) > 20
    assert min(preemptions, moves, copies) > 20
    assert set(endings) == {
        "stop",
        "length",
        "cancelled",
        "engine_failed",
        "server_overloaded",
        "context_length_exceeded",
        "invalid_request",
    }
    assert endings["length"] + endings["stop"] > 100
