"""Segments partition the wall time, whatever intervals are laid over each other."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hitsend.core.segments import _RANKS, SEGMENTS, Timeline

_INTERVALS = st.lists(st.tuples(st.sampled_from(sorted(_RANKS)), st.integers(-5, 105), st.integers(0, 60)), max_size=40)


@given(_INTERVALS)
def test_segments_add_up_to_the_wall_time(intervals: list[tuple[str, int, int]]) -> None:
    timeline = Timeline()
    for name, start, length in intervals:
        timeline.add(name, float(start), float(start + length))
    spent = timeline.partition(0.0, 100.0)
    assert sum(spent.values()) == pytest.approx(100_000.0)
    assert tuple(spent) == SEGMENTS
    assert min(spent.values()) >= 0.0


@given(_INTERVALS)
def test_order_of_arrival_does_not_matter(intervals: list[tuple[str, int, int]]) -> None:
    forth, back = Timeline(), Timeline()
    for name, start, length in intervals:
        forth.add(name, float(start), float(start + length))
    for name, start, length in reversed(intervals):
        back.add(name, float(start), float(start + length))
    assert forth.partition(0.0, 100.0) == pytest.approx(back.partition(0.0, 100.0))


def test_a_step_outranks_a_blocked_client() -> None:
    timeline = Timeline()
    timeline.add("client_blocked", 1.0, 5.0)
    timeline.add("decode_shared", 0.0, 3.0)
    spent = timeline.partition(0.0, 6.0)
    assert spent["decode_shared"] == pytest.approx(3000.0)
    assert spent["client_wait"] == pytest.approx(2000.0)
    assert spent["edge"] == pytest.approx(1000.0)
