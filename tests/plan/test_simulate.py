"""plan/simulate.py, timed_decoder.py, steps.py: what a server does with its cache, drafts and clients, without one."""

import json
import random
import statistics

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from hitsend.cli.plan import app
from hitsend.cli.plan_simulate import trace_document
from hitsend.core.errors import ConfigError
from hitsend.plan.fleet import Place, Served
from hitsend.plan.simulate import simulate
from hitsend.plan.steps import (
    Answers,
    Calibration,
    Edge,
    Room,
    answers_of,
    attended,
    calibrated,
    calls_of,
    edge_of,
    fit_steps,
    read_calibration,
    steps_of,
)
from hitsend.plan.timed_decoder import answer
from hitsend.plan.timing import MeasuredTiming, Uneven, Work, parts_of
from hitsend.plan.traffic import Arrival, read_trace
from hitsend.serve.engine.calls import cut_by_length

TIMING = MeasuredTiming(step_ms=10, prefill_ms=1, decode_ms=5)
PLACE = Place(slots=8, cells_per_slot=1024, cells=8192, step_tokens=512)
CACHED = msgspec.structs.replace(PLACE, prefix_cache_bytes=1 << 30)


def test_a_closed_loop_keeps_so_many_in_flight_whatever_their_times_say():
    arrivals = [Arrival(1000.0, 20, 8) for _ in range(12)]
    served = simulate(arrivals, TIMING, PLACE, concurrency=3)
    assert all(one.ttft_s is not None for one in served)
    assert [one.at_s for one in served[:3]] == [0.0] * 3
    ends = [(one.at_s, 1) for one in served] + [(one.ended_s, -1) for one in served]
    running = most = 0
    for _, change in sorted(ends):
        running += change
        most = max(most, running)
    assert most == 3
    begun = sorted(one.at_s for one in served[3:])
    assert begun == sorted(one.ended_s for one in served)[:9]


def test_turns_follow_each_other_and_go_on_from_what_was_said():
    turns = [
        Arrival(0.0, 300, 10, conversation="a"),
        Arrival(0.0, 350, 10, conversation="a", repeated=310),
        Arrival(5.0, 300, 10, conversation="b"),
        Arrival(5.0, 350, 10, conversation="b"),
    ]
    first, second, other, again = simulate(turns, TIMING, CACHED)
    assert second.at_s == first.ended_s
    assert again.at_s == other.ended_s
    assert first.cached == other.cached == 0
    # whole steps of 64 tokens, of 309 that were computed
    assert second.cached == 256
    assert again.cached == 0
    assert (second.ttft_s or 0) == pytest.approx((again.ttft_s or 0) - 0.256, abs=1e-6)


def test_a_cache_that_must_be_brought_takes_its_time():
    slow = msgspec.structs.replace(TIMING, copied_ms=1000.0)
    shared = [Arrival(0.0, 400, 40, shared=320), Arrival(0.5, 400, 4, shared=320)]
    quick, late = (simulate(shared, timing, CACHED)[1] for timing in (TIMING, slow))
    assert quick.cached == late.cached == 320
    assert (late.ttft_s or 0) > (quick.ttft_s or 0) + 0.3


def test_answers_that_repeat_themselves_are_guessed_ahead():
    drafting = msgspec.structs.replace(PLACE, drafts=True)
    often, never = Answers(enter=0.5, leave=0.0), Answers()
    arrivals = [Arrival(0.0, 20, 120)]
    # a token more in a pass costs little beside the pass
    cheap = MeasuredTiming(step_ms=20, prefill_ms=1, decode_ms=1)
    plain, guessed, unguessable = (
        simulate(arrivals, cheap, place, answers=how)[0]
        for place, how in ((PLACE, often), (drafting, often), (drafting, never))
    )
    assert guessed.tokens == plain.tokens == unguessable.tokens == 120
    assert (guessed.tpot_s or 1) < 0.7 * (plain.tpot_s or 0)
    assert unguessable.tpot_s == pytest.approx(plain.tpot_s, rel=0.01)


