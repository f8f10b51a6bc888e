"""Sequences of several adapters in one loop."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hitsend.serve.loop.messages import Abort
from hitsend.serve.loop.roster import LoopLimits
from tests.loop.driven import Driven, submit

NAMES = frozenset({"red", "blue"})


def adapted(request_id, adapter, *args, **fields):
    return msgspec.structs.replace(submit(request_id, *args, **fields), adapter=adapter)


def driven(**fields):
    return Driven(adapter_names=NAMES, **fields)


def alone(command):
    one = driven(num_slots=len(command.seeds))
    one.handle(command)
    one.run()
    return [one.tokens(command.request_id, choice) for choice in range(len(command.seeds))]


def mixed(count, **fields):
    names = (None, "red", "blue")
    return [adapted(f"r{i}", names[i % 3], 3 + 7 * i % 40, seeds=(i,), **fields) for i in range(count)]


def test_a_call_has_one_adapter_and_every_sequence_its_own_tokens():
    house = driven(num_slots=6)
    commands = mixed(6)
    house.handle(*commands)
    house.run()
    for command in commands:
        assert [house.tokens(command.request_id)] == alone(command)
    assert {batch.adapter for batch in house.decoder.batches} == {None, *NAMES}


def test_the_same_prompt_says_something_else_with_each_adapter():
    said = {tuple(alone(adapted("a", name))[0]) for name in (None, "red", "blue")}
    assert len(said) == 3


def test_every_step_serves_every_adapter():
    house = driven(num_slots=3, limits=LoopLimits(step_tokens=64, check_every_step=True))
    house.handle(*mixed(3, max_tokens=20))
    for _ in range(10):
        house.step()
    assert [len(house.tokens(f"r{i}")) for i in range(3)] == [10, 10, 10]


def test_choices_of_one_request_share_its_prompt_with_its_adapter():
    command = adapted("a", "red", 20, seeds=(1, 2))
    house = driven(num_slots=3)
    house.handle(submit("b", 20), command)
    house.run()
    assert [house.tokens("a", choice) for choice in range(2)] == [
        alone(adapted("a", "red", 20, seeds=(seed,)))[0] for seed in (1, 2)
    ]
    assert len(house.decoder.copies) == 1


def test_an_unknown_adapter_is_refused():
    house = driven()
    house.handle(adapted("a", "green"))
    house.settle()
    assert (house.done["a", 0].code, "green" in house.done["a", 0].message) == ("invalid_request", True)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(
        st.tuples(st.sampled_from([None, "red", "blue"]), st.integers(1, 40), st.integers(1, 12)),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 5),
    st.integers(16, 200),
    st.data(),
)
def test_whatever_comes_each_has_what_it_would_have_alone(asked, num_slots, num_cells, data):
    """Unified cells that are too few for all: preempted ones are computed again, with their own adapter."""
    cells = max(num_cells, 60)
    house = driven(num_slots=num_slots, num_cells=cells, cells_per_slot=cells)
    commands = [adapted(f"r{i}", name, size, max_tokens=most) for i, (name, size, most) in enumerate(asked)]
    aborted = set()
    for command in commands:
        house.handle(command)
        for _ in range(data.draw(st.integers(0, 2))):
            house.step()
        if data.draw(st.integers(0, 9)) == 0:
            house.handle(Abort(command.request_id))
            aborted.add(command.request_id)
    house.run()
    for command in commands:
        if command.request_id not in aborted:
            assert [house.tokens(command.request_id)] == alone(command)
    assert house.decoder.cells_filled == 0


def test_the_fake_itself_refuses_a_cache_of_another_adapter():
    from hitsend.serve.loop.decoder import Batch
    from hitsend.testing import FakeMisused

    house = driven()
    one, yes = np.array([1], np.int32), np.array([True])
    house.decoder.decode(Batch(one, one * 0, one * 0, yes, "red"))
    with pytest.raises(FakeMisused, match="blue"):
        house.decoder.decode(Batch(one, one, one * 0, yes, "blue"))
