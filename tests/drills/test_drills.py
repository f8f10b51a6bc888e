"""The drills in small, so that they can't rot; `make drill` runs them in full."""

import asyncio

import pytest

from hitsend.serve.database.connection import database_url
from tests.drills.batches import BATCH_POINTS, NUM_LINES, batch_crash, judge_batch, line
from tests.drills.crashes import BILLED, NOTHING, POINTS, RECOVERED, crash, judge, launcher
from tests.drills.outages import outages
from tests.postgres import binaries, postgres, say_missing

pytestmark = pytest.mark.slow


@pytest.fixture
def durable():
    if binaries() is None:
        say_missing()
        pytest.skip("PostgreSQL is not installed")
    with postgres(is_durable=True) as server:
        yield server


async def test_killed_at_every_point_on_sqlite(tmp_path):
    async with launcher() as at:
        for number, point in enumerate(POINTS):
            tally = await crash(at, database_url(None, tmp_path / str(number)), [point] * 2)
            assert (tally.faults, tally.lives) == ([], 2), point


async def test_killed_at_every_point_on_postgresql(durable):
    async with launcher() as at:
        for point in POINTS:
            tally = await crash(at, await asyncio.to_thread(durable.make), [point])
            assert (tally.faults, tally.lives) == ([], 1), point


async def test_killed_while_a_batch_runs_on_sqlite(tmp_path):
    async with launcher() as at:
        for number, point in enumerate(BATCH_POINTS[1::2]):
            tally = await batch_crash(at, database_url(None, tmp_path / str(number)), point, 2)
            assert tally.faults == [], point
            assert tally.lives >= 1, point


async def test_killed_while_a_batch_runs_on_postgresql(durable):
    async with launcher() as at:
        for point in ("settlement durable", "ending durable"):
            tally = await batch_crash(at, await asyncio.to_thread(durable.make), point, 2)
            assert tally.faults == [], point
            assert tally.lives >= 1, point


async def test_postgresql_shut_down_at_once_while_requests_settle(durable):
    async with launcher() as at:
        tally = await outages(at, durable, await asyncio.to_thread(durable.make), 3)
        assert (tally.faults, tally.lives) == ([], 3)
        assert tally.rows > 3


@pytest.mark.model
async def test_killed_with_the_real_model(tmp_path):
    async with launcher() as at:
        points = ("hold durable", "mid-stream", "settlement uncommitted", "response sent")
        tally = await crash(at, database_url(None, tmp_path), points, real=True)
        assert (tally.faults, tally.lives) == ([], len(points))


ROW = {"request_id": "a", "hold_id": "h", "reason": BILLED, "prompt_tokens": 12, "completion_tokens": 28}
ROW |= {"cost_microusd": 95, "is_estimate": False, "price_input_picousd": 450_000, "price_output_picousd": 3_200_000}


@pytest.mark.parametrize(
    ("rows", "holds", "ending"),
    [
        ([ROW], 1, BILLED),
        ([ROW, ROW], 0, BILLED),
        ([ROW, ROW | {"request_id": "b", "hold_id": "g"}], 0, BILLED),
        ([], 0, BILLED),
        ([ROW], 0, NOTHING),
        ([ROW | {"reason": RECOVERED}], 0, RECOVERED),
        ([ROW | {"cost_microusd": 96}], 0, BILLED),
        ([ROW | {"completion_tokens": 27, "cost_microusd": 92}], 0, BILLED),
    ],
)
def test_the_judge_sees_every_fault(rows, holds, ending):
    assert judge([ROW], 0, {"a": {BILLED}}) == []
    assert judge(rows, holds, {"a": {ending}}) != []


GOOD = {"status": "completed", "request_counts": {"total": NUM_LINES, "completed": NUM_LINES - 1, "failed": 1}}
ANSWERS = [[line(number) for number in range(1, NUM_LINES)], [line(NUM_LINES)]]
BILLED_ROWS = [{"request_id": f"batch_a-{number}", "cost_microusd": 95} for number in range(1, NUM_LINES)]


@pytest.mark.parametrize(
    ("batch", "answers", "rows", "holds"),
    [
        (GOOD | {"status": "expired"}, ANSWERS, BILLED_ROWS, 0),
        (GOOD | {"request_counts": {"total": NUM_LINES, "completed": NUM_LINES, "failed": 0}}, ANSWERS, BILLED_ROWS, 0),
        (GOOD, [ANSWERS[0][1:], ANSWERS[1]], BILLED_ROWS, 0),
        (GOOD, [[ANSWERS[0][0], *ANSWERS[0]], ANSWERS[1]], BILLED_ROWS, 0),
        (GOOD, ANSWERS, BILLED_ROWS[1:], 0),
        (GOOD, ANSWERS, [*BILLED_ROWS, BILLED_ROWS[0] | {"request_id": "batch_a-1-2"}], 0),
        (GOOD, ANSWERS, BILLED_ROWS, 1),
    ],
)
def test_the_judge_of_batches_sees_every_fault(batch, answers, rows, holds):
    repeat = {"request_id": "batch_a-1-2", "cost_microusd": 0}
    assert judge_batch(GOOD, ANSWERS, [*BILLED_ROWS, repeat], 0) == []
    assert judge_batch(batch, answers, rows, holds) != []