def test_answers_are_the_same_for_the_same_seed_and_repeat_as_told():
    how = Answers(enter=0.2, leave=0.05)
    assert answer(200, how, 3) == answer(200, how, 3)
    assert answer(200, how, 3) != answer(200, how, 4)
    forever = answer(400, Answers(enter=1.0, leave=0.0), 1)
    period = next(period for period in range(1, 60) if forever[-200:] == forever[-200 - period : -period])
    assert 4 <= period <= 40


def test_the_edge_costs_what_it_is_said_to():
    bare, edged = (
        simulate([Arrival(0.0, 20, 8)], TIMING, PLACE, edge=edge)[0] for edge in (None, Edge(before_ms=20, after_ms=5))
    )
    assert (edged.ttft_s or 0) == pytest.approx((bare.ttft_s or 0) + 0.025)
    at_once = simulate([Arrival(0.0, 20, 8)] * 2, TIMING, PLACE, edge=Edge(each_ms=7))
    assert (at_once[1].ttft_s or 0) > (at_once[0].ttft_s or 0)


STEPS = MeasuredTiming(
    step_ms=8, prefill_ms=1.2, decode_ms=1, wide_ms=3, tile_ms=4, piece_ms=2, attended_ms=1500, held_ms=3, alone_ms=9
)


def records(count, seed=1):
    """Flight records of requests that run two by two, their steps timed by STEPS."""
    rng, step, now, found = random.Random(seed), 0, 100.0, []
    for pair in range(count):
        prompts = [rng.randint(20, 300), rng.randint(20, 300)]
        begun = now
        events = [[], []]
        held = [0, 0]
        for turn in range(12):
            step += 1
            prefill = [prompts[one] if turn == one else 0 for one in (0, 1)]
            present = [one for one in (0, 1) if turn >= one]
            decode = [int(one in present and turn > one) for one in (0, 1)]
            work = Work(
                decodes=sum(decode),
                held=sum(held[one] + 1 for one in (0, 1) if decode[one]),
                pieces=calls_of((0, tokens) for tokens in prefill if tokens),
                prefill=sum(prefill),
                attended=sum(attended(0, tokens) for tokens in prefill),
            )
            seconds = STEPS.step_s(work)
            for one in present:
                events[one].append(_step(step, now - begun, seconds, (prefill[one], decode[one]), work, len(present)))
                held[one] += prefill[one] + decode[one]
            now += seconds + 0.001
        found += [_record(f"{pair}-{one}", begun, events[one]) for one in (0, 1)]
    return found


def _step(number, at_s, seconds, own, work, sequences):
    return {
        "type": "step",
        "step": number,
        "started_ms": at_s * 1e3,
        "ended_ms": (at_s + seconds) * 1e3,
        "prefill_tokens": own[0],
        "decode_tokens": own[1],
        "batch_prefill_tokens": work.prefill,
        "batch_decode_tokens": work.decodes,
        "batch_sequences": sequences,
        "drafts": [],
    }


def _record(name, received_at, steps):
    before = [{"type": "reserved", "at_ms": 3.0}, {"type": "admitted", "at_ms": 3.5, "choice": 0}]
    return {"request_id": name, "received_at": received_at, "engine": "embedded", "events": [*before, *steps]}


def test_step_times_are_found_in_flight_records():
    found = calibrated(records(40))
    assert found.error < 0.02
    assert found.steps == 480
    for work in (Work(decodes=2, held=400), Work(decodes=1, held=150, pieces=1, prefill=200, attended=20_100)):
        assert found.timing.step_s(work) == pytest.approx(STEPS.step_s(work), rel=0.03)
    assert found.timing.between_ms == pytest.approx(1.0, rel=0.05)
    assert found.edge.before_ms == 3.0


def test_a_prompts_calls_are_counted_as_the_engine_makes_them():
    rng = random.Random(5)
    for _ in range(300):
        prompts = [(rng.choice((0, 0, 64, rng.randint(1, 500))), rng.randint(2, 90)) for _ in range(rng.randint(1, 4))]
        slots = np.repeat(np.arange(len(prompts)), [tokens for _, tokens in prompts]).astype(np.int32)
        positions = np.concatenate([np.arange(held, held + tokens) for held, tokens in prompts]).astype(np.int32)
        made = cut_by_length(slots, positions, 512)
        assert calls_of(prompts) == len(made.sizes), prompts


