import pytest
from hypothesis import given
from hypothesis import strategies as st

from hitsend.serve.loop.kv import AccountingBroken, CellPool


def test_slots_are_taken_lowest_first():
    pool = CellPool(num_slots=3, num_cells=30, cells_per_slot=10)
    assert [pool.take(2), pool.take(2), pool.take(2)] == [0, 1, 2]
    pool.release(2)
    pool.release(0)
    assert pool.take(1) == 0


def test_per_stream_mode_is_bounded_by_the_slot_only():
    pool = CellPool(num_slots=2, num_cells=20, cells_per_slot=10)
    assert not pool.is_shared
    pool.take(10)
    assert pool.can_take(10)
    assert not pool.can_take(11)


def test_unified_mode_is_bounded_by_the_pool():
    pool = CellPool(num_slots=2, num_cells=12, cells_per_slot=10)
    assert pool.is_shared
    first = pool.take(10)
    assert not pool.can_take(3)
    second = pool.take(2)
    pool.fill(second, 2)
    assert not pool.hold_next(second)
    pool.release(first)
    assert pool.hold_next(second)
    assert pool.num_held_cells == 3


def test_a_slot_never_grows_beyond_its_own_cells():
    pool = CellPool(num_slots=2, num_cells=8, cells_per_slot=4)
    slot = pool.take(4)
    pool.fill(slot, 4)
    assert pool.num_free_cells == 4
    assert not pool.hold_next(slot)


def test_misuse_is_refused():
    pool = CellPool(num_slots=2, num_cells=8, cells_per_slot=4)
    slot = pool.take(2)
    with pytest.raises(AccountingBroken, match="fills 3 cells and holds 2"):
        pool.fill(slot, 3)
    with pytest.raises(AccountingBroken, match="slot 1 is not held"):
        pool.release(1)
    with pytest.raises(AccountingBroken, match="5 cells"):
        pool.take(5)
    with pytest.raises(AccountingBroken, match="move"):
        pool.move(1, 0)
    with pytest.raises(AccountingBroken, match="don't fit"):
        CellPool(num_slots=2, num_cells=9, cells_per_slot=4)
    assert pool.check() == []


def test_check_finds_what_was_broken_on_purpose():
    pool = CellPool(num_slots=2, num_cells=8, cells_per_slot=4)
    slot = pool.take(3)
    pool.fill(slot, 2)
    assert pool.check({slot: 2}) == []
    assert "sequences computed" in pool.check({slot: 3})[0]
    assert "sequences computed" in pool.check({})[0]
    pool.num_free_cells += 1
    assert "3 cells held and 6 free are not 8" in pool.check()[0]
    pool.num_free_cells -= 1
    pool._free_slots.append(slot)
    assert "not all slots" in pool.check()[0]
    pool._free_slots.remove(slot)
    pool._filled[slot] = 5
    assert "5 filled, 3 held" in pool.check()[0]


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["take", "hold", "fill", "release", "move"]), st.integers(0, 5), st.integers(0, 9)),
    max_size=60,
)


@given(num_slots=st.integers(1, 6), cells_per_slot=st.integers(1, 8), missing=st.integers(0, 20), operations=OPERATIONS)
def test_cells_are_conserved_whatever_happens(num_slots, cells_per_slot, missing, operations):
    num_cells = max(1, num_slots * cells_per_slot - missing)
    pool = CellPool(num_slots, num_cells, cells_per_slot)
    expected: dict[int, tuple[int, int]] = {}
    for name, slot, number in operations:
        before = dict(expected)
        try:
            if name == "take":
                expected[pool.take(number)] = (number, 0)
            elif name == "hold" and slot in expected:
                held, filled = expected[slot]
                if pool.hold_next(slot) and held == filled:
                    expected[slot] = (held + 1, filled)
            elif name == "fill" and slot in expected:
                pool.fill(slot, number)
                expected[slot] = (expected[slot][0], expected[slot][1] + number)
            elif name == "release":
                pool.release(slot)
                del expected[slot]
            elif name == "move" and number < num_slots:
                pool.move(slot, number)
                expected[number] = expected.pop(slot)
        except AccountingBroken:
            assert expected == before
        assert pool.check({slot: filled for slot, (_, filled) in expected.items()}) == []
        assert pool.num_held_cells == sum(held for held, _ in expected.values())
        assert pool.num_held_slots == len(expected)
