"""Lines begin while nobody else wants the engine, and never have more than their share of it."""

import asyncio

import msgspec
import pytest

from hitsend.serve.batching.gate import Gate, Lane

IDLE = Lane("e", slots=8, running=0, waiting=0)


@pytest.mark.parametrize(
    ("lane", "weight", "is_open"),
    [
        (IDLE, 1, True),
        (IDLE, 99, True),  # more than lines may have at all: then all of it
        (msgspec.structs.replace(IDLE, waiting=1), 1, False),
        (msgspec.structs.replace(IDLE, running=8), 1, False),
        (msgspec.structs.replace(IDLE, running=7), 1, True),
        (msgspec.structs.replace(IDLE, running=7), 2, False),
        (Lane("one slot", 1, 0, 0), 1, True),
        (Lane("not loaded", 0, 0, 0), 1, True),
    ],
)
def test_when_a_line_may_begin(lane, weight, is_open):
    assert Gate(lambda _: lane, 0.5).has_room(lane, weight) is is_open


async def test_a_share_is_never_exceeded_and_processes_divide_it():
    gate, inside, most = Gate(lambda _: IDLE, 0.5, num_processes=2), 0, 0

    async def one():
        nonlocal inside, most
        async with gate.place("m", 1, lambda: False):
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(0)
            inside -= 1

    await asyncio.gather(*(one() for _ in range(20)))
    assert most == 2


async def test_while_others_run_lines_go_one_after_the_other():
    busy = msgspec.structs.replace(IDLE, running=3)
    gate = Gate(lambda _: busy, 0.5)
    async with gate.place("m", 1, lambda: False):
        assert not gate.has_room(busy, 1)
        assert gate.has_room(msgspec.structs.replace(IDLE, running=1), 1)  # that one is the line itself
    assert gate.has_room(busy, 1)


async def test_it_opens_when_nobody_waits_any_more_and_lets_go_of_the_halted():
    lane, is_halted = msgspec.structs.replace(IDLE, waiting=1), False
    gate, passed = Gate(lambda _: lane, 0.5), asyncio.Event()

    async def one():
        async with gate.place("m", 1, lambda: is_halted):
            passed.set()

    task = asyncio.create_task(one())
    await asyncio.sleep(0.1)
    assert not passed.is_set()
    lane = IDLE
    await task
    assert passed.is_set()
    lane, task = msgspec.structs.replace(IDLE, waiting=1), asyncio.create_task(one())
    is_halted = True
    await task


async def test_nobody_s_model_has_no_gate():
    async with Gate(lambda _: None, 0.5).place("m", 1, lambda: False):
        pass