def test_rows_go_by_two_and_one_alone_goes_its_own_way():
    timing = MeasuredTiming(step_ms=5, prefill_ms=1, decode_ms=0, wide_ms=4, tile_ms=3, held_ms=2, alone_ms=10)
    took = [timing.step_s(Work(decodes=rows)) * 1e3 for rows in (1, 2, 3, 4, 5)]
    assert took == pytest.approx([5, 12, 15, 15, 18])
    assert timing.step_s(Work(decodes=1, held=1000)) == pytest.approx(0.015)
    assert timing.step_s(Work(decodes=1, drafted=1, held=1000)) == pytest.approx(0.014)
    # some with a guess, some without: two calls
    assert timing.step_s(Work(decodes=2, drafted=2, passes=2)) == pytest.approx(5e-3 + 2 * 4e-3 + 2 * 3e-3)


def test_a_guess_reads_all_that_is_before_it():
    drafts = [{"choice": 0, "proposed": 3, "accepted": 3}]
    prompt = _step(1, 0.0, 0.1, (50, 0), Work(prefill=50), 1)
    guessed = _step(2, 0.1, 0.1, (0, 4), Work(decodes=4), 1) | {"drafts": drafts}
    work = steps_of([_record("a", 100.0, [prompt, guessed])])[-1].work
    assert (work.decodes, work.drafted, work.held) == (1, 3, 4 * 50 + 1 + 2 + 3 + 4)


def test_whoever_moves_into_a_gap_is_counted_as_the_loop_moves_it():
    lives = {"a": (0, 1, 6), "b": (1, 1, 3), "c": (2, 1, 6), "d": (3, 1, 4)}
    found = []
    for name, (slot, first, last) in lives.items():
        steps = []
        for number in range(first, last + 1):
            there = sum(begun <= number <= ended for _, begun, ended in lives.values())
            steps.append(_step(number, number * 0.1, 0.05, (0, 1), Work(decodes=there), there))
        record = _record(name, 100.0, steps)
        record["events"][1] |= {"slot": slot}
        found.append(record)
    # b leaves: d, the highest, sits down in 1; then d leaves, and c, in 2, does
    assert [one.work.moved for one in steps_of(found)] == [0, 0, 0, 1, 1, 0]
    assert MeasuredTiming(step_ms=1, prefill_ms=0, decode_ms=0, moved_ms=4).step_s(Work(decodes=1, moved=2)) == 0.009


def test_a_gap_in_the_simulated_slots_costs_a_move():
    moving = msgspec.structs.replace(TIMING, moved_ms=50.0)
    # the one in the middle ends first: its slot is filled by the last
    arrivals = [Arrival(0.0, 20, 40), Arrival(0.0, 20, 8), Arrival(0.0, 20, 40)]
    still, moved = (simulate(arrivals, timing, PLACE) for timing in (TIMING, moving))
    assert moved[1].ended_s == still[1].ended_s
    assert moved[2].ended_s == pytest.approx(still[2].ended_s + 0.05)


def test_only_steps_that_are_wholly_known_count():
    known = records(40)
    assert len(steps_of(known[1:])) == len(steps_of(known)) - 12
    two_choices = known[0] | {"events": [*known[0]["events"], {"type": "admitted", "at_ms": 3.5, "choice": 1}]}
    assert len(steps_of([two_choices, *known[1:]])) == len(steps_of(known[1:]))
    with pytest.raises(ConfigError, match="30 steps"):
        calibrated(known[:2])


def test_all_steps_together_take_what_they_took():
    steps = steps_of(records(40))
    slow = [
        msgspec.structs.replace(one, seconds=one.seconds * (3 if at % 9 == 0 else 1)) for at, one in enumerate(steps)
    ]
    timing = fit_steps(slow)
    told = sum(timing.step_s(one.work) for one in slow)
    assert told == pytest.approx(sum(one.seconds for one in slow))


