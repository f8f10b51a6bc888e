"""engine/calls.py: every row once, order kept, equal lengths, pieces that end at multiples of 64."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hitsend.serve.engine.calls import BLAS_FROM, PIECE, cut_by_length, cut_in_order

RUNS = st.lists(st.tuples(st.integers(0, 700), st.integers(1, 400)), min_size=1, max_size=12)


def batch(runs: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    slots = np.concatenate([np.full(n, slot, np.int32) for slot, (_, n) in enumerate(runs)])
    positions = np.concatenate([np.arange(p, p + n, dtype=np.int32) for p, n in runs])
    return slots, positions


@given(RUNS, st.sampled_from([1, 7, 64, 200, 512]))
def test_every_row_is_in_one_call_in_its_sequences_order(runs: list[tuple[int, int]], most: int) -> None:
    slots, positions = batch(runs)
    calls = cut_by_length(slots, positions, most)
    order = np.arange(len(slots)) if calls.order is None else calls.order
    assert sorted(order.tolist()) == list(range(len(slots)))
    assert sum(calls.sizes) == len(slots)
    assert max(calls.sizes) <= most
    for slot in range(len(runs)):
        own = positions[order][slots[order] == slot]
        assert (np.diff(own) == 1).all()


@given(RUNS, st.sampled_from([64, 128, 512]))
def test_the_cuts_of_a_sequence_depend_on_nothing_but_itself(runs: list[tuple[int, int]], most: int) -> None:
    slots, positions = batch(runs)
    calls = cut_by_length(slots, positions, most)
    order = np.arange(len(slots)) if calls.order is None else calls.order
    at = 0
    for size in calls.sizes:
        rows = order[at : at + size]
        at += size
        _, counts = np.unique(slots[rows], return_counts=True)
        assert len(set(counts.tolist())) == 1
        if counts[0] >= PIECE:
            for slot in np.unique(slots[rows]):
                own = positions[rows][slots[rows] == slot]
                assert own[0] % PIECE == 0
                assert (own[-1] + 1) % PIECE == 0


def test_a_batch_of_decodes_is_one_call() -> None:
    slots = np.arange(32, dtype=np.int32)
    assert cut_by_length(slots, slots + 100, 512) == (None, [32])


def test_in_order_cuts_by_size_only() -> None:
    assert cut_in_order(1000, 300).sizes == [300, 300, 300, 100]


def test_decodes_stay_below_what_a_blas_backend_takes_where_they_are_few() -> None:
    def sizes(num_decodes: int, prompt: int = 0, *, has_blas: bool = True) -> list[int]:
        slots, positions = batch([(9, 1)] * num_decodes + ([(0, prompt)] if prompt else []))
        return cut_by_length(slots, positions, 512, has_blas=has_blas).sizes

    assert [sizes(n) for n in (1, 31, 32, 33, 62)] == [[1], [31], [16, 16], [17, 16], [31, 31]]
    assert [sizes(n) for n in (63, 64, 200)] == [[63], [64], [200]]
    assert sizes(32, has_blas=False) == [32]
    assert sorted(sizes(40, 128)) == [20, 20, 128]
    assert max(sizes(62)) < BLAS_FROM
