"""Many requests to upstreams that fail in every way, and to routes over them: the ledger has what they produced."""

import pytest

from tests.drills.accounting import WAYS, Emulator, Report, Run, account, judge

NUM_REQUESTS = 150
"""`make drill` asks 1,000, with the bundled model beside them."""


@pytest.mark.slow  # hundreds of calls
async def test_every_row_is_what_its_upstream_produced(tmp_path):
    report = await account(tmp_path, NUM_REQUESTS)
    assert report.faults == []
    assert report.num_runs > NUM_REQUESTS
    assert all(report.tokens[engine] for engine in "abc")
    assert report.neurons_micro


def row(**fields):
    fields = {
        "request_id": "q1",
        "engine": "a",
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "is_estimate": False,
    } | fields
    return {"neurons_micro": None, "cost_microusd": fields["prompt_tokens"] + 2 * fields["completion_tokens"]} | fields


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [row(completion_tokens=4)],
        [row(prompt_tokens=6)],
        [row(cost_microusd=12)],
        [row(), row(request_id="q1/tried/a")],
        [row(), row()],
        [row(), row(request_id="q2")],
        [row(engine="c", neurons_micro=1)],
    ],
)
def test_the_drill_would_see_a_wrong_row(rows):
    emulator, report = Emulator(1, stalls=False), Report()
    emulator.runs["q1"] = [Run("a", "whole", 3, (5, 3))]
    judge(report, [row()], emulator)
    assert report.faults == []
    judge(report, rows, emulator)
    assert report.faults


def test_all_ways_are_gone():
    assert len(set(WAYS)) == 11