def test_how_answers_repeat_themselves_is_read_from_drafts():
    steps = [_step(number, 0.0, 0.1, (0, 1), Work(decodes=1), 1) for number in range(40)]
    drafted = [one | {"drafts": [{"choice": 0, "proposed": 4, "accepted": 4}]} for one in steps[:5]]
    wrong = [one | {"drafts": [{"choice": 0, "proposed": 4, "accepted": 1}]} for one in steps[:1]]
    found = answers_of([_record("a", 0.0, [*steps[:25], *drafted, *wrong, *steps[25:]])])
    assert found.leave == pytest.approx(1 / 22)
    assert found.enter == pytest.approx(1 / 35)
    assert answers_of([_record("a", 0.0, steps)]) == Answers()
    assert edge_of([]).before_ms == 0


def test_parts_are_the_fields_of_a_timing():
    names = {f"{name}_ms" for name in parts_of(Work())}
    assert names < set(MeasuredTiming.__struct_fields__)


def test_a_calibration_is_read_back_or_refused(tmp_path):
    file = tmp_path / "timing.json"
    written = Calibration(timing=TIMING, room=Room(slots=4, cells_per_slot=256, cells=1024))
    file.write_bytes(msgspec.json.encode(written))
    assert read_calibration(file) == written
    for text, said in (("{", "timing.json"), ('{"kind": "x", "timing": {"step_ms": 1}}', "prefill_ms")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=said):
            read_calibration(file)
    file.write_bytes(msgspec.json.encode(msgspec.structs.replace(written, kind="x")))
    with pytest.raises(ConfigError, match="kind is 'x'"):
        read_calibration(file)


def test_what_was_said_is_guessed_ahead_where_it_could_be():
    drafting = msgspec.structs.replace(CACHED, drafts=True)
    # a token more in a pass costs little beside the pass
    cheap = MeasuredTiming(step_ms=20, prefill_ms=1, decode_ms=1)
    rng = random.Random(2)
    asked = tuple(rng.randrange(40_000) for _ in range(150))
    new, again = tuple(rng.randrange(40_000) for _ in range(100)), asked[20:120]
    fresh, quoted = (
        simulate([Arrival(0.0, 150, 100, prompt_ids=asked, output_ids=said)], cheap, drafting)[0]
        for said in (new, again)
    )
    assert fresh.tokens == quoted.tokens == 100
    assert (quoted.tpot_s or 1) < 0.5 * (fresh.tpot_s or 0)


def test_prompts_that_are_known_share_what_they_share():
    same, other = (tuple(range(start, start + 300)) for start in (0, 1000))
    said = (7,) * 10
    asked = [(0.0, same), (5.0, other), (10.0, (*same[:150], *other[150:]))]
    arrivals = [Arrival(at_s, 300, 10, prompt_ids=ids, output_ids=said) for at_s, ids in asked]
    assert [one.cached for one in simulate(arrivals, TIMING, CACHED)] == [0, 0, 128]
    turns = [
        Arrival(0.0, 300, 10, conversation="a", prompt_ids=same, output_ids=said),
        Arrival(0.0, 350, 10, 0, "a", 310, (*same, *said, *range(40)), said),
    ]
    assert simulate(turns, TIMING, CACHED)[1].cached == 256


def lines(*told):
    return "\n".join(json.dumps(line) for line in told)


def test_conversations_in_a_trace(tmp_path):
    file = tmp_path / "trace.jsonl"
    begun = {"at_s": 3.0, "input_tokens": 100, "output_tokens": 5, "conversation": 7}
    file.write_text(lines(begun, begun | {"at_s": None, "repeated_tokens": 900}))
    first, second = read_trace(file)
    assert (first.conversation, first.repeated, second.repeated, second.at_s) == ("7", 0, 99, 0.0)
    for field, value in (("repeated_tokens", -1), ("cached_tokens", 10**7), ("output_tokens", 0)):
        file.write_text(lines(begun, begun | {field: value}))
        with pytest.raises(ConfigError, match=f"line 2: {field} is {value}"):
            read_trace(file)


