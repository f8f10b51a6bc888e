import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hitsend.core.segments import SEGMENTS
from hitsend.inspect.explain import TEXTS, explain
from tests.cli.sample import record

PRICES = {"price_input_picousd": 450_000, "price_output_picousd": 3_200_000, "price_cached_input_picousd": 45_000}


def step(at, ms, mine, batch, **more):
    return {
        "type": "step",
        "at_ms": at,
        "started_ms": at - ms,
        "step": 1,
        "prefill_tokens": mine[0],
        "decode_tokens": mine[1],
        "batch_prefill_tokens": batch[0],
        "batch_decode_tokens": batch[1],
        "batch_sequences": 2,
    } | more


def segments(**ms):
    return [{"name": name, "ms": ms.get(name, 0.0)} for name in SEGMENTS]


def causes_of(explained):
    return {cause.name: cause.ms for cause in explained.causes if cause.ms}


def test_a_step_is_divided_by_the_weight_of_its_tokens():
    events = [
        step(20.0, 20.0, (100, 0), (100, 0)),  # 0.2 ms per prefilled token
        step(60.0, 40.0, (100, 0), (150, 25)),  # 150 + 2 * 25 = 200: half of it its own, a quarter each of the others'
        step(70.0, 10.0, (0, 1), (0, 25)),  # 0.4 ms per decoded token: the weight is 2
        step(90.0, 20.0, (0, 1), (50, 25)),  # half of it somebody's prompt
    ]
    spent = segments(edge=4.0, wait=6.0, prefill_own=20.0, prefill_shared=40.0, decode_shared=30.0)
    explained = explain(record(wall_ms=100.0, segments=spent, events=events, ledger=None))
    assert causes_of(explained) == pytest.approx(
        {
            "edge": 4.0,
            "waiting": 6.0,
            "own_prefill": 40.0,
            "others_prefill": 10.0 + 10.0,
            "others_decode": 10.0,
            "decode_shared": 20.0,
        }
    )
    assert explained.largest == "own_prefill"
    assert sum(cause.share for cause in explained.causes) == pytest.approx(1.0)


def test_what_would_have_changed_it_names_what_it_rests_on():
    usage = {"prompt_tokens": 300, "completion_tokens": 40, "cached_tokens": 100, "reasoning_tokens": 30}
    row = PRICES | {"cost_microusd": 222}
    spent = segments(edge=10.0, wait=20.0, prefill_own=100.0, decode_own=80.0)
    explained = explain(record(wall_ms=210.0, segments=spent, events=[], usage=usage, ledger=row))
    changes = {change.name: change for change in explained.changes}
    assert changes["prefix_hit"].saved_ms == pytest.approx(100.0 * 199 / 200)
    assert changes["prefix_hit"].saved_microusd == 199 * 405_000 // 1_000_000
    assert changes["shorter_prompt"].saved_ms == pytest.approx(50.0)
    assert changes["thinking_off"].saved_ms == pytest.approx(60.0)
    assert changes["thinking_off"].saved_microusd == 96
    assert changes["higher_tier"].saved_ms == 20.0
    assert changes["speculation"].saved_ms == pytest.approx(80.0 * (1 - 1 / 1.9375), rel=1e-3)
    assert "assumed" in changes["speculation"].basis
    assert all(change.basis for change in explained.changes)
    assert [change.saved_ms for change in explained.changes] == sorted(
        (change.saved_ms for change in explained.changes), reverse=True
    )


def test_the_bill_by_kind_of_token_adds_up_to_the_row():
    usage = {"prompt_tokens": 1001, "completion_tokens": 37, "cached_tokens": 333, "reasoning_tokens": 11}
    row = PRICES | {"cost_microusd": 434}
    explained = explain(record(usage=usage, ledger=row))
    cost = {kind.kind: kind for kind in explained.cost}
    assert {kind: one.num_tokens for kind, one in cost.items()} == {
        "input": 668,
        "cached_input": 333,
        "reasoning": 11,
        "output": 26,
    }
    assert sum(one.microusd for one in explained.cost) == 434
    assert cost["reasoning"].microusd == 35
    assert explain(record(ledger=None)).cost == ()


def test_a_miss_is_told_with_its_place():
    matched = {
        "type": "prefix_matched",
        "at_ms": 1.0,
        "choice": 0,
        "prompt_tokens": 300,
        "matched_tokens": 120,
        "cached_tokens": 64,
        "source": "saved",
        "differs_at": 120,
        "cached_token_id": 7,
        "prompt_token_id": 9,
        "cached_text": None,
        "prompt_text": None,
    }
    told = explain(record(events=[matched])).cache
    assert told.startswith("64 of 300 prompt tokens came from the cache (saved); 120 were known, the rest could not be")
    for limit, why in (
        ("checkpoint", "had no state to go on from"),
        ("step", "is less than a step"),
        ("place", "was no"),
    ):
        told = explain(record(events=[matched | {"limited_by": limit}])).cache
        assert f"120 were known, the rest {why}" in told
    whole = explain(record(events=[matched | {"matched_tokens": 64, "limited_by": None}])).cache
    assert whole.startswith("64 of 300 prompt tokens came from the cache (saved); they part at")
    nothing = {"matched_tokens": 0, "cached_tokens": 0, "source": None, "differs_at": None}
    told = explain(record(events=[matched | nothing])).cache
    assert (
        told == "0 of 300 prompt tokens came from the cache; nothing of its tenant that is still there begins like it"
    )
    told = explain(record(events=[matched])).cache
    assert told.endswith("they part at token 120: token 7 in the cache, token 9 here")
    told = explain(record(events=[matched | {"cached_text": " Monday", "prompt_text": " Tuesday"}])).cache
    assert told.endswith("' Monday' in the cache, ' Tuesday' here")
    assert explain(record()).cache is None


COUNTS = (st.integers(0, 99), st.integers(0, 4), st.integers(0, 99), st.integers(0, 30))
STEPS = st.lists(st.tuples(*COUNTS, st.floats(0, 50)), max_size=12)


@given(st.lists(st.floats(0, 1e5), min_size=len(SEGMENTS), max_size=len(SEGMENTS)), STEPS, st.booleans())
def test_the_causes_always_add_up_to_the_wall_time(ms, steps, has_row):
    events = [step(1e3, took, (p, d), (p + more_p, d + more_d)) for p, d, more_p, more_d, took in steps]
    spent = [{"name": name, "ms": value} for name, value in zip(SEGMENTS, ms, strict=True)]
    row = PRICES | {"cost_microusd": 9} if has_row else None
    explained = explain(record(wall_ms=sum(ms), segments=spent, events=events, ledger=row))
    assert sum(cause.ms for cause in explained.causes) == pytest.approx(sum(ms), abs=0.01)
    assert all(cause.ms >= 0 for cause in explained.causes)
    assert [cause.name for cause in explained.causes] == list(TEXTS)
    assert all(change.saved_ms >= 0 for change in explained.changes)
    assert msgspec.json.encode(explained)


def test_a_request_that_was_refused_at_once_is_explained_too():
    refused = record(
        wall_ms=0.4,
        segments=segments(edge=0.4),
        events=[],
        usage={"prompt_tokens": 0, "completion_tokens": 0, "cached_tokens": 0, "reasoning_tokens": 0},
        ledger=None,
        state="failed",
    )
    explained = explain(refused)
    assert causes_of(explained) == {"edge": 0.4}
    assert explained.changes == ()