def test_tokens_in_a_trace_are_as_many_as_it_says(tmp_path):
    file = tmp_path / "trace.jsonl"
    one = {"at_s": 0.0, "input_tokens": 2, "output_tokens": 1}
    file.write_text(lines(one, one | {"prompt_token_ids": [5, 6], "output_token_ids": [7]}))
    assert [(found.prompt_ids, found.output_ids) for found in read_trace(file)] == [((), ()), ((5, 6), (7,))]
    for more, said in (
        ({"prompt_token_ids": [5, 6]}, "output_token_ids has 0"),
        ({"prompt_token_ids": [5], "output_token_ids": [7]}, "has 1 tokens"),
        ({"prompt_token_ids": [5, -6], "output_token_ids": [7]}, "has -6"),
    ):
        file.write_text(lines(one, one | more))
        with pytest.raises(ConfigError, match=f"line 2: .*{said}"):
            read_trace(file)


def test_steps_are_as_uneven_as_they_were_seen():
    rng = random.Random(4)
    steps = records(40)
    for record in steps:
        for event in record["events"]:
            if event["type"] == "step":
                # a step has one length, whoever tells it
                rng.seed(event["step"])
                event["ended_ms"] += (event["ended_ms"] - event["started_ms"]) * rng.gauss(0.0, 0.08)
    found = calibrated(steps)
    assert found.spread == pytest.approx(0.08, rel=0.2)
    assert calibrated(records(40)).spread < 0.01
    twice = [[one.step_s(Work(decodes=4)) for _ in range(400)] for one in (Uneven(TIMING, 0.1, 1) for _ in (0, 1))]
    assert twice[0] == twice[1]
    assert statistics.mean(twice[0]) == pytest.approx(TIMING.step_s(Work(decodes=4)), rel=0.02)
    assert statistics.stdev(twice[0]) == pytest.approx(0.1 * TIMING.step_s(Work(decodes=4)), rel=0.15)


def test_several_draws_are_told_by_their_medians_and_ends():
    draws = [[Served(0.0, ttft, 0.1, 10, 2.0 + ttft)] for ttft in (0.3, 0.9, 0.4)]
    found = trace_document(draws)
    assert found["ttft_ms"]["p50"] == 400.0
    assert found["output_tokens_per_s"] == pytest.approx(10 / 2.4)
    assert found["between_draws"]["ttft_p50_ms"] == [300.0, 900.0]
    assert "between_draws" not in trace_document(draws[:1])
    refused = trace_document([[Served(0.0, None, None, 0, 1.0)]] * 3)
    assert (refused["ttft_ms"], refused["refused"]) == (None, 1)


def test_the_command_takes_a_calibration_and_a_closed_loop(tmp_path):
    trace, timing = tmp_path / "trace.jsonl", tmp_path / "timing.json"
    trace.write_text(lines(*[{"input_tokens": 30, "output_tokens": 5}] * 6))
    room = Room(slots=4, cells_per_slot=256, cells=1024, drafts=True)
    timing.write_bytes(msgspec.json.encode(Calibration(timing=TIMING, room=room, spread=0.05)))
    words = ["simulate", "--trace", str(trace), "--timing", str(timing), "--concurrency", "2"]
    ran = CliRunner().invoke(app, [*words, "--json"])
    found = json.loads(ran.stdout)
    assert found["requests"] == 6
    assert found["refused"] == 0
    assert found["ttft_ms"]["p99"] >= found["ttft_ms"]["p50"] > 0
    low, high = found["between_draws"]["ttft_p50_ms"]
    assert low <= found["ttft_ms"]["p50"] <= high
    told = CliRunner().invoke(app, words).stdout
    assert "prefix cache" not in told
    assert "steps that vary by 5.0%" in told
    for more, said in ((["--cells", "20"], "35 tokens"), (["--timing", "1,nan,1"], "0 to")):
        ran = CliRunner().invoke(app, [*words, *more])
        assert said in str(ran.exception)
